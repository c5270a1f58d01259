"""Which choices make MADGRADW: each made differently, at AdamW's best rate and decay.

    python benchmarks/evidence/madgradw_choices.py --preset gpu --data data --out runs/choices
    ... --preset gpu-confirm --variants adamw,madgradw,q3,m0.8 --workers 8 --minutes 9
    ... --preset cpu --problems novels-gpt --variants adamw --seeds 0 --lrs 4e-3,8e-3
    ... --table

On a GPU nothing is searched: rate and decay are the best that docs/results has for AdamW. On a CPU
they are AdamW's best of those that --lrs has tried, with seed 0. A choice is made by the problems
and seeds of `gpu` or `cpu`, and confirmed by others, also by longer runs: `gpu-confirm`,
`cpu-confirm`. Each variant is compared with MADGRADW seed for seed. Runs that are in --out are not
repeated.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import choices_table
from choices_table import OTHERS
from madgradw_variants import BASE, CHANGES, PREFIX

from cubegrad.study import StudyError, catalogue, methods
from cubegrad.study.plan import Plan
from cubegrad.study.records import Runs, Settings

sys.path.append(str(Path(__file__).parents[1]))
from shared import shared_device
from shared.shared_device import Job, Wanted

CHOOSING = (0, 6)  # not among the seeds of docs/results
CONFIRMING = (1, 2, 3, 4, 5)
MODULES = {"novels-gpt": "text_problems:novels", "wikitext-gpt": "text_problems:wikitext"}


class Trial(NamedTuple):
    """One problem at AdamW's best setting; what is None is the preset's."""

    problem: str
    lr: float
    decay: float
    seconds: float  # expected for a run, beside others
    epochs: int | None = None
    schedule: str | None = None
    at_once: int | None = None


TRIALS = {
    "gpu": (
        Trial("finetune", 2.5e-3, 0.05, 20),
        Trial("bookwiki", 2.5e-3, 0.05, 60, 10, "polynomial:1000", 4),
        Trial("cifar10", 5e-4, 0.5, 100, 18),
    ),
    "gpu-confirm": (
        Trial("bookwiki", 2.5e-3, 0.05, 240, 30, "polynomial:3000", 4),
        Trial("imagenet", 1e-3, 2.5, 120, 20),
        Trial("iwslt14", 2.5e-2, 0.1, 100, 10),
        Trial("fastmri", 2.5e-3, 2.5e-2, 100, 2),
        Trial("digits", 5e-3, 0.01, 5),
    ),
    "cpu": (
        Trial("novels-gpt", 8e-3, 0.1, 40),
        Trial("wikitext-gpt", 4e-3, 0.1, 12),
    ),
    "cpu-confirm": (
        Trial("novels-gpt", 8e-3, 0.1, 120, 12, "polynomial:300"),
        Trial("digits", 5e-3, 0.01, 10, 30),
    ),
}


def settings(trial: Trial, method: str, seed: int, preset_name: str) -> Settings:
    problem = catalogue.find(MODULES.get(trial.problem, trial.problem))
    preset_name = preset_name.partition("-")[0]
    changes = {"epochs": trial.epochs, "schedule": trial.schedule}
    given = {name: value for name, value in changes.items() if value}
    preset = replace(problem.presets[preset_name], **given)
    plan = Plan(problem, preset_name, preset, (), "cpu" if preset_name == "cpu" else "cuda")
    entry = methods.entry(method, preset)
    return plan.settings(entry, (trial.lr, trial.decay), seed, hold_out=False)


def wanted(options: argparse.Namespace) -> Iterator[tuple[Trial, Settings]]:
    trials = shared_device.chosen(TRIALS[options.preset], options.problems)
    seeds = CONFIRMING if options.preset.endswith("-confirm") else CHOOSING
    for seed in options.seeds or seeds:
        for name in options.variants:
            for trial in trials:
                one = settings(trial, name, seed, options.preset)
                for lr in options.lrs or (one.lr,):
                    yield trial, replace(one, lr=lr, epochs=options.epochs or one.epochs)


def jobs(options: argparse.Namespace, runs: Runs) -> list[Job]:
    done = runs.load()[0]
    todo = [
        Wanted(MODULES.get(trial.problem, trial.problem), one, trial.seconds, trial.at_once)
        for trial, one in wanted(options)
        if one.key not in done
    ]
    return shared_device.jobs(todo, options.data, runs)


def columns(options: argparse.Namespace) -> list[Settings]:
    """The settings of all trials, whose runs are compared."""
    return [
        replace(one, epochs=options.epochs or one.epochs)
        for preset, trials in TRIALS.items()
        for trial in trials
        for one in (settings(trial, BASE, 0, preset),)
    ]


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = shared_device.parser(description, tuple(TRIALS), "runs/choices")
    add: Any = parser.add_argument
    add("--variants", type=_methods, default=",".join((*OTHERS, *CHANGES)), metavar="A,B")
    add("--seeds", type=_seeds, metavar="A,B", help="else 0,6 to choose, 1 to 5 to confirm")
    add("--lrs", type=_rates, metavar="A,B", help="instead of AdamW's best")
    return parser.parse_args(words)


def _methods(text: str) -> list[str]:
    known = methods.METHODS
    return [PREFIX + name if PREFIX + name in known else name for name in text.split(",")]


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    table = partial(choices_table.table, columns=columns(options))
    shared_device.run_and_print(options, jobs, table)


if __name__ == "__main__":
    import madgradw_choices  # by the name that workers import, so that it is loaded only once

    try:
        madgradw_choices.main()
    except StudyError as error:
        sys.exit(str(error))
