"""How the best learning rate moves with batch size, length, momentum and eps, on two small nets.

    python benchmarks/evidence/sensitivity.py --out runs/sensitivity.jsonl
    ... --table

A convnet of 6,090 parameters and a transformer of 12,018 classify scikit-learn's digits, without
decay, under a cosine schedule, in batches of 64 for 15 epochs unless a row of the table says
otherwise. For each row the learning rate is searched on the study's grid, with the same seeds at
each value, until the best is not at the edge. A line of the file has the test losses at one
learning rate; lines that are in --out are not run again.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cubegrad
from cubegrad.study import Problem, Setup, Task, statistics, train
from cubegrad.study.grid import Grid
from cubegrad.study.methods import METHODS, Method
from cubegrad.study.problems import digits
from cubegrad.study.records import Settings

sys.path.append(str(Path(__file__).parents[1]))
from shared import facts

RESULTS = Path(__file__).parent / "results" / "sensitivity.jsonl"
SEEDS = (1, 2, 3)
GRID = Grid().between(1e-5, 50.0)
START = {"madgrad": (0.005, 0.05), "adam": (0.0025, 0.025)}  # the first values of a search
NAMES = {"madgrad": "MADGRAD", "adam": "Adam"}
CLOSE = 1.2  # a rate is as good as the best if its loss is at most 1.2 times as high


class Transformer(nn.Module):
    """Two blocks over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, 24)
        self.positions = nn.Parameter(0.02 * torch.randn(8, 24))
        block = nn.TransformerEncoderLayer(24, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(24), enable_nested_tensor=False)
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.rows(images.squeeze(1)) + self.positions
        return self.head(self.blocks(tokens).mean(1))


def with_transformer(setup: Setup) -> Task:
    return replace(digits.build(setup), model=Transformer().to(setup.device))


PROBLEMS: dict[str, Problem] = {
    "convnet": digits.problem(),
    "transformer": replace(digits.problem(), name="digits-rows", build=with_transformer),
}


class Cell(NamedTuple):
    """One row of the table and one net: everything but the learning rate."""

    net: str
    method: str = "madgrad"
    batch: int = 64
    epochs: int = 15
    momentum: float = 0.9
    eps: float = 1e-6

    @property
    def name(self) -> str:
        """Of the method in the study."""
        return f"{self.method}, momentum {self.momentum:g}, eps {self.eps:g}"


class Line(NamedTuple):
    """The runs of a cell at one learning rate."""

    cell: Cell
    lr: float
    losses: tuple[float, ...]  # inf: diverged

    @property
    def mean(self) -> float:
        return math.fsum(self.losses) / len(self.losses)


class Row(NamedTuple):
    """One change to the runs at batch 64, 15 epochs, momentum 0.9 and eps 1e-6."""

    label: str
    change: dict[str, Any]
    with_adam: bool = True


STEPS = {16: 1185, 64: 300, 256: 75}  # in 15 epochs
ROWS = (
    *(Row(f"batch {size}, {n:,} steps", {"batch": size}) for size, n in STEPS.items()),
    Row("batch 16, 316 steps", {"batch": 16, "epochs": 4}),
    Row("batch 256, 300 steps", {"batch": 256, "epochs": 60}),
    Row("100 steps", {"epochs": 5}),
    Row("300 steps", {}),
    Row("900 steps", {"epochs": 45}),
    *(Row(f"momentum {m:g}", {"momentum": m}, with_adam=False) for m in (0.0, 0.5, 0.9, 0.98)),
    *(Row(f"eps {eps:g}", {"eps": eps}, with_adam=False) for eps in (1e-8, 1e-6, 1e-3, 1e-1)),
)


def cells() -> list[Cell]:
    found = [
        Cell(net, method, **row.change)
        for net in PROBLEMS
        for row in ROWS
        for method in (START if row.with_adam else ("madgrad",))
    ]
    return list(dict.fromkeys(found))


def run(cell: Cell, lr: float, seeds: Sequence[int]) -> Line:
    if cell.method == "madgrad":
        make = partial(cubegrad.MADGRAD, momentum=cell.momentum, eps=cell.eps)
    else:
        make = partial(torch.optim.Adam, betas=(cell.momentum, 0.999))
    METHODS[cell.name] = Method(cell.name, make, START[cell.method])
    problem, losses = PROBLEMS[cell.net], []
    for seed in seeds:
        size = ("cpu", cell.epochs, cell.batch)
        settings = Settings(problem.name, *size, cell.name, "cosine", lr, 0.0, seed)
        loss = train.run(problem, settings, train.Place()).last("loss")
        losses.append(math.inf if loss is None else round(loss, 5))
    return Line(cell, lr, tuple(losses))


def missing(cell: Cell, lines: Iterable[Line]) -> float | None:
    """The next learning rate of the search; None when the best is inside the values tried."""
    own = {line.lr: line.mean for line in lines if line.cell == cell}
    low, high = START[cell.method]
    for lr in GRID:
        if low <= lr <= high and lr not in own:
            return lr
    tried, best = sorted(own), min(own, key=lambda lr: (own[lr], lr))
    place = GRID.index(best)
    if best == tried[0] and place > 0:
        return GRID[place - 1]
    if best == tried[-1] and place < len(GRID) - 1:
        return GRID[place + 1]
    return None


def load(path: Path) -> list[Line]:
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    found = []
    for body in map(json.loads, lines):
        lr, losses = body.pop("lr"), body.pop("losses")
        found.append(Line(Cell(**body), lr, tuple(map(float, losses))))
    return found


def save(path: Path, line: Line) -> None:
    """Add a line; the first one of a file says where it was made."""
    if not path.exists():
        about = {"processor": facts.processor(), "torch": torch.__version__, "seeds": SEEDS}
        path.write_text(json.dumps({**about, "cubegrad": cubegrad.__version__}) + "\n")
    losses = [loss if math.isfinite(loss) else "inf" for loss in line.losses]
    with path.open("a") as file:
        file.write(json.dumps({**line.cell._asdict(), "lr": line.lr, "losses": losses}) + "\n")


def entry(cell: Cell, lines: Iterable[Line]) -> str:
    """`0.025 (0.01 to 0.05): 0.045 ± 0.008`: the best lr, those close to it, the loss."""
    own = sorted((line for line in lines if line.cell == cell), key=lambda line: line.lr)
    if not own:
        return ""
    best = min(own, key=lambda line: line.mean)
    close = [line.lr for line in own if line.mean <= CLOSE * best.mean]
    loss = statistics.estimate(best.losses)
    error = "" if loss.error is None else f" ± {loss.error:.1g}"
    return f"{best.lr:g} ({close[0]:g} to {close[-1]:g}): {loss.mean:.3f}{error}"


def table(lines: Sequence[Line]) -> str:
    columns = [(net, method) for net in PROBLEMS for method in START]
    heads = ["", *(f"{net}, {NAMES[method]}" for net, method in columns)]
    rows = [heads, ["---"] * len(heads)]
    for row in ROWS:
        own = [Cell(*column, **row.change) for column in columns]
        shown = [cell.method == "madgrad" or row.with_adam for cell in own]
        texts = [entry(cell, lines) if show else "" for cell, show in zip(own, shown, strict=True)]
        rows.append([row.label, *texts])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(words)
    lines = load(options.out)
    if not options.table:
        torch.set_num_threads(1)
        for cell in cells():
            while (lr := missing(cell, lines)) is not None:
                lines.append(run(cell, lr, SEEDS))
                save(options.out, lines[-1])
                print(lines[-1], flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
