"""How estimates of a learning rate grow on gradients that are noise alone.

    python benchmarks/auto/auto_noise.py [--json benchmarks/auto/results/auto_noise.json]

Every gradient is drawn anew from N(0, 1), whatever the weights are: there is nothing to find, and
the estimated distance to a solution should stay where it began. In the rows with a curvature h the
gradient has h (x - x_0) besides, as around a solution that has been reached. docs/auto.md has the
table.
"""

import argparse
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dadaptation import DAdaptAdam
from prodigyopt import Prodigy
from torch import Tensor, nn
from torch.optim import Optimizer

from cubegrad import MADGRAD, MADGRADW

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import processor, version, write

SEEDS = range(5)
STEPS = (1_000, 5_000, 20_000)
PACKAGES = ("torch", "cubegrad", "prodigyopt", "dadaptation")


class Row(NamedTuple):
    """A method on one kind of gradients."""

    method: str
    coordinates: int
    curvature: float = 0.0


class Method(NamedTuple):
    make: Callable[[list[Tensor]], Optimizer]
    distance: Callable[[dict[str, Any]], Any]  # from the param group


def estimated(group: dict[str, Any]) -> Any:
    return group["estimate"][0]


def madgradw(params: list[Tensor], **options: Any) -> Optimizer:
    return MADGRADW(params, lr="auto", weight_decay=0.0, **options)


METHODS = {
    "MADGRADW": Method(madgradw, estimated),
    "MADGRADW, schedule-free": Method(partial(madgradw, schedule_free=True), estimated),
    "MADGRAD": Method(partial(MADGRAD, lr="auto"), estimated),
    "Prodigy": Method(Prodigy, lambda group: group["d"]),
    "D-Adapt Adam": Method(DAdaptAdam, lambda group: group["d"]),
}
ROWS = [
    *(Row(method, size) for size in (200, 20_000) for method in METHODS),
    *(Row(name, 200, h) for name in ("MADGRADW", "MADGRAD") for h in (0.001, 0.01, 0.1)),
]


def growth(row: Row, seed: int, steps: tuple[int, ...] = STEPS) -> list[float]:
    """The estimated distance after so many steps, over that after the first one."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(row.coordinates, generator=generator)
    param = nn.Parameter(start.clone())
    method = METHODS[row.method]
    optimizer = method.make([param])
    distances = []
    for _ in range(max(steps)):
        param.grad = torch.randn(row.coordinates, generator=generator)
        if row.curvature:
            param.grad += row.curvature * (param.detach() - start)
        optimizer.step()
        distances.append(float(method.distance(optimizer.param_groups[0])))
    return [distances[step - 1] / distances[0] for step in steps]


def factor(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}" if value < 1e3 else f"1e{math.log10(value):.0f}"


def cell(values: list[float]) -> str:
    middle, low, high = map(factor, (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def label(row: Row) -> str:
    extra = f", curvature {row.curvature:g}" if row.curvature else ""
    return f"{row.method}, {row.coordinates:,} coordinates{extra}"


def line(row: Row, by_seed: list[list[float]]) -> str:
    columns = [cell(list(values)) for values in zip(*by_seed, strict=True)]
    return f"| {label(row)} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin, found = time.perf_counter(), []
    print(f"| the distance grows by | {' | '.join(f'{k:,} steps' for k in STEPS)} |")
    print("|---|" + "---:|" * len(STEPS))
    for row in ROWS:
        by_seed = [growth(row, seed) for seed in SEEDS]
        found.append({**row._asdict(), "by_seed": by_seed})
        print(line(row, by_seed), flush=True)
    versions = {package: version(package) for package in PACKAGES}
    machine = {"processor": processor(), "python": platform.python_version(), **versions}
    print(f"{time.perf_counter() - begin:.0f} s, {machine}")
    if options.json:
        write({"machine": machine, "steps": STEPS, "rows": found}, options.json)


if __name__ == "__main__":
    main()
