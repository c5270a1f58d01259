"""A grid of runs -> Records: search each method's learning rate and decay, then repeat the best."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from cubegrad.study import cost, statistics
from cubegrad.study import grid as grids
from cubegrad.study.halving import Axis, Candidates, Halving, middle_first
from cubegrad.study.methods import Entry
from cubegrad.study.plan import Plan
from cubegrad.study.progress import Progress
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.statistics import Setting
from cubegrad.study.workers import Job

Bests = dict[Entry, Setting | None]


class Executor(Protocol):
    """Runs the jobs: this machine, or a cluster."""

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]: ...


class Sweep:
    """Runs a plan in a directory, except what has a record there."""

    def __init__(self, plan: Plan, runs: Runs, machine: Executor, progress: Progress) -> None:
        self.plan, self.runs, self.machine, self.progress = plan, runs, machine, progress
        self.records, _ = runs.load()
        self.cut = runs.cut()

    def do(self, wanted: Iterable[Settings], until: int | None = None) -> list[Record]:
        """The records of these settings; missing ones are run, up to epoch `until` if given."""
        wanted, least = list(wanted), until or self.plan.preset.epochs
        jobs = [self._job(one, until) for one in wanted if self._epochs_known(one) < least]
        whole = 0 if until else len(jobs)
        self.progress.add(whole, sum(job.epochs for job in jobs))
        for record in self.machine.run(jobs, self.progress.epochs):
            self.runs.append(record)
            known = self.cut if record.cut else self.records
            known[record.settings.key] = record
            if until is None:
                self.progress.finished(record, self.plan.judge.metric)
        return [self.records.get(one.key) or self.cut[one.key] for one in wanted]

    def _job(self, settings: Settings, until: int | None) -> Job:
        checkpoint = self.runs.checkpoint(settings)
        counted = self.cut[settings.key].epochs if settings.key in self.cut else 0
        return Job(settings, checkpoint, counted if checkpoint.exists() else 0, until)

    def _epochs_known(self, settings: Settings) -> float:
        if settings.key in self.records:
            return math.inf  # a run that diverged has no more to come
        return self.cut[settings.key].epochs if settings.key in self.cut else 0

    def search(self) -> Bests:
        """Each method's best setting. The grids grow until no best value is at an edge."""
        plan = self.plan
        lrs = {entry: set(plan.first_lrs(entry)) for entry in plan.entries}
        decays = {entry: set(plan.first_decays(entry)) for entry in plan.entries}
        halving = None
        if plan.search == "halving":
            halving = Halving(plan.preset.epochs, self.do)
        to_come = cost.expected(plan, self.records)
        self.progress.expect(round(to_come.runs), round(to_come.epochs))
        while True:
            bests = self._run_grids(lrs, decays, halving)
            if not self._grow(bests, lrs, decays):
                for record in self.cut.values():
                    self.runs.drop_checkpoint(record.settings)
                self.progress.expect(0, 0)
                return bests

    def _grow(self, bests: Bests, lrs: Axis, decays: Axis) -> bool:
        """Add the next value where the best one is at an edge; returns whether there was one."""
        plan, growing = self.plan, False
        for entry, best in bests.items():
            axes = [
                (lrs[entry], plan.first_lrs(entry)),
                (decays[entry], plan.first_decays(entry)),
            ]
            # If all runs diverged, a smaller learning rate may help, another decay will not.
            for axis, (tried, first) in enumerate(axes[:1] if best is None else axes):
                value = None if best is None else best[axis]
                more = grids.next_value(sorted(tried), value, first, plan.grid, plan.widen)
                if more is not None:
                    tried.add(more)
                    growing = True
        return growing

    def _run_grids(self, lrs: Axis, decays: Axis, halving: Halving | None) -> Bests:
        """Run all methods' grids together; returns each method's best setting."""
        plan, seeds = self.plan, range(self.plan.search_seeds)
        candidates = {
            (entry, (lr, decay)): [
                plan.settings(entry, (lr, decay), seed, plan.hold_out) for seed in seeds
            ]
            for entry in plan.entries
            for lr in (middle_first if halving else sorted)(lrs[entry])
            for decay in sorted(decays[entry])
        }
        if halving is None:
            return self._bests(candidates)
        while True:
            bests = self._bests(halving.survivors(candidates))
            if not halving.resume_larger(bests, lrs):
                return bests

    def _bests(self, candidates: Candidates) -> Bests:
        """Finish these runs and choose among them."""
        self.do(itertools.chain(*candidates.values()))
        groups: dict[Entry, dict[Setting, list[Record]]] = {}
        for (entry, setting), wanted in candidates.items():
            runs = [self.records[settings.key] for settings in wanted]
            groups.setdefault(entry, {})[setting] = runs
        return {
            entry: statistics.best(groups.get(entry, {}), self.plan.judge)
            for entry in self.plan.entries
        }

    def repeat(self, bests: Bests, seeds: int) -> list[Record]:
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
