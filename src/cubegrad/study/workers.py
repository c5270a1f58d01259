"""Runs on this machine: in this process, or in a pool of processes."""

import functools
import multiprocessing
import multiprocessing.process
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cubegrad.study import catalogue, faults, train
from cubegrad.study.logs import Log
from cubegrad.study.problem import Problem, Setup, StudyError
from cubegrad.study.processes import cores, die_with_parent, no_interrupts
from cubegrad.study.records import Record, Settings


class Job(NamedTuple):
    """A run, or the part of one after epoch `since` and up to epoch `until`."""

    settings: Settings
    checkpoint: Path
    since: int = 0
    until: int | None = None  # None: the end

    @property
    def epochs(self) -> int:
        return (self.until or self.settings.epochs) - self.since


def run_job(problem: Problem, place: train.Place, job: Job, tick: Callable[[], None]) -> Record:
    settings, checkpoint, since, until = job
    with faults.reported(Log(place.logs, settings)):
        return train.run(problem, settings, place, checkpoint, tick, since, until)


@dataclass
class Machine:
    """Runs jobs of one problem, `workers` at a time, each with the threads of its preset.

    The processes live until `close`: starting one takes seconds, as it imports torch.
    """

    problem: str  # by name: workers import it
    place: train.Place
    workers: int = 1
    _pool: ProcessPoolExecutor | None = None
    _epochs: Any = None

    def check(self, problem: Problem, setup: Setup) -> None:
        """Raises StudyError for missing or malformed data, before any run."""
        if problem.check_data is not None:
            with faults.reported():
                problem.check_data(setup)

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        """Yield records as runs finish; `tick` gets the number of epochs since its last call."""
        if self.workers == 1 or (len(jobs) == 1 and self._pool is None):
            problem = catalogue.find(self.problem)
            for job in jobs:
                try:
                    record = run_job(problem, self.place, job, lambda: tick(1))
                except torch.OutOfMemoryError:
                    raise StudyError(
                        "a run needs more memory than the GPU has; use a smaller --batch"
                    ) from None
                yield record
        elif jobs:
            yield from self._run_in_pool(jobs, tick)

    def _run_in_pool(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        pool = self._pool or self._start()
        reported = self._epochs.value
        try:
            with no_interrupts():  # a submit may start a process
                waiting = {pool.submit(_run_job, job) for job in jobs}
            while waiting:
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                passed = self._epochs.value
                tick(passed - reported)
                reported = passed
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise StudyError(
                "a worker was killed, perhaps out of memory; run the same command again to resume, "
                "with fewer --workers if it happens again"
            ) from None
        except torch.OutOfMemoryError:
            raise StudyError(
                f"{self.workers} runs at a time are too many for the GPU's memory; "
                "run the same command again to resume, with fewer --workers"
            ) from None

    def _start(self) -> ProcessPoolExecutor:
        # Not fork: after torch has started threads, the child may hang.
        context = multiprocessing.get_context("spawn")
        self._epochs = context.Value("L", 0)
        arguments = (self.problem, self.place, self._epochs)
        self._pool = ProcessPoolExecutor(self.workers, context, _start_worker, arguments)
        return self._pool

    def close(self) -> None:
        """Stop at once. Checkpoints stay; work since the last one is lost."""
        if self._pool is not None:
            processes = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()
            self._pool = None


def default_workers(device: torch.device, threads: int) -> int:
    """As many as the cores allow; one on a GPU, which a single run should fill."""
    return max(cores() // threads, 1) if device.type == "cpu" else 1


_find = functools.cache(catalogue.find)
_problem = ""
_place = train.Place()
_epochs: Any = None


def _start_worker(problem: str, place: train.Place, epochs: Any) -> None:
    global _problem, _place, _epochs
    die_with_parent()
    _problem, _place, _epochs = problem, place, epochs


def _run_job(job: Job) -> Record:
    # Found here: the pool has only a traceback for an error while a worker starts.
    return run_job(_find(_problem), _place, job, _tick)


def _tick() -> None:
    with _epochs.get_lock():
        _epochs.value += 1
