"""Runs that share one device: each as soon as a process and its data are there, none too late.

Problems come in the order of --problems. A later one gets the workers for which an earlier one has
nothing to start, because its search waits for results, its data is still being unpacked, or as many
of its runs as keep the device busy are running.

On a GPU, start CUDA MPS first (`nvidia-cuda-mps-control -d`), so that kernels of several processes
overlap. On an H200 nine runs of iwslt14 took 9.8 s an epoch with it, beside one or two of bookwiki,
and 14.0 s without it and without those. Compared with one run at a time, four of bookwiki together
did 1.2 times as much work a second, about as much with five of cifar10 beside them, about 1.3 times
with eleven of fastmri, and five of cifar10 by themselves 1.2 to 1.4 times (torch 2.11, 2026-11-18).
Processes that start right after others were killed may be refused; then start MPS anew with another
CUDA_MPS_PIPE_DIRECTORY.
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from cubegrad.study import Setup, StudyError, catalogue, train
from cubegrad.study.arguments import count
from cubegrad.study.processes import die_with_parent, no_interrupts
from cubegrad.study.progress import duration
from cubegrad.study.records import Record, Runs, Settings

FOLDERS = {  # which a problem's data is in; its runs wait for them
    "cifar10": ("cifar-10-batches-bin",),
    "imagenet": ("imagenet",),
    "fastmri": ("mr-slices",),
    "iwslt14": ("tatoeba",),
    "bookwiki": ("novels",),
    "finetune": ("novels", "wikitext-2"),
}
COMPILED = ("cifar10", "imagenet")  # on a GPU; so are those with other shared files
MARGIN = 1.1  # a run may take this many times as long as expected


class HasProblem(Protocol):
    @property
    def problem(self) -> str: ...


Trial = TypeVar("Trial", bound=HasProblem)


class Job(NamedTuple):
    """Something for a worker process to do."""

    name: str
    call: Callable[[], Record | None]
    seconds: float  # expected, if no run of its kind has ended yet
    kind: str = ""  # its problem, whose last run tells how long the next one will take
    after: str = ""  # the name of the job whose files it reads
    folders: tuple[Path, ...] = ()  # without which it cannot run
    at_once: int | None = None  # the most jobs of its kind at the same time

    @property
    def has_data(self) -> bool:
        return all(folder.exists() for folder in self.folders)


class Running(NamedTuple):
    job: Job
    begun: float  # by `Schedule.gone`
    begun_share: float  # by `Schedule.device_share`


class Wanted(NamedTuple):
    """A run of the study."""

    problem: str  # as the catalogue has it
    settings: Settings
    seconds: float  # expected, beside others
    at_once: int | None = None  # the most runs of the problem at the same time


def chosen(trials: Sequence[Trial], problems: str | None) -> list[Trial]:
    """Those of the problems that --problems names, in its order, or all."""
    known = list(dict.fromkeys(trial.problem for trial in trials))
    names = list(dict.fromkeys(problems.split(","))) if problems else known
    if unknown := [name for name in names if name not in known]:
        raise StudyError(f"--problems {','.join(unknown)}: use some of {','.join(known)}")
    return [trial for name in names for trial in trials if trial.problem == name]


def jobs(wanted: Iterable[Wanted], data: Path, runs: Runs) -> list[Job]:
    """Runs as jobs, after those that make the files which they share."""
    place = train.Place(data, save_every=60.0, logs=runs.folder / "logs")
    todo, first = list[Job](), dict[str, Job]()
    for problem, one, seconds, at_once in wanted:
        call = partial(_train, problem, one, place, runs.checkpoint(one))
        setting = f"lr {one.lr:g} decay {one.decay:g} seed {one.seed}"
        name = f"{one.problem} {one.method}@{one.schedule} {setting}"
        folders = tuple(data / folder for folder in FOLDERS.get(one.problem, ()))
        shared, longest, before = _shared(one)
        if shared and shared not in first:
            prepare = partial(_prepare, problem, one, place)
            first[shared] = Job(shared, prepare, longest, problem, before, folders)
        todo.append(Job(name, call, seconds, problem, shared, folders, at_once))
    return [*first.values(), *todo]


def _shared(one: Settings) -> tuple[str, float, str]:
    """What a first job makes for all runs of a problem, how long it takes, and what comes first."""
    if one.problem == "bookwiki":
        return "tokens", 60, ""
    if one.problem == "finetune":
        return "pretraining", 120, "tokens"
    compiles = one.device == "cuda" and one.problem in COMPILED
    return (f"compiled code of {one.problem}", 60, "") if compiles else ("", 0, "")


def _train(problem: str, one: Settings, place: train.Place, checkpoint: Path) -> Record:
    return train.run(catalogue.find(problem), one, place, checkpoint)


def _prepare(problem: str, one: Settings, place: train.Place) -> None:
    """Makes what the runs share: tokens, pretrained weights, and on a GPU the compiler's cache."""
    found, device = catalogue.find(problem), torch.device(one.device)
    if found.check_data is not None:
        found.check_data(Setup(found.presets[one.preset], 0, device, place.data))
    if one.device == "cuda":
        train.seconds_per_epoch(found, one, place)


class Schedule:
    """Runs jobs in their order, each as soon as a process and its data are there.

    `plan` is asked again after each run, as its result may decide what is to be run next.
    """

    def __init__(
        self, plan: Callable[[], Iterable[Job]], workers: int, seconds: float, runs: Runs
    ) -> None:
        self.plan, self.workers, self.seconds, self.runs = plan, workers, seconds, runs
        self.start = time.monotonic()
        self.waiting: list[Job] = []
        self.begun: set[str] = set()
        self.update()
        self.running: dict[Future[Record | None], Running] = {}
        self.share = self.share_until = 0.0
        self.failed: list[str] = []
        self.took: dict[str, float] = {}  # device seconds, the last run of each kind
        # Not fork: CUDA does not survive it.
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, context, die_with_parent)

    def update(self) -> None:
        self.waiting = [job for job in self.plan() if job.name not in self.begun]

    def gone(self) -> float:
        return time.monotonic() - self.start

    def device_share(self) -> float:
        """Seconds of the device that a job running from the start has had, if all get the same.

        Call it before the number of running jobs changes.
        """
        now = self.gone()
        self.share += (now - self.share_until) / max(len(self.running), 1)
        self.share_until = now
        return self.share

    def say(self, text: str) -> None:
        print(f"{duration(self.gone())} {text}", file=sys.stderr, flush=True)

    def next(self) -> Job | None:
        running = [one.job for one in self.running.values()]
        open_names = {job.name for job in (*self.waiting, *running)}
        kinds = Counter(job.kind for job in running)
        for job in self.waiting:
            room = job.at_once is None or kinds[job.kind] < job.at_once
            if room and job.has_data and job.after not in open_names and self.fits(job):
                return job
        return None

    def expected(self, job: Job) -> float:
        """Its duration if it shares the device evenly with the jobs that run now."""
        if job.kind not in self.took:
            return job.seconds
        return MARGIN * self.took[job.kind] * (len(self.running) + 1)

    def fits(self, job: Job) -> bool:
        return self.gone() + self.expected(job) <= self.seconds

    def data_may_come(self) -> bool:
        """Whether a run waits for its data only, which may still be unpacked."""
        return self.seconds < float("inf") and any(
            not job.has_data and self.fits(job) for job in self.waiting
        )

    def run(self) -> None:
        said = 0.0
        while self.gone() < self.seconds:
            while len(self.running) < self.workers and (job := self.next()):
                self.begin(job)
            if not self.running and not self.data_may_come():
                break
            if not self.running:
                time.sleep(1.0)
            done, _ = wait(self.running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                self.finish(future)
            if self.gone() - said > 20:
                said = self.gone()
                names = ", ".join(one.job.name for one in self.running.values())
                self.say(f"{len(self.waiting)} wait; now {names}")

    def begin(self, job: Job) -> None:
        self.waiting.remove(job)
        self.begun.add(job.name)
        self.say(f"start {job.name}, about {duration(self.expected(job))}")
        running = Running(job, self.gone(), self.device_share())
        with no_interrupts():
            self.running[self.pool.submit(job.call)] = running

    def finish(self, future: Future[Record | None]) -> None:
        share = self.device_share()
        job, begun, begun_share = self.running.pop(future)
        seconds = self.gone() - begun
        took = duration(seconds)
        try:
            record = future.result()
        except Exception as error:  # the other runs go on
            self.failed.append(job.name)
            self.begun |= {one.name for one in self.waiting if one.after == job.name}
            self.update()
            self.say(f"FAILED {job.name} after {took}: {type(error).__name__}: {error}")
            return
        if record is not None:
            # record.seconds includes the time before a kill; scale a resumed run to a whole one.
            self.took[job.kind] = (share - begun_share) * max(record.seconds / seconds, 1.0)
            self.runs.append(record)
            self.update()
        result = "" if record is None else f": {record.last(record.about['metric'])}"
        self.say(f"done {job.name} in {took}{result}")

    def close(self) -> None:
        """Stop at once. Checkpoints stay."""
        running = [one.job.name for one in self.running.values()]
        left = running + [job.name for job in self.waiting]
        if left:
            self.say(f"not run: {', '.join(left)}")
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def parser(description: str, presets: Sequence[str], out: str) -> argparse.ArgumentParser:
    """The options that these scripts have in common."""
    parser = argparse.ArgumentParser(description=description)
    add: Any = parser.add_argument
    add("--preset", default="cpu", choices=tuple(presets))
    add("--problems", metavar="A,B", help="the most urgent first; all, unless given")
    add("--epochs", type=count, help="overrides each problem's, for a quick try")
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path(out))
    add("--known", type=Path, default=Path("docs/results"), help="folders with records to reuse")
    add("--workers", type=count, default=1)
    add("--minutes", type=float, default=float("inf"))
    add("--table", action="store_true", help="run nothing, print the table of --out")
    return parser


def run_and_print(
    options: argparse.Namespace,
    jobs: Callable[[argparse.Namespace, Runs], list[Job]],
    table: Callable[[Iterable[Record]], str],
    runs: Runs | None = None,
) -> None:
    runs, failed = runs or Runs(options.out), list[str]()
    if not options.table:
        with runs.locked():
            runs.repair()
            plan = partial(jobs, options, runs)
            schedule = Schedule(plan, options.workers, 60 * options.minutes, runs)
            try:
                schedule.run()
            finally:
                schedule.close()
            failed = schedule.failed
    print(table(runs.load()[0].values()))
    if failed:
        raise StudyError(f"failed: {', '.join(failed)}; run the same command again")
