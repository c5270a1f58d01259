"""lr="auto" beside other learning-rate-free optimizers, and beside tuned ones, on seven problems.

    python benchmarks/auto/auto_quality.py --preset gpu --data data --out runs/peers
    ... --problems finetune,digits --workers 8 --minutes 8
    ... --table

The methods without a learning rate run as their authors recommend (docs/study.md), with seeds 1 to
3. Those with one are searched with seed 0, and the best setting is run with seeds 1 to 3. A search
goes on while its best value is the smallest or the largest; that of schedule-free AdamW has three
values, as its authors' default is meant to do. Runs that are in --out are not repeated, nor are
those with a fixed learning rate whose records are in --known. With --minutes no run is started
that would probably not end in time; the same command goes on from there.
"""

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from auto_table import DEFAULT, SCHEDULE_FREE, best_lr, table

from cubegrad.study import StudyError, catalogue, methods, schedules
from cubegrad.study.grid import Grid
from cubegrad.study.plan import Plan
from cubegrad.study.records import Record, Runs, Settings

sys.path.append(str(Path(__file__).parents[1]))
from shared import shared_device
from shared.earlier import known
from shared.shared_device import Job, Wanted

OURS = ("madgradw-auto", "madgradw-auto-compact", "madgradw-auto-schedule-free")
FREE = (*OURS, "madgrad-auto", "madgrad-auto-compact", "prodigy", "dadapt-adam", "dog")
DECOUPLED = (
    *OURS,
    "prodigy",
    "adamw",
    SCHEDULE_FREE,
)  # which multiply decay by their learning rate
SEEDS = (1, 2, 3)


class Trial(NamedTuple):
    """One problem; what is None is the preset's. Of several learning rates the best is searched."""

    problem: str
    lr: tuple[float, ...]  # of MADGRAD; a single one is the best of a sweep in docs/results
    adamw: tuple[float, ...]
    decay: float = 0.0
    decoupled: float = 0.0  # the decay of AdamW and its like
    searched: float | None = None  # that of AdamW alone, if docs/results has its search
    epochs: int | None = None
    schedule: str | None = None
    seconds: float = 60.0  # expected for a run, beside others


TRIALS = {
    "gpu": (
        Trial("digits", (0.025,), (5e-3, 1e-2, 2.5e-2), seconds=10),
        Trial("finetune", (5e-3, 1e-2, 2.5e-2), (2.5e-4, 5e-4, 1e-3), seconds=30),
        Trial(
            "bookwiki",
            (0.01,),
            (1e-3, 2.5e-3, 5e-3),
            epochs=10,
            schedule="polynomial:1000",
            seconds=120,
        ),
        Trial("iwslt14", (0.05,), (5e-3, 1e-2, 2.5e-2), seconds=130),
        Trial("cifar10", (5e-4,), (2.5e-4, 5e-4, 1e-3), 5e-4, 0.05, epochs=18, seconds=150),
        Trial("imagenet", (5e-4, 1e-3, 2.5e-3), (1e-3,), 5e-4, 0.05, searched=0.25, seconds=180),
        # AdamW without decay is Adam, whose search found 2.5e-3.
        Trial("fastmri", (0.025, 0.05, 0.1), (2.5e-3,), epochs=4, seconds=180),
    ),
    "cpu": (
        Trial("digits", (0.025,), (5e-3, 1e-2, 2.5e-2), seconds=10),
        Trial("finetune", (0.025,), (5e-3, 1e-2, 2.5e-2), seconds=20),
        Trial("cifar10", (2.5e-3,), (2.5e-3, 5e-3, 1e-2, 2.5e-2), seconds=10),
        Trial("bookwiki", (0.025,), (2.5e-3, 5e-3, 1e-2, 2.5e-2), seconds=20),
        Trial("imagenet", (2.5e-3,), (5e-4, 1e-3, 2.5e-3, 5e-3), seconds=30),
        Trial("iwslt14", (0.25,), (1e-2, 2.5e-2, 5e-2), seconds=30),
        Trial("fastmri", (0.025,), (1e-3, 2.5e-3, 5e-3, 1e-2), seconds=30),
    ),
}


def catalogue_name(problem: str) -> str:
    """fastmri is as it was for the records of its search."""
    return "shared.earlier:fastmri" if problem == "fastmri" else problem


def settings(trial: Trial, method: str, lr: float, seed: int, preset_name: str) -> Settings:
    problem = catalogue.find(catalogue_name(trial.problem))
    changes = {"epochs": trial.epochs, "schedule": trial.schedule}
    given = {name: value for name, value in changes.items() if value}
    preset = replace(problem.presets[preset_name], **given)
    plan = Plan(problem, preset_name, preset, (), "cpu" if preset_name == "cpu" else "cuda")
    name = method.partition("@")[0]
    decay = trial.decoupled if name in DECOUPLED else trial.decay
    if name == "adamw" and trial.searched is not None:
        decay = trial.searched
    entry = methods.entry(method, preset)
    return plan.settings(entry, (lr, decay), seed, hold_out=False)


def wanted(
    options: argparse.Namespace, done: dict[str, Record]
) -> Iterator[tuple[Trial, Settings]]:
    """What can be run now: all of the search, and what the finished searches have chosen."""
    for trial in shared_device.chosen(TRIALS[options.preset], options.problems):

        def of(method: str, lr: float, *seeds: int, trial: Trial = trial) -> list[Settings]:
            every = [settings(trial, method, lr, seed, options.preset) for seed in seeds]
            return [replace(one, epochs=options.epochs or one.epochs) for one in every]

        ready = [of(method, 1.0, *SEEDS) for method in FREE]
        warm_up = settings(trial, "adamw", 1.0, 0, options.preset).schedule
        if schedules.warms_up(warm_up):
            ready.append(of(f"prodigy@{warm_up}", 1.0, *SEEDS))
        if options.preset == "cpu":
            ready.append(of("ldog", 1.0, *SEEDS))
        ready.append(of(SCHEDULE_FREE, DEFAULT, *SEEDS))
        searches = {
            "madgrad": trial.lr,
            SCHEDULE_FREE: (DEFAULT, 1e-3, 5e-3),
            "adamw": trial.adamw,
        }
        for method, lrs in searches.items():
            search = [one for lr in lrs for one in of(method, lr, 0)] if len(lrs) > 1 else []
            best = chosen_lr([done.get(one.key) for one in search]) if search else lrs[0]
            while method != SCHEDULE_FREE and best and (beyond := next_to_edge(best, search)):
                search += of(method, beyond, 0)
                best = chosen_lr([done.get(one.key) for one in search])
            ready.append(search)
            if best is not None:
                ready.append(of(method, best, *SEEDS))
        for each in ready:
            yield from ((trial, one) for one in each)


def next_to_edge(best: float, search: Sequence[Settings]) -> float | None:
    """The value of the grid beyond the best one, if that is the smallest or the largest."""
    values = [one.lr for one in search]
    if not values:
        return None
    if best == min(values):
        return Grid().below(best)
    return Grid().above(best) if best == max(values) else None


def chosen_lr(records: Sequence[Record | None]) -> float | None:
    """None before all of the search is done, and if all of it diverged."""
    done = [record for record in records if record is not None]
    return best_lr(done) if len(done) == len(records) else None


_known = functools.cache(known)  # asked after each run


def jobs(options: argparse.Namespace, runs: Runs) -> list[Job]:
    done, todo = runs.load()[0], []
    elsewhere = _known(options.known, ("peers",))
    for trial, one in wanted(options, done | elsewhere):
        # Older records of lr="auto" may have older rules.
        if one.key in elsewhere and one.key not in done and not methods.estimates(one.method):
            runs.append(elsewhere[one.key])
        elif one.key not in done:
            todo.append(Wanted(catalogue_name(trial.problem), one, trial.seconds))
    unique = {item.settings.key: item for item in todo}
    return shared_device.jobs(unique.values(), options.data, runs)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    return shared_device.parser(
        (__doc__ or "").splitlines()[0], tuple(TRIALS), "runs/peers"
    ).parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    shared_device.run_and_print(parse(words), jobs, table)


if __name__ == "__main__":
    import auto_quality  # by the name that workers import, so that it is loaded only once

    try:
        auto_quality.main()
    except StudyError as error:
        sys.exit(str(error))
