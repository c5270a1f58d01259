"""Runs on this machine: in this process, or in several that share its cores."""

import multiprocessing
import multiprocessing.process
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cubegrad.study import catalogue, train
from cubegrad.study.problem import Problem, Setup, StudyError
from cubegrad.study.processes import cores, die_with_parent, no_interrupts
from cubegrad.study.records import Record, Settings

Job = tuple[Settings, Path]  # and its checkpoint


@dataclass
class Machine:
    """Runs jobs of one problem, `workers` at a time. Each run has the threads of its preset.

    The processes live until `close`: starting one takes seconds, as it imports torch.
    """

    problem: str  # by name: a process of its own has to find it again
    place: train.Place
    workers: int = 1
    _pool: ProcessPoolExecutor | None = None
    _epochs: Any = None

    def check(self, problem: Problem, setup: Setup) -> None:
        """Raises StudyError where the data is not as it should be, before any run."""
        if problem.check_data is not None:
            problem.check_data(setup)

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        """Records as they come; `tick` is told how many epochs have passed since the last call."""
        if self.workers == 1 or (len(jobs) == 1 and self._pool is None):
            problem = catalogue.find(self.problem)
            for settings, checkpoint in jobs:
                yield train.run(problem, settings, self.place, checkpoint, lambda: tick(1))
        elif jobs:
            yield from self._share(jobs, tick)

    def _share(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        pool = self._pool or self._start()
        told = self._epochs.value
        try:
            with no_interrupts():  # a submit may start a process
                waiting = {pool.submit(_work, *job) for job in jobs}
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                passed = self._epochs.value
                tick(passed - told)
                told = passed
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise StudyError(
                "a worker was killed, perhaps for want of memory; "
                "the same command goes on where it was, with fewer --workers if it comes again"
            ) from None
        except torch.OutOfMemoryError:
            raise StudyError(
                f"{self.workers} runs at a time are too many for the GPU's memory; "
                "the same command goes on where it was, with fewer --workers"
            ) from None

    def _start(self) -> ProcessPoolExecutor:
        # Forking a process in which torch has started threads may hang it.
        context = multiprocessing.get_context("spawn")
        self._epochs = context.Value("L", 0)
        arguments = (self.problem, self.place, self._epochs)
        self._pool = ProcessPoolExecutor(self.workers, context, _begin, arguments)
        return self._pool

    def close(self) -> None:
        """Stop at once: what a run has saved stays, and no one waits for what it has not."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
            self._pool = None


def default_workers(device: torch.device, threads: int) -> int:
    """As many as the cores bear; one on a GPU, which a single run should fill."""
    return max(cores() // threads, 1) if device.type == "cpu" else 1


_problem: Any = None
_place = train.Place()
_epochs: Any = None


def _begin(problem: str, place: train.Place, epochs: Any) -> None:
    global _problem, _place, _epochs
    die_with_parent()
    _problem, _place, _epochs = catalogue.find(problem), place, epochs


def _work(settings: Settings, checkpoint: Path) -> Record:
    return train.run(_problem, settings, _place, checkpoint, _tick)


def _tick() -> None:
    with _epochs.get_lock():
        _epochs.value += 1
