"""A grid of runs -> Records: search each method's learning rate and decay, then repeat the best."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cubegrad.study import grid as grids
from cubegrad.study import methods, statistics
from cubegrad.study.grid import Grid
from cubegrad.study.methods import Entry
from cubegrad.study.problem import Preset, Problem, StudyError
from cubegrad.study.progress import Progress
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.statistics import Judge, Setting
from cubegrad.study.workers import Job


@dataclass(frozen=True)
class Plan:
    """What to compare, and how far the search may go."""

    problem: Problem
    preset_name: str
    preset: Preset
    entries: Sequence[Entry]
    device: str = "cpu"
    lrs: tuple[float, ...] = ()  # override each method's own
    decays: tuple[float, ...] = (0.0,)
    grid: Grid = field(default_factory=Grid)
    widen: int = 6  # how many values to add beyond each end of the first grid
    search_seeds: int = 1
    hold_out: bool = False  # choose by a held-out part of the training set

    @property
    def judge(self) -> Judge:
        return Judge(self.problem.metric, self.problem.higher_is_better)

    def settings(self, entry: Entry, setting: Setting, seed: int, hold_out: bool) -> Settings:
        return Settings(
            problem=self.problem.name,
            preset=self.preset_name,
            epochs=self.preset.epochs,
            batch=self.preset.batch,
            method=entry.method,
            schedule=entry.schedule,
            lr=setting[0],
            decay=setting[1],
            seed=seed,
            hold_out=hold_out,
            device=self.device,
            options=json.dumps(dict(self.preset.options), sort_keys=True, default=str),
        )

    def first_lrs(self, entry: Entry) -> tuple[float, ...]:
        if self.lrs and self._lrs_apply_to(entry):
            return self.lrs
        low, high = entry.lrs(self.preset)
        if low == high:
            return (low,)
        # The tolerance covers rounding: under sqrt:b the ends were multiplied by √b.
        values = tuple(self.grid.between(low * (1 - 1e-9), high * (1 + 1e-9)))
        if not values:
            raise StudyError(
                f"the range {low:g} to {high:g} of {entry.method} has no value of the grid; "
                f"widen it in the preset's lrs, or give --lr"
            )
        return values

    def has_one_setting(self, entry: Entry) -> bool:
        """Whether there is nothing to choose, so that no seed influences a choice."""
        return len(set(self.first_lrs(entry))) == 1 and len(set(self.decays)) == 1

    def _lrs_apply_to(self, entry: Entry) -> bool:
        """`lrs` are learning rates, or factors if all methods estimate their learning rate."""
        factors = [methods.estimates(other.method) for other in self.entries]
        return all(factors) or not methods.estimates(entry.method)


class Executor(Protocol):
    """Runs the jobs: this machine, or a cluster."""

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]: ...


class Sweep:
    """Runs a plan in a directory, except what has a record there."""

    def __init__(self, plan: Plan, runs: Runs, machine: Executor, progress: Progress) -> None:
        self.plan, self.runs, self.machine, self.progress = plan, runs, machine, progress
        self.records, _ = runs.load()

    def do(self, wanted: Iterable[Settings]) -> list[Record]:
        """The records of these settings; missing ones are run."""
        wanted = list(wanted)
        todo = [settings for settings in wanted if settings.key not in self.records]
        self.progress.add(len(todo), len(todo) * self.plan.preset.epochs)
        jobs = [(settings, self.runs.checkpoint(settings)) for settings in todo]
        for record in self.machine.run(jobs, self.progress.epochs):
            self.runs.append(record)
            self.records[record.settings.key] = record
            self.progress.finished(record, self.plan.judge.metric)
        return [self.records[settings.key] for settings in wanted]

    def search(self) -> dict[Entry, Setting | None]:
        """Each method's best setting. The grids grow until no best value is at an edge."""
        plan = self.plan
        lrs = {entry: set(plan.first_lrs(entry)) for entry in plan.entries}
        decays = {entry: set(plan.decays) for entry in plan.entries}
        while True:
            bests = self._run_grids(lrs, decays)
            growing = False
            for entry, best in bests.items():
                axes = [(lrs[entry], plan.first_lrs(entry)), (decays[entry], plan.decays)]
                # If all runs diverged, a smaller learning rate may help, another decay will not.
                for axis, (tried, first) in enumerate(axes[:1] if best is None else axes):
                    value = None if best is None else best[axis]
                    more = grids.next_value(sorted(tried), value, first, plan.grid, plan.widen)
                    if more is not None:
                        tried.add(more)
                        growing = True
            if not growing:
                return bests

    def _run_grids(
        self, lrs: dict[Entry, set[float]], decays: dict[Entry, set[float]]
    ) -> dict[Entry, Setting | None]:
        """Run all methods' grids together; returns each method's best setting."""
        plan, seeds = self.plan, range(self.plan.search_seeds)
        wanted = {
            entry: [
                plan.settings(entry, (lr, decay), seed, plan.hold_out)
                for lr in sorted(lrs[entry])
                for decay in sorted(decays[entry])
                for seed in seeds
            ]
            for entry in plan.entries
        }
        self.do(itertools.chain(*wanted.values()))
        return {
            entry: statistics.best(
                statistics.by_setting(self.records[one.key] for one in settings), plan.judge
            )
            for entry, settings in wanted.items()
        }

    def repeat(self, bests: dict[Entry, Setting | None], seeds: int) -> list[Record]:
        """Run the best settings with seeds that the search did not use.

        With one setting there was no choice, so the search's seeds count too, unless it held out
        part of the training set.
        """
        plan = self.plan

        def start(entry: Entry) -> int:
            return 0 if plan.has_one_setting(entry) and not plan.hold_out else plan.search_seeds

        return self.do(
            plan.settings(entry, setting, seed, hold_out=False)
            for entry, setting in bests.items()
            if setting is not None
            for seed in range(start(entry), start(entry) + seeds)
        )
