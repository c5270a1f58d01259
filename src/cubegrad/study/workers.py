"""Runs on this machine: in this process, or in several that share its cores."""

import concurrent.futures
import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cubegrad.study import catalogue, train
from cubegrad.study.problem import StudyError
from cubegrad.study.records import Record, Settings

Job = tuple[Settings, Path]  # and its checkpoint


@dataclass(frozen=True)
class Machine:
    """Runs jobs of one problem, `workers` at a time. Each run has the threads of its preset."""

    problem: str  # by name: a process of its own has to find it again
    place: train.Place
    workers: int = 1

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        """Records as they come; `tick` is told how many epochs have passed since the last call."""
        if self.workers == 1 or len(jobs) == 1:
            problem = catalogue.find(self.problem)
            for settings, checkpoint in jobs:
                yield train.run(problem, settings, self.place, checkpoint, lambda: tick(1))
        else:
            yield from self._pool(jobs, tick)

    def _pool(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        # Forking a process in which torch has started threads may hang it.
        context = multiprocessing.get_context("spawn")
        epochs = context.Value("L", 0)
        pool = concurrent.futures.ProcessPoolExecutor(
            min(self.workers, len(jobs)), context, _begin, (self.problem, self.place, epochs)
        )
        told = 0
        try:
            waiting = {pool.submit(_work, *job) for job in jobs}
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, timeout=0.2, return_when=concurrent.futures.FIRST_COMPLETED
                )
                passed = epochs.value
                tick(passed - told)
                told = passed
                for future in done:
                    yield future.result()
        except BrokenProcessPool:
            raise StudyError(
                "a worker was killed, perhaps for want of memory; "
                "the same command goes on where it was, with fewer --workers if it comes again"
            ) from None
        finally:
            _end(pool)


def default_workers(device: torch.device, threads: int) -> int:
    """As many as the cores bear; one on a GPU, which a single run should fill."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max((cores or 1) // threads, 1) if device.type == "cpu" else 1


def _end(pool: concurrent.futures.ProcessPoolExecutor) -> None:
    """Stop at once: what a run has saved stays, and no one waits for what it has not."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    idle = not getattr(pool, "_pending_work_items", None)
    pool.shutdown(wait=idle, cancel_futures=True)
    if not idle:
        for process in processes:
            with contextlib.suppress(OSError):
                process.terminate()


_problem: Any = None
_place = train.Place()
_epochs: Any = None


def _begin(problem: str, place: train.Place, epochs: Any) -> None:
    global _problem, _place, _epochs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    sys.stdout.flush()
    _problem, _place, _epochs = catalogue.find(problem), place, epochs


def _die_with(parent: multiprocessing.process.BaseProcess) -> None:
    """A worker whose parent was killed would go on for hours beside the one that resumes."""
    parent.join()
    os._exit(1)


def _work(settings: Settings, checkpoint: Path) -> Record:
    return train.run(_problem, settings, _place, checkpoint, _tick)


def _tick() -> None:
    with _epochs.get_lock():
        _epochs.value += 1
