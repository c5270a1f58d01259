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
    """What is to be compared, and how far the search may go."""

    problem: Problem
    preset_name: str
    preset: Preset
    entries: Sequence[Entry]
    device: str = "cpu"
    lrs: tuple[float, ...] = ()  # in place of each method's own
    decays: tuple[float, ...] = (0.0,)
    grid: Grid = field(default_factory=Grid)
    widen: int = 6  # values beyond each end of the first grid
    search_seeds: int = 1
    hold_out: bool = False  # choose on a held-out part of the training set

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
        if self.lrs and self._are_for(entry):
            return self.lrs
        low, high = entry.lrs(self.preset)
        if low == high:
            return (low,)
        # √b of a schedule is no value of the grid, so an end may lie between two.
        values = tuple(self.grid.between(low * (1 - 1e-9), high * (1 + 1e-9)))
        if not values:
            raise StudyError(
                f"the range {low:g} to {high:g} of {entry.method} has no value of the grid; "
                f"widen it in the preset's lrs, or give --lr"
            )
        return values

    def only(self, entry: Entry) -> bool:
        """Whether there is one setting to try, so that no seed chooses it."""
        return len(set(self.first_lrs(entry))) == 1 and len(set(self.decays)) == 1

    def _are_for(self, entry: Entry) -> bool:
        """Whether a user means `lrs` for this method too: as factors only if all take factors."""
        factors = [methods.estimates(other.method) for other in self.entries]
        return all(factors) or not methods.estimates(entry.method)


class Executor(Protocol):
    """Who runs the jobs: this machine, or a cluster."""

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]: ...


class Sweep:
    """Runs what is missing of a plan in a directory, and keeps what it finds there."""

    def __init__(self, plan: Plan, runs: Runs, machine: Executor, progress: Progress) -> None:
        self.plan, self.runs, self.machine, self.progress = plan, runs, machine, progress
        self.records, _ = runs.load()

    def do(self, wanted: Iterable[Settings]) -> list[Record]:
        """Records of these settings, run unless there already."""
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
        """Each method's best setting. The grids grow until none is best at its edge."""
        plan = self.plan
        lrs = {entry: set(plan.first_lrs(entry)) for entry in plan.entries}
        decays = {entry: set(plan.decays) for entry in plan.entries}
        while True:
            found = self._grids(lrs, decays)
            growing = False
            for entry, best in found.items():
                axes = [(lrs[entry], plan.first_lrs(entry)), (decays[entry], plan.decays)]
                # Decay does not save a method that diverges everywhere; a smaller rate may.
                for axis, (tried, first) in enumerate(axes[:1] if best is None else axes):
                    value = None if best is None else best[axis]
                    more = grids.grown(sorted(tried), value, first, plan.grid, plan.widen)
                    if more is not None:
                        tried.add(more)
                        growing = True
            if not growing:
                return found

    def _grids(
        self, lrs: dict[Entry, set[float]], decays: dict[Entry, set[float]]
    ) -> dict[Entry, Setting | None]:
        """Run every method's whole grid, all together, and find each one's best."""
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

    def repeat(self, found: dict[Entry, Setting | None], seeds: int) -> list[Record]:
        """The best settings with seeds that were not looked at to choose them.

        Where nothing was chosen, the seeds of the search are results like the others, unless it
        trained without a part of the training set.
        """
        plan = self.plan

        def start(entry: Entry) -> int:
            return 0 if plan.only(entry) and not plan.hold_out else plan.search_seeds

        return self.do(
            plan.settings(entry, setting, seed, hold_out=False)
            for entry, setting in found.items()
            if setting is not None
            for seed in range(start(entry), start(entry) + seeds)
        )
