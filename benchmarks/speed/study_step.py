"""How long an update of the study's problems takes, as they run it and without graphs.

    python benchmarks/speed/study_step.py iwslt14 bookwiki --preset gpu --data DIR
    ... --processes 5

Updates are those of a MADGRAD run, from the batch to the optimizer, without evaluation. The first
ones compile and capture; then the shortest mean of three rounds counts, each of `--updates`.

With `--processes` several of them share the device, as in evidence_runs.py, and the time is that of
all of them together, divided by all of their updates.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from cubegrad.study import Setup, StudyError, Task, catalogue, methods
from cubegrad.study.arguments import count
from cubegrad.study.records import machine

ROUNDS = 3
PATIENCE = 600.0  # seconds for the other processes to compile, after which one must have failed


def endless(task: Task) -> Iterator[Any]:
    return (batch for epoch in itertools.count() for batch in task.batches(epoch))


def plain(task: Task) -> Callable[[torch.optim.Optimizer, Any], Any]:
    """A step as users write it: no graph, nothing compiled, no clipping."""

    def step(optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad()
        task.loss(task.model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


class Updates:
    """An endless run of a problem."""

    def __init__(self, name: str, options: argparse.Namespace, graphs: bool = True) -> None:
        problem, device = catalogue.find(name), device_of(options)
        setup = Setup(problem.presets[options.preset], 0, device, options.data)
        self.task = problem.build(setup)
        params = [param for param in self.task.model.parameters() if param.requires_grad]
        self.optimizer = methods.make("madgrad", params, 1e-4, 0.0)
        self.step = self.task.step if graphs and self.task.step else plain(self.task)
        self.batches = endless(self.task)
        self.run(options.warm_up)

    def run(self, updates: int) -> None:
        for batch in itertools.islice(self.batches, updates):
            self.step(self.optimizer, batch)
        wait(self.task)


def alone(name: str, options: argparse.Namespace, graphs: bool) -> float:
    """Milliseconds for an update."""
    updates, rounds = Updates(name, options, graphs), list[float]()
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        updates.run(options.updates)
        rounds.append((time.perf_counter() - begun) / options.updates)
    return 1000 * min(rounds)


_ready: Any = None  # in a worker: a barrier, so that all begin at once


def _set_ready(barrier: Any) -> None:
    global _ready
    _ready = barrier


def _times(name: str, options: argparse.Namespace) -> tuple[float, float]:
    """When this process began and ended its updates, by a clock that all processes share."""
    updates = Updates(name, options)
    _ready.wait(PATIENCE)
    begun = time.monotonic()
    updates.run(ROUNDS * options.updates)
    return begun, time.monotonic()


def together(name: str, options: argparse.Namespace) -> float:
    """Milliseconds for an update of any of the processes."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    number = options.processes
    with ProcessPoolExecutor(number, context, _set_ready, (context.Barrier(number),)) as pool:
        times = list(pool.map(_times, number * [name], number * [options]))
    begun, ended = zip(*times, strict=True)
    return 1000 * (max(ended) - min(begun)) / (number * ROUNDS * options.updates)


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
    parser.add_argument("--processes", type=count, default=1, help="that share the device")
    return parser.parse_args(words)


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device("cpu" if options.preset.startswith("cpu") else "cuda")


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    for name in options.problems:
        if options.preset not in (presets := catalogue.find(name).presets):
            known = ", ".join(presets)
            raise StudyError(f"{name} has no preset {options.preset}: use {known}")
    device = device_of(options)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StudyError(f"preset {options.preset} needs a GPU, and torch sees none: use cpu")
    print(", ".join(f"{name} {value}" for name, value in machine(device).items()))
    if options.processes > 1:
        print(f"| problem | {options.processes} processes, ms |\n|---|---:|")
        for name in options.problems:
            print(f"| {name} | {together(name, options):.3g} |", flush=True)
        return
    print("| problem | as it runs, ms | plain, ms |\n|---|---:|---:|")
    for name in options.problems:
        times = [alone(name, options, graphs) for graphs in (True, False)]
        print(f"| {name} | {times[0]:.3g} | {times[1]:.3g} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except StudyError as error:
        sys.exit(str(error))
