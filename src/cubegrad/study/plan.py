"""What a sweep compares, and where each method's search starts. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from cubegrad.study import methods
from cubegrad.study.grid import Grid
from cubegrad.study.methods import Entry
from cubegrad.study.problem import Preset, Problem, StudyError
from cubegrad.study.records import Settings
from cubegrad.study.statistics import Judge, Setting


@dataclass(frozen=True)
class Plan:
    """What to compare, and how far the search may go."""

    problem: Problem
    preset_name: str
    preset: Preset
    entries: Sequence[Entry]
    device: str = "cpu"
    lrs: tuple[float, ...] = ()  # override each method's own
    decays: tuple[float, ...] = ()  # override the preset's
    grid: Grid = field(default_factory=Grid)
    widen: int = 6  # how many values to add beyond each end of the first grid
    search_seeds: int = 1
    final_seeds: int = 0  # of each method's best setting
    search: str = "grid"  # or "halving"
    hold_out: bool = False  # choose by a held-out part of the training set

    @property
    def judge(self) -> Judge:
        return Judge(self.problem.metric, self.problem.higher_is_better)

    def settings(self, entry: Entry, setting: Setting, seed: int, hold_out: bool) -> Settings:
        options = json.dumps(dict(self.preset.options), sort_keys=True, default=str)
        return Settings(
            problem=self.problem.name,
            preset=self.preset_name,
            epochs=self.preset.epochs,
            batch=self.preset.batch,
            method=entry.method,
            schedule=entry.schedule,
            lr=float(setting[0]),  # the hash of a run knows 0 from 0.0
            decay=float(setting[1]),
            seed=seed,
            hold_out=hold_out,
            device=self.device,
            options=options.replace("\x7f", "\\u007f"),  # the one control character that JSON keeps
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

    def first_decays(self, entry: Entry) -> tuple[float, ...]:
        own = self.preset.own_decays
        decoupled = own.get("adamw") if methods.METHODS[entry.method].decoupled else None
        return self.decays or own.get(entry.method) or decoupled or self.preset.decays

    def has_one_setting(self, entry: Entry) -> bool:
        """Whether there is nothing to choose, so that no seed influences a choice."""
        return len(set(self.first_lrs(entry))) == 1 and len(set(self.first_decays(entry))) == 1

    def _lrs_apply_to(self, entry: Entry) -> bool:
        """`lrs` are learning rates, or factors if all methods estimate their learning rate."""
        factors = [methods.estimates(other.method) for other in self.entries]
        return all(factors) or not methods.estimates(entry.method)
