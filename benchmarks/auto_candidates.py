"""Rules that choose MADGRAD's learning rate while it trains, side by side on the study's problems.

    PYTHONPATH=src python3 benchmarks/auto_candidates.py --problems digits --out runs/auto
    ... --problems imagenet,bookwiki --candidates distance,walk,madgrad --seeds 3 --data DIR

Each candidate trains with the same seeds as `madgrad`, the best fixed rate of the study's own
search, whose seeds are not those that chose it. What is in --out already is not run again.

Every candidate has lr = d^{3/2}/√H, times the schedule's factor f. They differ in how the distance
d is estimated, in what stands for the size H of the gradients, and in where d starts.
"""

import argparse
import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cubegrad.study import StudyError, catalogue, methods, statistics
from cubegrad.study.methods import METHODS, Method
from cubegrad.study.problem import Problem, Setup, Split, Task
from cubegrad.study.progress import Progress
from cubegrad.study.records import Record, Runs
from cubegrad.study.statistics import Judge, Summary
from cubegrad.study.sweep import Plan, Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

MOMENTUM, EPS = 0.9, 1e-6
# rms(u)/√k of MADGRAD at a flat rate is d/WALK where gradients are independent and of one size.
WALK = math.sqrt(2) * (2 / 3) ** (1 / 3)


@dataclass(frozen=True)
class Parts:
    """What one candidate is made of; `says` is the row's formula."""

    says: str
    distance: str = "inner"  # of ESTIMATES
    pace: float = 1.0  # κ, C or p of the estimate
    point: str = "x"  # or z, which has no lag
    norm: str = "l1"  # or A
    scale: str = "mean"  # H^{2/3} = mean ∛ν/(Σλ)^{1/3}; or max: the largest rms gradient
    start: float = 0.01  # d_0
    relative: bool = True  # in units of rms(x_0)


CANDIDATES = {
    "distance": Parts("d = max Σλ⟨g, x_0 − x⟩/‖s‖₁, d_0 = 0.01 rms(x_0)"),
    "distance-2": Parts("the same, twice as large", pace=2.0),
    "distance-z": Parts("the same with z in place of x", point="z"),
    "distance-A": Parts("the same with √(Σ s²/∛ν · Σ∛ν) in place of ‖s‖₁", norm="A"),
    "distance-1e-4": Parts("the same with d_0 = 1e-4", start=1e-4, relative=False),
    "distance-1e-6": Parts("the same with d_0 = 1e-6", start=1e-6, relative=False),
    "distance-max": Parts("the same with H the largest rms gradient", scale="max"),
    "first": Parts("both: H the largest, d_0 = 1e-6", scale="max", start=1e-6, relative=False),
    "walk": Parts("d = max 1.24 rms(u)/√k", "walk"),
    "walk-1e-4": Parts("the same with d_0 = 1e-4", "walk", start=1e-4, relative=False),
    "drift-0.1": Parts("ln d = ln d_0 + max 0.1 Σ f ln T", "drift", 0.1),
    "drift-0.03": Parts("the same with 0.03", "drift", 0.03),
    "bet": Parts("ln d = ln d_0 + max 0.1 (Σ f q)²/Σ f q²", "bet"),
}
REFERENCE = "madgrad"

Memory = dict[str, Any]


@dataclass(frozen=True)
class Now:
    """One step, as the estimates see it."""

    factor: float
    weight: Tensor  # λ
    products: Tensor  # g (x_0 − x), or g (x_0 − z), by coordinate
    moved: Tensor  # u = x_0 − z after the step
    root: Tensor  # ∛ν


def inner(parts: Parts, m: Memory, now: Now) -> Tensor:
    """κ Σλ⟨g, x_0 − x⟩/‖s‖: for convex f and κ = 1 at most ‖x_0 − x*‖_∞."""
    m["inner"] += now.weight * total(now.products)
    if parts.norm == "A":
        norm = (total(m["s"].square() / (now.root + EPS)) * total(now.root)).sqrt()
    else:
        norm = total(m["s"].abs())
    return parts.pace * m["inner"] / norm.clamp(min=1e-300)


def walk(parts: Parts, m: Memory, now: Now) -> Tensor:
    """C·1.24 rms(u)/√k: what z has moved a step, if it moved at random."""
    return parts.pace * WALK * mean(now.moved.square()).sqrt() / math.sqrt(m["step"])


def drift(parts: Parts, m: Memory, now: Now) -> Tensor:
    """d_0 exp(p Σ f ln T), T = mean(u²) Σλ/(Σλ² mean ∛ν): 1 where z moves at random, more where
    it drifts."""
    ratio = mean(now.moved.square()) * m["weight"] / (m["weight_sq"] * mean(now.root))
    m["log"] += parts.pace * now.factor * ratio.clamp(1e-3, 1e3).log()
    return m["start"] * m["log"].exp()


def bet(parts: Parts, m: Memory, now: Now) -> Tensor:
    """d_0 exp(p c (Σfq)²/Σfq²), q = ⟨g, x_0 − x⟩/Σ|g (x_0 − x)|: a gambler's wealth who bets that
    gradients go on pointing away from x_0."""
    q = total(now.products) / total(now.products.abs()).clamp(min=1e-300)
    m["won"] += now.factor * q
    m["bets"] += now.factor * q * q
    wealth = m["won"].clamp(min=0).square() / m["bets"].clamp(min=1e-300)
    return m["start"] * (parts.pace * (1 - MOMENTUM) * wealth).exp()


ESTIMATES: dict[str, Callable[[Parts, Memory, Now], Tensor]] = {
    "inner": inner,
    "walk": walk,
    "drift": drift,
    "bet": bet,
}


def total(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)


def mean(x: Tensor) -> Tensor:
    return total(x) / x.numel()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


class Auto(Optimizer):
    """MADGRAD on one long vector of all parameters, in one group. `lr` is the schedule's factor.

    Its memory lies in the group, where a checkpoint takes it along as it is.
    """

    def __init__(
        self, params: Iterable[Tensor], parts: Parts, lr: float = 1.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.parts = parts

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        group, parts = self.param_groups[0], self.parts
        params = [param for param in group["params"] if param.grad is not None]
        x, raw = flat(params), flat(param.grad for param in params)
        g = raw + group["weight_decay"] * x
        m = group["memory"] = group.get("memory") or begin(parts, x, g)
        away = m["x_0"] - x if parts.point == "x" else displacement(m)
        m["largest"] = torch.maximum(m["largest"], mean(raw.square()).sqrt())
        size = m["largest"] if parts.scale == "max" else m["size"]
        m["lr"] = m["d"].pow(1.5) / size.clamp(min=1e-30).sqrt()  # γ = d^{3/2}/√H
        factor = group["lr"]
        weight = factor * m["lr"] * math.sqrt(m["step"] + 1)  # λ_k = f γ √(k+1)
        weighted = weight.to(g.dtype) * g
        m["s"] += weighted
        m["nu"] += weighted * g
        m["step"] += 1
        moved = displacement(m)
        x += (1 - MOMENTUM) * (m["x_0"] - moved - x)
        for param, part in zip(params, x.split([p.numel() for p in params]), strict=True):
            param.copy_(part.view(param.shape))
        if factor:  # a step of no weight tells nothing
            m["weight"] += weight
            m["weight_sq"] += weight * weight
            root = m["nu"].pow(1 / 3)
            m["size"] = (mean(root) / m["weight"].pow(1 / 3)).pow(1.5)
            now = Now(factor, weight, g * away, moved, root)
            m["d"] = torch.maximum(m["d"], ESTIMATES[parts.distance](parts, m, now))


def begin(parts: Parts, x: Tensor, g: Tensor) -> Memory:
    start = torch.tensor(parts.start, dtype=torch.float64, device=x.device)
    if parts.relative:
        start = (start * mean(x.square()).sqrt()).clamp(min=1e-6)
    names = ("lr", "largest", "weight", "weight_sq", "inner", "log", "won", "bets")
    return {
        **{name: torch.zeros_like(start) for name in names},
        **{name: torch.zeros_like(x) for name in ("s", "nu")},
        "x_0": x.clone(),
        "step": 0,
        "start": start,
        "d": start.clone(),
        "size": mean(g.abs().pow(2 / 3)).pow(1.5),  # H of one gradient
    }


def displacement(m: Memory) -> Tensor:
    """u = x_0 − z."""
    return m["s"] / (m["nu"].pow(1 / 3) + EPS)


for _name, _parts in CANDIDATES.items():
    METHODS[_name] = Method(_name, partial(Auto, parts=_parts), (1.0, 1.0))


def __getattr__(name: str) -> Callable[[], Problem]:
    """`auto_candidates:digits` is the study's problem, with the rates in its records."""
    if name not in catalogue.NAMES:
        raise AttributeError(name)
    return partial(watched, name)


def watched(name: str) -> Problem:
    problem = catalogue.find(name)
    return replace(problem, build=partial(build, problem))


def build(problem: Problem, setup: Setup) -> Task:
    task, groups = problem.build(setup), [{}]

    def step(optimizer: Optimizer, batch: Any) -> Tensor:
        groups[0] = optimizer.param_groups[0]
        if task.step is not None:
            return task.step(optimizer, batch)
        optimizer.zero_grad()
        loss = task.loss(task.model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def evaluate(model: nn.Module, split: Split) -> dict[str, float]:
        memory = groups[0].get("memory")
        rate = {"auto_lr": float(memory["lr"])} if memory else {}
        return {**task.evaluate(model, split), **rate}

    return replace(task, step=step, evaluate=evaluate)


Column = tuple[str, str, int, float]  # problem, preset, epochs, decay


def columns(records: Iterable[Record]) -> dict[Column, list[Record]]:
    found: dict[Column, list[Record]] = defaultdict(list)
    for record in records:
        s = record.settings
        found[s.problem, s.preset, s.epochs, s.decay].append(record)
    return dict(found)


def judged(records: Iterable[Record]) -> tuple[Judge, dict[str, tuple[Summary, dict[int, float]]]]:
    """By method: the study's summary, and the results of its seeds."""
    records = list(records)
    judge = Judge(records[0].about["metric"], records[0].about["higher_is_better"])
    rows = {}
    for members in statistics.by_entry(records).values():
        summary = statistics.summarise(members, judge)
        values = {
            record.settings.seed: value
            for record in members
            if (record.settings.lr, record.settings.decay) == summary.best
            and record.settings.seed in summary.seeds
            and (value := record.last(judge.metric)) is not None
        }
        rows[members[0].settings.method] = summary, values
    return judge, rows


def cell(summary: Summary, judge: Judge) -> str:
    """Mean ± two standard errors, and the rate: the fixed one, or the mean of those at the end."""
    if summary.best is None or judge.metric not in summary.final:
        return "diverged"
    end = summary.final[judge.metric]
    error = "" if end.error is None else f" ± {end.error:.2g}"
    rate = summary.final["auto_lr"].mean if "auto_lr" in summary.final else summary.best[0]
    lost = f", {summary.diverged} diverged" if summary.diverged else ""
    return f"{end.mean:.4g}{error} ({rate:.2g}{lost})"


def against(own: dict[int, float], reference: dict[int, float], sign: int) -> str:
    """How much better than the reference with the same seeds."""
    gains = [sign * (own[seed] - reference[seed]) for seed in own.keys() & reference.keys()]
    if not gains:
        return ""
    gain = statistics.estimate(gains)
    return f"{gain.mean:+.2g}" + ("" if gain.error is None else f" ± {gain.error:.2g}")


def table(records: Iterable[Record]) -> str:
    """Two tables in Markdown: results with rates, and gains on the best fixed rate."""
    found = {column: judged(members) for column, members in columns(records).items()}
    names = [name for name in (REFERENCE, *CANDIDATES) if any(name in r for _, r in found.values())]
    heads, results, gains = [], {n: [] for n in names}, {n: [] for n in names}
    for (problem, preset, epochs, decay), (judge, rows) in found.items():
        heads.append(f"{problem} {preset}, {judge.metric}, {epochs} epochs, decay {decay:g}")
        reference = rows[REFERENCE][1] if REFERENCE in rows else {}
        for name in names:
            summary, values = rows.get(name, (None, {}))
            results[name].append(cell(summary, judge) if summary else "")
            sign = 1 if judge.higher_is_better else -1
            gains[name].append("" if name == REFERENCE else against(values, reference, sign))
    return "\n\n".join(
        f"{title}\n\n" + markdown(heads, rows)
        for title, rows in (
            ("Mean ± 2 standard errors (lr at the end):", results),
            ("Better than the best fixed lr by, seed for seed:", gains),
        )
    )


def markdown(heads: Sequence[str], rows: dict[str, list[str]]) -> str:
    lines = [["candidate", *heads], ["---"] * (len(heads) + 1)]
    lines += [[name, *cells] for name, cells in rows.items() if any(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run(name: str, decay: float, options: argparse.Namespace, runs: Runs) -> None:
    """What is missing of one column."""
    problem = watched(name)
    preset = problem.presets[options.preset]
    preset = replace(
        preset,
        epochs=options.epochs or preset.epochs,
        schedule=options.schedule or preset.schedule,
    )
    device = "cuda" if options.preset in ("gpu", "paper") else "cpu"
    place = Place(options.data, save_every=options.save_every)
    entries = [methods.entry(method, preset) for method in options.candidates]
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
    every = (REFERENCE, *CANDIDATES)
    add = parser.add_argument
    add("--problems", type=lambda text: text.split(","), default=["digits"], metavar="A,B")
    add("--candidates", type=lambda text: text.split(","), default=every, metavar="A,B")
    add("--seeds", type=int, default=3)
    add("--decays", type=lambda text: [float(part) for part in text.split(",")], default=[0.0])
    add("--preset", default="cpu", choices=("cpu", "gpu", "paper"))
    add("--epochs", type=int, help="in place of the preset's")
    add("--schedule", help="in place of the preset's")
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("runs/auto"))
    add("--workers", type=int, default=1)
    add("--save-every", type=float, default=60.0, metavar="SECONDS")
    add("--table", action="store_true", help="run nothing; the table of what is in --out")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    runs = Runs(options.out)
    if not options.table:
        with runs.held():
            runs.repair()
            for name in options.problems:
                for decay in options.decays:
                    print(f"{name}, decay {decay:g}", file=sys.stderr, flush=True)
                    run(name, decay, options, runs)
    print(table(runs.load()[0].values()))


if __name__ == "__main__":
    try:
        main()
    except StudyError as error:
        sys.exit(str(error))
