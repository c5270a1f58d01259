"""Rules that choose MADGRAD's learning rate while it trains, side by side on the study's problems.

    PYTHONPATH=src python3 benchmarks/auto_candidates.py --problems digits --out runs/auto
    ... --problems imagenet,bookwiki --candidates distance,walk,madgrad --seeds 3 --data DIR

Each candidate of auto_rules.py trains with the same seeds as two references: `madgrad`, the best
fixed rate of the study's own search, which uses another seed, and `madgrad-auto`, which is
cubegrad.MADGRAD(lr="auto"). Runs that are in --out are not repeated. `digits@1000` is digits with
its loss multiplied by 1000.
"""

import argparse
import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from auto_rules import CANDIDATES, Auto
from torch import Tensor, nn
from torch.optim import Optimizer

from cubegrad.study import Problem, Setup, StudyError, Task, catalogue, methods, statistics
from cubegrad.study.methods import METHODS, Method
from cubegrad.study.progress import Progress
from cubegrad.study.records import ESTIMATED_LR, Record, Runs
from cubegrad.study.statistics import Judge, Summary
from cubegrad.study.sweep import Plan, Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

REFERENCE, SHIPPED = "madgrad", "madgrad-auto"


def with_auto_lr(name: str) -> Problem:
    """A problem of the study, or `NAME@SCALE`, that also records the rate of a candidate."""
    base, _, scale = name.partition("@")
    problem = catalogue.find(base)

    def build(setup: Setup) -> Task:
        Auto.latest = None
        task = problem.build(setup)

        def evaluate(model: nn.Module, split: Any) -> dict[str, float]:
            memories = Auto.latest.param_groups[0].get("memories") if Auto.latest else None
            rate = {"auto_lr": median(float(m["lr"]) for m in memories)} if memories else {}
            return {**task.evaluate(model, split), **rate}

        changes = scaled(task, float(scale)) if scale else {}
        return replace(task, evaluate=evaluate, **changes)

    return replace(problem, name=name, build=build)


def scaled(task: Task, scale: float) -> dict[str, Any]:
    """Changes to a task that scale its loss, or its gradients if it has its own step."""
    own, hooked = task.step, set[Optimizer]()
    if own is None:
        return {"loss": lambda model, batch: task.loss(model, batch) * scale}

    def enlarge(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch._foreach_mul_([p.grad for p in group["params"] if p.grad is not None], scale)

    def step(optimizer: Optimizer, batch: Any) -> Tensor:
        if optimizer not in hooked:
            optimizer.register_step_pre_hook(enlarge)
            hooked.add(optimizer)
        return own(optimizer, batch)

    return {"step": step}


METHODS |= {name: Method(name, partial(Auto, parts=p), (1, 1)) for name, p in CANDIDATES.items()}


def __getattr__(name: str) -> Any:
    """Lets a worker find `auto_candidates:digits`; its import also registers the methods."""
    if name.partition("@")[0] not in catalogue.NAMES:
        raise AttributeError(name)
    return partial(with_auto_lr, name)


def cell(summary: Summary, metric: str) -> str:
    """Mean ± 2 standard errors, and the rate: the fixed one, or the mean final estimate."""
    if summary.best is None:
        return f"{summary.search_diverged} of {summary.searched} diverged"
    end = summary.final[metric]
    rate = summary.final.get("auto_lr") or summary.final.get(ESTIMATED_LR)
    error = "" if end.error is None else f" ± {round(end.error, 9):.2g}"
    lost = f", {summary.diverged} diverged" if summary.diverged else ""
    return f"{end.mean:.4g}{error} ({rate.mean if rate else summary.best[0]:.2g}{lost})"


def gain(own: list[Record], fixed: list[Record], judge: Judge) -> str:
    """The improvement over the fixed rate with the same seeds."""
    by_seed = {record.settings.seed: record.last(judge.metric) for record in fixed}
    pairs = [(record.last(judge.metric), by_seed.get(record.settings.seed)) for record in own]
    sign = 1 if judge.higher_is_better else -1
    gains = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
    if len(gains) < 2:
        return ""
    average = statistics.estimate(gains)
    return f"{average.mean:+.2g} ± {round(average.error or 0, 9):.2g}"


def table(records: Iterable[Record]) -> str:
    """Two Markdown tables: results with rates, and gains over the best fixed rate."""
    columns: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        s = record.settings
        length = f"{s.preset}, {s.epochs} epochs, {s.schedule}, decay {s.decay:g}"
        columns[f"{s.problem} {record.about['metric']} ({length})"][s.method].append(record)
    results: dict[str, list[str]] = {name: [] for name in (REFERENCE, SHIPPED, *CANDIDATES)}
    gains: dict[str, list[str]] = {name: [] for name in (SHIPPED, *CANDIDATES)}
    for rows in columns.values():
        about = next(iter(rows.values()))[0].about
        judge = Judge(about["metric"], about["higher_is_better"])
        summaries = {name: statistics.summarise(members, judge) for name, members in rows.items()}
        best = summaries[REFERENCE].best if REFERENCE in summaries else None
        fixed = [r for r in rows[REFERENCE] if (r.settings.lr, r.settings.decay) == best]
        for name, cells in results.items():
            cells.append(cell(summaries[name], judge.metric) if name in summaries else "")
        for name, cells in gains.items():
            cells.append(gain(rows[name], fixed, judge))
    return (
        f"Mean ± 2 standard errors (lr at the end):\n\n{markdown(columns, results)}\n\n"
        f"Better than the best fixed lr by, seed for seed:\n\n{markdown(columns, gains)}"
    )


def markdown(heads: Iterable[str], rows: dict[str, list[str]]) -> str:
    first = ["candidate", *heads]
    lines = [first, ["---"] * len(first)]
    lines += [[name, *cells] for name, cells in rows.items() if any(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run(name: str, decay: float, options: argparse.Namespace, runs: Runs) -> None:
    """Run what one column still lacks."""
    problem = with_auto_lr(name)
    preset = problem.presets[options.preset]
    changes = {"epochs": options.epochs, "schedule": options.schedule}
    preset = replace(preset, **{key: value for key, value in changes.items() if value})
    device = "cpu" if options.preset == "cpu" else "cuda"
    place = Place(options.data)
    entries = [methods.entry(method, preset) for method in options.candidates.split(",")]
    fixed = [entry for entry in entries if entry.method == REFERENCE]
    plan = Plan(problem, options.preset, preset, fixed, device, decays=(decay,))
    machine = Machine(f"auto_candidates:{name}", place, options.workers)
    with contextlib.closing(machine):
        machine.check(problem, Setup(preset, 0, torch.device(device), place.data))
        sweep = Sweep(plan, runs, machine, Progress())
        sweep.do(
            plan.settings(entry, (1.0, decay), seed, hold_out=False)
            for entry in entries
            if entry.method != REFERENCE
            for seed in range(1, options.seeds + 1)  # seed 0 chooses the fixed rate
        )
        sweep.repeat(sweep.search(), options.seeds)
        sweep.progress.close()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--problems", default="digits", metavar="A,B")
    add("--candidates", default=",".join((REFERENCE, SHIPPED, *CANDIDATES)), metavar="A,B")
    add("--seeds", type=int, default=3)
    add("--decays", default="0", metavar="A,B")
    add("--preset", default="cpu", choices=("cpu", "gpu", "paper"))
    add("--epochs", type=int, help="overrides the preset's")
    add("--schedule", help="overrides the preset's")
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("runs/auto"))
    add("--workers", type=int, default=1)
    add("--table", action="store_true", help="run nothing, print the table of --out")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    runs = Runs(options.out)
    if not options.table:
        with runs.locked():
            runs.repair()
            for name in options.problems.split(","):
                for decay in map(float, options.decays.split(",")):
                    print(f"{name}, decay {decay:g}", file=sys.stderr, flush=True)
                    run(name, decay, options, runs)
    print(table(runs.load()[0].values()))


if __name__ == "__main__":
    import auto_candidates  # by the name that workers import, so that it is loaded only once

    try:
        auto_candidates.main()
    except StudyError as error:
        sys.exit(str(error))
