"""The runs that docs/results/README.md is made of: every method on every problem.

    python benchmarks/evidence/evidence_runs.py --preset gpu --data data --out runs/evidence
    ... --problems imagenet,digits --methods sgd,madgrad --workers 8 --minutes 25
    ... --problems bookwiki --methods adam,madgrad --seeds 5
    ... --table

The learning rate of each method is searched with seed 0, and its decay where the preset or `TRIALS`
has more than one. If --known has runs of the method at another length or with other options of the
problem, a search begins at their best setting and its neighbours; if none of them had decay, at
their best rate with several decays. Else it begins in the middle of the preset's learning rates,
without decay if there is 0 among the decays, else (and where decay is decoupled) with the middle
one. It goes on to the neighbours of the best setting until none is better, so no best value is at
an edge, unless that is six values (`Plan.widen`) beyond the preset's. The best setting then runs
with further seeds. MADGRAD with a state in codes takes the setting of MADGRAD, and MADGRADW, also
in codes, that of AdamW.

Each problem has a folder in --out. Runs that are there or in --known are not repeated, and a search
goes on from the best of them, whatever made them; those of `finetune` in --known do not count. With
--minutes no run is started that would probably not end in time; the same command goes on from
there.
"""

import argparse
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cubegrad.study import StudyError, catalogue, methods, report, statistics
from cubegrad.study.arguments import count
from cubegrad.study.experiments import experiments
from cubegrad.study.methods import METHODS, Entry
from cubegrad.study.plan import Plan
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.statistics import Setting

sys.path.append(str(Path(__file__).parents[1]))
from shared import shared_device
from shared.earlier import known
from shared.shared_device import Job, Wanted

SEARCHED = ("sgd", "madgrad", "adam", "adamw", "adagrad", "mirror-madgrad", "madgrad-auto")
# Methods that run at the best setting of another, with nothing searched.
AT_ITS_BEST = {"madgrad": ("madgrad-compact",), "adamw": ("madgradw", "madgradw-compact")}


class Trial(NamedTuple):
    """One problem; what is None is the preset's."""

    problem: str
    seconds: float  # expected for a run, beside others
    epochs: int | None = None
    schedule: str | None = None
    decays: tuple[float, ...] = ()  # of the methods with coupled decay
    seeds: int = 3  # of the best setting
    at_once: int | None = None  # the most runs at a time; on an H200 more only take longer


DECAYS = (0.0, 1e-5)  # where the preset has none, as the paper's best is 0
TRIALS = {
    "gpu": (
        Trial("imagenet", 200, seeds=5),
        Trial("digits", 10, seeds=10),
        Trial("finetune", 30),
        Trial("cifar10", 250, seeds=5, at_once=5),
        Trial("iwslt14", 200, epochs=30, decays=DECAYS),
        Trial(
            "bookwiki",
            240,
            epochs=30,
            schedule="polynomial:3000",
            decays=DECAYS,
            seeds=5,
            at_once=4,
        ),
        Trial("fastmri", 150, epochs=4, decays=DECAYS, seeds=5),  # each head is tested once
    ),
    "cpu": (
        Trial("digits", 10, seeds=5),
        Trial("finetune", 10, seeds=5),
        Trial("bookwiki", 20, seeds=5),
        Trial("iwslt14", 30, seeds=5),
        Trial("imagenet", 30, seeds=5),
        Trial("cifar10", 30, seeds=5),
        Trial("fastmri", 40, seeds=5),
    ),
}


class Folders(Runs):
    """Runs of several problems, each in its own folder."""

    def of(self, settings: Settings) -> Runs:
        return Runs(self.folder / settings.problem)

    def each(self) -> Iterator[Runs]:
        return (Runs(path.parent) for path in sorted(self.folder.glob("*/records.jsonl")))

    def checkpoint(self, settings: Settings) -> Path:
        return self.of(settings).checkpoint(settings)

    def load(self) -> tuple[dict[str, Record], list[str]]:
        records, broken = dict[str, Record](), list[str]()
        for runs in self.each():
            more, damage = runs.load()
            records |= more
            broken += damage
        return records, broken

    def repair(self) -> list[str]:
        return [message for runs in self.each() for message in runs.repair()]

    def append(self, record: Record) -> None:
        runs = self.of(record.settings)
        runs.folder.mkdir(parents=True, exist_ok=True)
        runs.append(record)


def plan_of(trial: Trial, options: argparse.Namespace) -> Plan:
    problem = catalogue.find(trial.problem)
    epochs = options.epochs or trial.epochs
    changes = {"epochs": epochs, "schedule": trial.schedule, "decays": trial.decays}
    given = {name: value for name, value in changes.items() if value}
    preset = replace(problem.presets[options.preset], **given)
    return Plan(problem, options.preset, preset, (), "cpu" if options.preset == "cpu" else "cuda")


def search(
    plan: Plan, entry: Entry, done: dict[str, Record], elsewhere: Iterable[Record] = ()
) -> tuple[list[Settings], Setting | None]:
    """What to run next; if nothing, the best setting, which is None if all runs diverged.

    `elsewhere` may have runs of another length or with other options, where the search then begins.
    """
    lrs, decays = plan.first_lrs(entry), sorted(plan.first_decays(entry))
    # Without decay AdamW is just Adam, so methods with decoupled decay begin with some.
    without = 0 in decays and not METHODS[entry.method].decoupled
    start = lrs[len(lrs) // 2], 0.0 if without else decays[len(decays) // 2]
    tried = _tried(plan, entry, done.values())

    def beside(setting: Setting) -> set[Setting]:
        every = sorted({*decays, setting[1], *(decay for _, decay in tried)})
        return {*_lrs_beside(plan, setting, lrs), *_decays_beside(plan, setting, every)}

    wanted = {start, *_lrs_beside(plan, start, lrs)}
    known = _earlier(plan, entry, elsewhere)
    if (found := statistics.best(known, plan.judge)) is not None:
        begin = found[0], found[1] or start[1]  # AdamW's best may have been without decay
        wanted = {begin, *beside(begin)}
        if len(decays) > 1 and not any(decay for _, decay in known):
            # The rate is known from those runs and the decay is not, so try decays first.
            wanted = {(begin[0], decay) for decay in (*decays, plan.grid.above(decays[-1]))}
    if wanted <= tried.keys():
        best = statistics.best(tried, plan.judge)
        if best is not None:
            wanted = beside(best)
        elif len(lrs) > 1:  # all diverged
            wanted = {(plan.grid.below(min(lr for lr, _ in tried)), start[1])}
        wanted = {(lr, d) for lr, d in wanted if _near(plan, lr, lrs) and _near(plan, d, decays)}
        if wanted <= tried.keys():
            return [], best
    missing = sorted(wanted - tried.keys())
    return [plan.settings(entry, setting, 0, hold_out=False) for setting in missing], None


def _tried(plan: Plan, entry: Entry, records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Those of the records that belong to the method's search."""
    like = plan.settings(entry, (0.0, 0.0), 0, hold_out=False)
    return {
        (record.settings.lr, record.settings.decay): [record]
        for record in records
        if replace(record.settings, lr=like.lr, decay=like.decay) == like
    }


def _earlier(plan: Plan, entry: Entry, records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """The method's runs with seed 0 at another length or with other options; the longest."""
    present = plan.settings(entry, (0.0, 0.0), 0, hold_out=False)
    like = (plan.problem.name, plan.preset_name, plan.device, entry.method, False, 0)
    by_length: dict[int, dict[Setting, list[Record]]] = {}
    for record in records:
        one = record.settings
        its = (one.problem, one.preset, one.device, one.method, one.hold_out, one.seed)
        other = (one.epochs, one.options) != (present.epochs, present.options)
        if its == like and other:
            by_length.setdefault(one.epochs, {})[one.lr, one.decay] = [record]
    return by_length[max(by_length)] if by_length else {}


def _near(plan: Plan, value: float, first: Sequence[float]) -> bool:
    """Whether a value is no further beyond the first ones than a search may go."""
    low, high = min((one for one in first if one > 0), default=0.0), max(first)
    for _ in range(plan.widen if high else 0):
        low, high = plan.grid.below(low), plan.grid.above(high)
    return value == 0 or low <= value <= high


def _lrs_beside(plan: Plan, setting: Setting, lrs: Sequence[float]) -> list[Setting]:
    lr, decay = setting
    return [(plan.grid.below(lr), decay), (plan.grid.above(lr), decay)] if len(lrs) > 1 else []


def _decays_beside(plan: Plan, setting: Setting, decays: Sequence[float]) -> Iterator[Setting]:
    lr, decay = setting
    if len(decays) > 1:
        place = decays.index(decay)
        if decay > 0:
            yield lr, decays[place - 1] if place else plan.grid.below(decay)
        yield lr, decays[place + 1] if decay < decays[-1] else plan.grid.above(decay)


def wanted(
    options: argparse.Namespace, done: dict[str, Record]
) -> Iterator[tuple[Trial, Settings]]:
    """The known and the next runs of each search, and the seeds of what has been chosen."""
    elsewhere = _known(options.known, ("auto",)).values()
    for trial in shared_device.chosen(TRIALS[options.preset], options.problems):
        plan = plan_of(trial, options)
        for method in options.methods:
            entry = methods.entry(method, plan.preset)
            # All known runs of the search, also those that it would not have come to by itself.
            yield from ((trial, run.settings) for (run,) in _tried(plan, entry, elsewhere).values())
            missing, best = search(plan, entry, done, elsewhere)
            yield from ((trial, one) for one in missing)
            if best is None:
                continue
            names = (method, *AT_ITS_BEST.get(method, ()))
            for one in (methods.entry(name, plan.preset) for name in names):
                for seed in range(1, (options.seeds or trial.seeds) + 1):
                    yield trial, plan.settings(one, best, seed, hold_out=False)


_known = functools.cache(known)  # asked after each run


def jobs(options: argparse.Namespace, runs: Runs) -> list[Job]:
    """What is still to do; runs that are known are copied into `runs`."""
    elsewhere = _known(options.known, ("auto",))  # which has runs of older estimates
    while True:
        done, todo, copied = runs.load()[0], [], False
        for trial, one in wanted(options, done):
            if one.key in done:
                continue
            if one.key in elsewhere:
                runs.append(elsewhere[one.key])
                copied = True
            else:
                todo.append(Wanted(trial.problem, one, trial.seconds, trial.at_once))
        if not copied:  # else searches may have got further
            return shared_device.jobs(todo, options.data, runs)


def table(records: Iterable[Record]) -> str:
    blocks = [
        f"{experiment.name}\n\n{report.markdown(report.table(experiment))}"
        for experiment in experiments(records)
    ]
    return "\n\n".join(blocks)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = shared_device.parser(description, tuple(TRIALS), "runs/evidence")
    parser.add_argument("--methods", type=_methods, default=SEARCHED, metavar="A,B")
    parser.add_argument("--seeds", type=count, help="of the best settings; else each problem's")
    return parser.parse_args(words)


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in METHODS]:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)}: use some of {','.join(METHODS)}")
    return names


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    shared_device.run_and_print(options, jobs, table, Folders(options.out))


if __name__ == "__main__":
    try:
        main()
    except StudyError as error:
        sys.exit(str(error))
