"""Rules that choose MADGRAD's learning rate while it trains, side by side on the study's problems.

    PYTHONPATH=src python3 benchmarks/auto_candidates.py --problems digits --out runs/auto
    ... --problems imagenet,bookwiki --candidates distance,walk,madgrad --seeds 3 --data DIR

Each candidate trains with the same seeds as `madgrad`, the best fixed rate of the study's own
search, whose seeds are not those that chose it, and as `madgrad-auto`, which is
cubegrad.MADGRAD(lr="auto"). What is in --out already is not run again. `digits@1000` is digits
with its loss multiplied by 1000.

Every candidate has lr = d^{3/2}/√H, times the schedule's factor f. They differ in how the distance
d is estimated, in what stands for the size H of the gradients, and in where d starts.
"""

import argparse
import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
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

MOMENTUM, EPS = 0.9, 1e-6
# rms(u)/√k of MADGRAD at a flat rate is d/WALK where gradients are independent and of one size.
WALK = math.sqrt(2) * (2 / 3) ** (1 / 3)


@dataclass(frozen=True)
class Parts:
    """What one candidate is made of."""

    distance: str = "inner"  # or walk, both, drift, bet: see estimate()
    pace: float = 1.0  # κ, C or p of the estimate
    point: str = "x"  # or z, which has no lag
    norm: str = "l1"  # or A, quiet
    scale: str = "mean"  # H^{2/3} = mean ∛ν/(Σλ)^{1/3}; or max: the largest rms gradient
    start: float = 0.01  # d_0
    relative: bool = True  # in units of rms(x_0)
    growth: float = math.inf  # at most so many times as large after a step
    alone: bool = False  # a d and an H for each tensor


CANDIDATES = {
    "distance": Parts(),  # d = max Σλ⟨g, x_0 − x⟩/‖s‖₁, d_0 = 0.01 rms(x_0)
    "distance-2": Parts(pace=2.0),  # d twice as large
    "distance-z": Parts(point="z"),  # with z in place of x
    "distance-A": Parts(norm="A"),  # with √(Σ s²/∛ν · Σ∛ν) in place of ‖s‖₁
    "distance-A-slow": Parts(norm="A", start=0.02, growth=1.02),
    "distance-0.02": Parts(start=0.02),  # d_0 = 0.02 rms(x_0)
    "distance-0.03": Parts(start=0.03),
    "distance-quiet": Parts(norm="quiet"),  # with Σ√(s² − ν Σλ²/Σλ), s less its noise
    "distance-alone": Parts(alone=True),  # a d and an H for each tensor
    "distance-1e-4": Parts(start=1e-4, relative=False),
    "distance-1e-6": Parts(start=1e-6, relative=False),
    "distance-max": Parts(scale="max"),
    "first": Parts(scale="max", start=1e-6, relative=False),  # the first that was tried
    "walk": Parts("walk"),  # d = max 1.24 rms(u)/√k
    "walk-1e-4": Parts("walk", start=1e-4, relative=False),
    "both": Parts("both"),  # the larger of distance and walk
    "drift-0.1": Parts("drift", 0.1),  # d = d_0 exp(max 0.1 Σ f ln T)
    "drift-0.03": Parts("drift", 0.03),
    "bet": Parts("bet"),  # d = d_0 exp(max 0.1 (Σfq)²/Σfq²)
}
REFERENCE, SHIPPED = "madgrad", "madgrad-auto"

Memory = dict[str, Any]
total = partial(torch.sum, dtype=torch.float64)
mean = partial(torch.mean, dtype=torch.float64)


def estimate(
    parts: Parts, m: Memory, f: float, weight: Tensor, products: Tensor, u: Tensor, root: Tensor
) -> Tensor:
    """d after a step of factor f and weight λ; `products` are g (x_0 − x), `root` is ∛ν."""
    match parts.distance:
        case "both":
            ways = (replace(parts, distance=way) for way in ("inner", "walk"))
            return torch.maximum(*(estimate(p, m, f, weight, products, u, root) for p in ways))
        case "inner":  # for convex f and κ = 1 at most ‖x_0 − x*‖_∞
            m["inner"] += weight * total(products)
            norm = total(m["s"].abs())
            if parts.norm == "A":
                norm = (total(m["s"].square() / (root + EPS)) * total(root)).sqrt()
            elif parts.norm == "quiet":  # Σλ²g², which is E s² if g is noise, is about ν Σλ²/Σλ
                noise = m["nu"] * (m["weight_sq"] / m["weight"])
                norm = total((m["s"].square() - noise).clamp(min=0).sqrt())
            return parts.pace * m["inner"] / norm.clamp(min=1e-300)
        case "walk":  # what z moves a step, if it moves at random
            return parts.pace * WALK * mean(u.square()).sqrt() / math.sqrt(m["step"])
        case "drift":  # T, the ratio, is 1 where z moves at random, and more where it drifts
            ratio = mean(u.square()) * m["weight"] / (m["weight_sq"] * mean(root))
            m["log"] += parts.pace * f * ratio.clamp(1e-3, 1e3).log()
            return m["start"] * m["log"].exp()
        case _:  # "bet", a gambler's wealth, who bets that gradients go on pointing one way
            q = total(products) / total(products.abs()).clamp(min=1e-300)
            m["won"] += f * q
            m["bets"] += f * q * q
            wealth = m["won"].clamp(min=0).square() / m["bets"].clamp(min=1e-300)
            return m["start"] * (parts.pace * (1 - MOMENTUM) * wealth).exp()


class Auto(Optimizer):
    """MADGRAD on one long vector of all parameters, in one group. `lr` is the schedule's factor.

    Or on one for each tensor. Its memories lie in the group, where a checkpoint takes them along
    as they are.
    """

    latest: "Auto | None" = None  # of the run under way

    def __init__(self, params: Any, parts: Parts, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.parts = parts
        Auto.latest = self

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        group = self.param_groups[0]
        params = [param for param in group["params"] if param.grad is not None]
        together = [[param] for param in params] if self.parts.alone else [params]
        memories = group["memories"] = group.get("memories") or [{} for _ in together]
        for some, memory in zip(together, memories, strict=True):
            self.move(some, memory, group["lr"], group["weight_decay"])

    def move(self, params: list[Tensor], m: Memory, factor: float, decay: float) -> None:
        parts = self.parts
        x = torch.cat([param.flatten() for param in params])
        raw = torch.cat([param.grad.flatten() for param in params])
        g = raw + decay * x
        if not m:
            m.update(begin(parts, x, g))
        away = m["x_0"] - (x if parts.point == "x" else m["z"])
        m["largest"] = torch.maximum(m["largest"], mean(raw.square()).sqrt())
        size = m["largest"] if parts.scale == "max" else m["size"]
        m["lr"] = m["d"].pow(1.5) / size.clamp(min=1e-30).sqrt()  # γ = d^{3/2}/√H
        weight = factor * m["lr"] * math.sqrt(m["step"] + 1)  # λ_k = f γ √(k+1)
        weighted = weight.to(g.dtype) * g
        m["s"] += weighted
        m["nu"] += weighted * g
        m["step"] += 1
        root = m["nu"].pow(1 / 3)
        u = m["s"] / (root + EPS)
        m["z"] = m["x_0"] - u
        x += (1 - MOMENTUM) * (m["z"] - x)
        for param, part in zip(params, x.split([p.numel() for p in params]), strict=True):
            param.copy_(part.view(param.shape))
        if factor:  # a step of no weight tells nothing
            m["weight"] += weight
            m["weight_sq"] += weight * weight
            m["size"] = (mean(root) / m["weight"].pow(1 / 3)).pow(1.5)
            seen = estimate(parts, m, factor, weight, g * away, u, root)
            m["d"] = torch.maximum(m["d"], torch.minimum(seen, m["d"] * parts.growth))


def begin(parts: Parts, x: Tensor, g: Tensor) -> Memory:
    start = torch.tensor(parts.start, dtype=torch.float64, device=x.device)
    if parts.relative:
        least = 1e-4 if parts.alone else 1e-6  # a bias may start at 0
        start = (start * mean(x.square()).sqrt()).clamp(min=least)
    names = ("lr", "largest", "weight", "weight_sq", "inner", "log", "won", "bets")
    return {
        **{name: torch.zeros_like(start) for name in names},
        **{name: torch.zeros_like(x) for name in ("s", "nu")},
        **{name: x.clone() for name in ("x_0", "z")},
        "step": 0,
        "start": start,
        "d": start.clone(),
        "size": mean(g.abs().pow(2 / 3)).pow(1.5),  # H of one gradient
    }


def watched(name: str) -> Problem:
    """A problem of the study, or `NAME@SCALE`, which also records the rate of a candidate."""
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
    """What makes a task's loss that much larger, or its gradients, where it has its own step."""
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
    """`auto_candidates:digits`, by which a worker finds problems, and with them the methods."""
    if name.partition("@")[0] not in catalogue.NAMES:
        raise AttributeError(name)
    return partial(watched, name)


def cell(summary: Summary, metric: str) -> str:
    """Mean ± 2 standard errors, and the rate: the fixed one, or the mean of those at the end."""
    if summary.best is None:
        return f"{summary.search_diverged} of {summary.searched} diverged"
    end = summary.final[metric]
    rate = summary.final.get("auto_lr") or summary.final.get(ESTIMATED_LR)
    error = "" if end.error is None else f" ± {round(end.error, 9):.2g}"
    lost = f", {summary.diverged} diverged" if summary.diverged else ""
    return f"{end.mean:.4g}{error} ({rate.mean if rate else summary.best[0]:.2g}{lost})"


def gain(own: list[Record], fixed: list[Record], judge: Judge) -> str:
    """How much better than the fixed rate with the same seeds."""
    by_seed = {record.settings.seed: record.last(judge.metric) for record in fixed}
    pairs = [(record.last(judge.metric), by_seed.get(record.settings.seed)) for record in own]
    sign = 1 if judge.higher_is_better else -1
    gains = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
    if len(gains) < 2:
        return ""
    known = statistics.estimate(gains)
    return f"{known.mean:+.2g} ± {round(known.error or 0, 9):.2g}"


def table(records: Iterable[Record]) -> str:
    """Two tables in Markdown: results with rates, and gains on the best fixed rate."""
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
        found = {name: statistics.summarise(members, judge) for name, members in rows.items()}
        best = found[REFERENCE].best if REFERENCE in found else None
        fixed = [r for r in rows[REFERENCE] if (r.settings.lr, r.settings.decay) == best]
        for name, cells in results.items():
            cells.append(cell(found[name], judge.metric) if name in found else "")
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
    """What is missing of one column."""
    problem = watched(name)
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
    add("--epochs", type=int, help="in place of the preset's")
    add("--schedule", help="in place of the preset's")
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("runs/auto"))
    add("--workers", type=int, default=1)
    add("--table", action="store_true", help="run nothing; the table of what is in --out")
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
    import auto_candidates  # once, under the name by which workers find it

    try:
        auto_candidates.main()
    except StudyError as error:
        sys.exit(str(error))
