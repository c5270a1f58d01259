"""How long an update of the study's problems takes, as they run it and without graphs.

    PYTHONPATH=src python3 benchmarks/study_step.py iwslt14 bookwiki --preset gpu --data DIR

Updates are those of a MADGRAD run, from the batch to the optimizer, without evaluation. The first
ones compile and capture; then the shortest mean of three rounds counts, each of `--updates`.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cubegrad.study import Setup, StudyError, Task, catalogue, methods
from cubegrad.study.records import machine

ROUNDS = 3


def endless(task: Task) -> Iterator[Any]:
    return (batch for epoch in itertools.count() for batch in task.batches(epoch))


def plain(task: Task) -> Callable[[torch.optim.Optimizer, Any], Any]:
    """A step as users write it: no graph, nothing compiled, no clipping."""

    def step(optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        task.loss(task.model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def milliseconds(task: Task, updates: int, warm_up: int, graphs: bool) -> float:
    params = [param for param in task.model.parameters() if param.requires_grad]
    optimizer = methods.make("madgrad", params, 1e-4, 0.0)
    step = task.step if graphs and task.step else plain(task)
    batches = endless(task)
    rounds = []
    for count in [warm_up, *[updates] * ROUNDS]:
        wait(task)
        begun = time.perf_counter()
        for batch in itertools.islice(batches, count):
            step(optimizer, batch)
        wait(task)
        rounds.append((time.perf_counter() - begun) / count)
    return 1000 * min(rounds[1:])


def wait(task: Task) -> None:
    if next(task.model.parameters()).is_cuda:
        torch.cuda.synchronize()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--preset", default="cpu")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--updates", type=int, default=200, help="in a round")
    parser.add_argument("--warm-up", type=int, default=250, help="updates before the first round")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    problems = [catalogue.find(name) for name in options.problems]
    for problem in problems:
        if options.preset not in problem.presets:
            known = ", ".join(problem.presets)
            raise StudyError(f"{problem.name} has no preset {options.preset}: use {known}")
    device = torch.device("cpu" if options.preset.startswith("cpu") else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StudyError(f"preset {options.preset} needs a GPU, and torch sees none: use cpu")
    print(", ".join(f"{name} {value}" for name, value in machine(device).items()))
    print("| problem | as it runs, ms | plain, ms |\n|---|---:|---:|")
    for problem in problems:
        setup = Setup(problem.presets[options.preset], 0, device, options.data)
        times = [
            milliseconds(problem.build(setup), options.updates, options.warm_up, graphs)
            for graphs in (True, False)
        ]
        print(f"| {problem.name} | {times[0]:.3g} | {times[1]:.3g} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except StudyError as error:
        sys.exit(str(error))
