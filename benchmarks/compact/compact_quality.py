"""Does a state in codes train as well as one in float32? Seed for seed, on the study's problems.

    python benchmarks/compact/compact_quality.py --preset gpu --data data --out runs/compact
    ... --problems cifar10,bookwiki --workers 6 --minutes 8
    ... --table

The learning rates are the best that the searches in docs/results found for MADGRAD with a float32
state, and so are the lengths; seed 0 made that choice and is left out. Runs that are in --out are
not repeated, nor are float32 runs whose records are in --known. The runs of all problems share the
worker processes. With --minutes no run is started that would probably not end in time.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from compact_table import SUFFIX, table

from cubegrad.study import StudyError, catalogue, methods
from cubegrad.study.plan import Plan
from cubegrad.study.records import Runs, Settings

sys.path.append(str(Path(__file__).parents[1]))
from shared import shared_device
from shared.earlier import known
from shared.shared_device import Job, Wanted

# Where they are not the catalogue's: those of docs/results are the presets of their time.
MODULES = {
    "digits-long": "compact_problems:digits_long",
    "imagenet": "shared.earlier:imagenet",
    "fastmri": "shared.earlier:fastmri",
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


def catalogue_name(problem: str) -> str:
    return MODULES.get(problem, problem)


def settings(trial: Trial, method: str, seed: int, preset_name: str) -> Settings:
    problem = catalogue.find(catalogue_name(trial.problem))
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
    for trial in shared_device.chosen(TRIALS[options.preset], options.problems):
        for seed in range(1, (options.seeds or trial.seeds) + 1):
            for method in options.methods.split(","):
                for form in (method, method + SUFFIX):
                    one = settings(trial, form, seed, options.preset)
                    yield trial, replace(one, epochs=options.epochs or one.epochs)


def jobs(options: argparse.Namespace, runs: Runs) -> list[Job]:
    """What is still to do; runs that are known are copied into `runs`."""
    done, todo = runs.load()[0], []
    elsewhere = known(options.known, ("compact", "peers"))  # "compact" has what this made before
    for trial, one in wanted(options):
        if one.key in done:
            continue
        if one.key in elsewhere:
            runs.append(elsewhere[one.key])
            continue
        todo.append(Wanted(catalogue_name(trial.problem), one, trial.seconds))
    return shared_device.jobs(todo, options.data, runs)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = shared_device.parser((__doc__ or "").splitlines()[0], tuple(TRIALS), "runs/compact")
    add: Any = parser.add_argument
    add("--methods", default="madgrad", metavar="A,B", help="each in both forms")
    add("--seeds", type=int, help="overrides each problem's")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    shared_device.run_and_print(parse(words), jobs, table)


if __name__ == "__main__":
    import compact_quality  # by the name that workers import, so that it is loaded only once

    try:
        compact_quality.main()
    except StudyError as error:
        sys.exit(str(error))
