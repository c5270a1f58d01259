"""Does a state in codes train as well as one in float32? Seed for seed, on the study's problems.

    PYTHONPATH=src python3 benchmarks/compact_quality.py --preset gpu --data data --out runs/compact
    ... --problems cifar10,bookwiki --workers 6 --minutes 8
    ... --table

The learning rates are the best that the searches in docs/results found for MADGRAD with a float32
state, and so are the lengths; seed 0 made that choice and is left out. Runs that are in --out are
not repeated, nor are float32 runs whose records are in --known. The runs of all problems share the
worker processes. With --minutes no run is started that would probably not end in time.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import compact_problems
from compact_table import SUFFIX, table

from cubegrad.study import Problem, StudyError, catalogue, methods, train
from cubegrad.study.processes import die_with_parent, no_interrupts
from cubegrad.study.progress import duration
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.sweep import Plan

OWN = {"digits-long": "digits_long"}
FOLDERS = {  # which a problem's data is in; its runs wait for it
    "cifar10": "cifar-10-batches-bin",
    "imagenet": "imagenet",
    "fastmri": "mr-slices",
    "iwslt14": "tatoeba",
    "bookwiki": "novels",
    "finetune": "wikitext-2",
}


class Trial(NamedTuple):
    """One setting of one problem; what is None is the preset's."""

    problem: str
    lr: float
    decay: float = 0.0
    epochs: int | None = None
    schedule: str | None = None
    seconds: float = 60.0  # expected for a run, beside others
    seeds: int = 3


TRIALS = {
    "gpu": (
        Trial("cifar10", 2.5e-4, 1e-3, 18, seconds=90),
        Trial("iwslt14", 0.05, seconds=130),
        Trial("bookwiki", 0.01, epochs=10, schedule="polynomial:1000", seconds=120),
        Trial("imagenet", 2.5e-3, 1e-4, seconds=120),
        Trial("finetune", 1e-3, seconds=40, seeds=5),
        Trial("fastmri", 0.05, epochs=4, seconds=120),
        Trial("digits-long", 1e-3, seconds=60),
        Trial("digits-long", 1e-2, seconds=60),
        Trial("digits", 0.025, seconds=10, seeds=10),
    ),
    "cpu": (
        Trial("digits", 0.025, seconds=10, seeds=10),
        Trial("cifar10", 2.5e-3, seconds=10),
        Trial("imagenet", 2.5e-3, seconds=30),
        Trial("fastmri", 0.025, seconds=30),
        Trial("iwslt14", 0.25, seconds=30),
        Trial("bookwiki", 0.025, seconds=20),
        Trial("finetune", 2.5e-3, seconds=20, seeds=5),
        Trial("digits-long", 1e-3, seconds=200),
        Trial("digits-long", 1e-2, seconds=200),
    ),
}


class Job(NamedTuple):
    """Something for a worker process to do."""

    name: str
    call: Callable[[], Record | None]
    seconds: float
    after: str = ""  # the name of the job whose files it reads
    folder: Path | None = None  # without which it cannot run


def find(problem: str) -> Problem:
    return catalogue.find(f"compact_problems:{OWN[problem]}" if problem in OWN else problem)


def settings(trial: Trial, method: str, seed: int, preset_name: str) -> Settings:
    problem = find(trial.problem)
    changes = {"epochs": trial.epochs, "schedule": trial.schedule}
    preset = replace(
        problem.presets[preset_name],
        **{name: value for name, value in changes.items() if value},
    )
    device = "cpu" if preset_name == "cpu" else "cuda"
    plan = Plan(problem, preset_name, preset, (), device)
    lr = 1.0 if methods.estimates(method) else trial.lr
    return plan.settings(methods.entry(method, preset), (lr, trial.decay), seed, hold_out=False)


def wanted(options: argparse.Namespace) -> Iterator[tuple[Trial, Settings]]:
    """Every run of the chosen problems, both forms of a method with each seed."""
    chosen = options.problems.split(",") if options.problems else None
    for trial in TRIALS[options.preset]:
        if chosen is not None and trial.problem not in chosen:
            continue
        for seed in range(1, (options.seeds or trial.seeds) + 1):
            for method in options.methods.split(","):
                for form in (method, method + SUFFIX):
                    one = settings(trial, form, seed, options.preset)
                    yield trial, replace(one, epochs=options.epochs or one.epochs)


def known(folder: Path) -> dict[str, Record]:
    """Records of docs/results, by key. Those of imagenet are of other images."""
    files = [file.parent for file in folder.glob("*/records.jsonl")]
    found = [Runs(one).load()[0] for one in files if one.name not in ("imagenet", "compact")]
    return {key: record for records in found for key, record in records.items()}


def jobs(options: argparse.Namespace, runs: Runs) -> list[Job]:
    """What is still to do; runs that are known are copied into `runs`."""
    done, elsewhere = runs.load()[0], known(options.known)
    place = train.Place(options.data, save_every=60.0)
    todo, first = [], dict[str, Job]()
    device = "cpu" if options.preset == "cpu" else "cuda"
    for trial, one in wanted(options):
        if one.key in done:
            continue
        if one.key in elsewhere:
            runs.append(elsewhere[one.key])
            continue
        after = {"bookwiki": "tokens", "finetune": "pretraining"}.get(trial.problem, "")
        call = partial(_train, trial.problem, one, place, runs.checkpoint(one))
        name = f"{one.problem} {one.method} {one.lr:g} seed {one.seed}"
        own = FOLDERS.get(trial.problem)
        folder = None if own is None else options.data / own
        todo.append(Job(name, call, trial.seconds, after, folder))
        if after:
            arguments = (trial.problem, options.data, options.preset, device)
            call = partial(compact_problems.prepare, *arguments)
            seconds, before = (60, "") if after == "tokens" else (120, "tokens")
            first[after] = Job(after, call, seconds, before, options.data / "novels")
    return [*first.values(), *todo]


def _train(problem: str, one: Settings, place: train.Place, checkpoint: Path) -> Record:
    return train.run(find(problem), one, place, checkpoint)


class Schedule:
    """Runs jobs in their order, each as soon as a process and its data are there."""

    def __init__(self, todo: Sequence[Job], workers: int, seconds: float, runs: Runs) -> None:
        self.waiting, self.workers, self.seconds, self.runs = list(todo), workers, seconds, runs
        self.start = time.monotonic()
        self.running: dict[Future[Record | None], tuple[Job, float]] = {}
        self.failed: list[str] = []
        # Not fork: CUDA does not survive it.
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, context, die_with_parent)

    def gone(self) -> float:
        return time.monotonic() - self.start

    def say(self, text: str) -> None:
        print(f"{duration(self.gone())} {text}", file=sys.stderr, flush=True)

    def next(self) -> Job | None:
        open_names = {job.name for job in self.waiting}
        open_names |= {job.name for job, _ in self.running.values()}
        for job in self.waiting:
            here = job.folder is None or job.folder.exists()
            if here and job.after not in open_names and self.fits(job):
                return job
        return None

    def fits(self, job: Job) -> bool:
        return self.gone() + job.seconds <= self.seconds

    def data_may_come(self) -> bool:
        """Whether a run waits for its data only, which may still be unpacked."""
        return self.seconds < float("inf") and any(
            job.folder is not None and not job.folder.exists() and self.fits(job)
            for job in self.waiting
        )

    def run(self) -> None:
        said = 0.0
        while self.gone() < self.seconds:
            while len(self.running) < self.workers and (job := self.next()):
                self.waiting.remove(job)
                with no_interrupts():
                    self.running[self.pool.submit(job.call)] = job, self.gone()
                self.say(f"start {job.name}, about {duration(job.seconds)}")
            if not self.running and not self.data_may_come():
                break
            if not self.running:
                time.sleep(1.0)
            done, _ = wait(self.running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                self.finish(future)
            if self.gone() - said > 20:
                said = self.gone()
                names = ", ".join(job.name for job, _ in self.running.values())
                self.say(f"{len(self.waiting)} wait; now {names}")

    def finish(self, future: Future[Record | None]) -> None:
        job, begun = self.running.pop(future)
        took = duration(self.gone() - begun)
        try:
            record = future.result()
        except Exception as error:  # the other runs go on
            self.failed.append(job.name)
            self.waiting = [one for one in self.waiting if one.after != job.name]
            self.say(f"FAILED {job.name} after {took}: {type(error).__name__}: {error}")
            return
        if record is not None:
            self.runs.append(record)
        result = "" if record is None else f": {record.last(record.about['metric'])}"
        self.say(f"done {job.name} in {took}{result}")

    def close(self) -> None:
        """Stop at once. Checkpoints stay."""
        left = [job.name for job, _ in self.running.values()] + [job.name for job in self.waiting]
        if left:
            self.say(f"not run: {', '.join(left)}")
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Any = parser.add_argument
    add("--preset", default="cpu", choices=tuple(TRIALS))
    add("--problems", metavar="A,B", help="all, unless given")
    add("--methods", default="madgrad", metavar="A,B", help="each in both forms")
    add("--seeds", type=int, help="overrides each problem's")
    add("--epochs", type=int, help="overrides each problem's, for a quick try")
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("runs/compact"))
    add("--known", type=Path, default=Path("docs/results"), help="folders with records to reuse")
    add("--workers", type=int, default=1)
    add("--minutes", type=float, default=float("inf"))
    add("--table", action="store_true", help="run nothing, print the table of --out")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    runs = Runs(options.out)
    failed = []
    if not options.table:
        with runs.locked():
            runs.repair()
            schedule = Schedule(jobs(options, runs), options.workers, 60 * options.minutes, runs)
            try:
                schedule.run()
            finally:
                schedule.close()
            failed = schedule.failed
    print(table(runs.load()[0].values()))
    if failed:
        raise StudyError(f"failed: {', '.join(failed)}; run the same command again")


if __name__ == "__main__":
    import compact_quality  # by the name that workers import, so that it is loaded only once

    try:
        compact_quality.main()
    except StudyError as error:
        sys.exit(str(error))
