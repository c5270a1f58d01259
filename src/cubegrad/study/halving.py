"""Successive halving through Optuna: runs that fall behind are stopped early.

They are compared by their training loss, the mean over an epoch. Before the learning rate has
fallen, a test metric varies more from epoch to epoch than from setting to setting: on cifar10 at
`cpu`, after the first of 6 epochs, the four methods' best of 13 rates were 5th, 4th, 2nd and 1st by
training loss, and 12th, 6th, 10th and 4th by test accuracy.

Optuna's pruner is asynchronous: it judges a run by those that reported before it, and lets the
first one pass. So all runs of an epoch train first, in any order, and then report in a fixed one.
The decisions are then the same with any number of workers, and when a search is resumed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cubegrad.study.methods import Entry
from cubegrad.study.problem import optional
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Setting

FACTOR = 3  # a third of the runs passes

# Trains runs up to an epoch and returns their records, which may be longer.
Advance = Callable[[Iterable[Settings], int], list[Record]]
Stop = Callable[[Settings], None]  # is called for each run that does not go on
Candidates = dict[tuple[Entry, Setting], list[Settings]]  # the runs of each, by seed


def decision_epochs(epochs: int) -> list[int]:
    """When runs are judged: after about a ninth and a third of their epochs."""
    first = max(round(epochs / FACTOR**2), 1)
    return [epoch for epoch in (first, first * FACTOR) if epoch < epochs]


def middle_first(values: Iterable[float]) -> list[float]:
    """The middle of the sorted values, then outwards.

    The pruner lets the first run pass, so that one should be good; in sorted order, each may be a
    little better than those before, and all pass.
    """
    ordered = sorted(values)
    middle = (len(ordered) - 1) / 2
    return sorted(ordered, key=lambda value: abs(ordered.index(value) - middle))


class Halving:
    """One Optuna study per method; settings that are added later compete with the earlier ones."""

    def __init__(self, epochs: int, advance: Advance, stop: Stop) -> None:
        self.optuna = optional("optuna", "search")
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        self.epochs, self.advance, self.stop = decision_epochs(epochs), advance, stop
        self.studies: dict[Entry, Any] = {}
        self.judged: dict[tuple[Entry, Setting], bool] = {}  # whether it passed every decision

    def survivors(self, candidates: Candidates) -> Candidates:
        """Those whose runs are to be finished. The order within a method is the pruner's."""
        new = {one: runs for one, runs in candidates.items() if one not in self.judged}
        trials = {(entry, setting): self._study(entry).ask() for entry, setting in new}
        for epoch in self.epochs:
            wanted = [settings for runs in new.values() for settings in runs]
            records = {r.settings.key: r for r in self.advance(wanted, epoch)}
            for one, runs in list(new.items()):
                reached = [records[settings.key] for settings in runs]
                trials[one].report(_train_loss(reached, epoch), epoch)
                if trials[one].should_prune():
                    self.judged[one] = False
                    for settings in new.pop(one):
                        self.stop(settings)
        self.judged |= dict.fromkeys(new, True)
        return {one: runs for one, runs in candidates.items() if self.judged[one]}

    def _study(self, entry: Entry) -> Any:
        if entry not in self.studies:
            pruner = self.optuna.pruners.SuccessiveHalvingPruner(
                min_resource=self.epochs[0] if self.epochs else 1, reduction_factor=FACTOR
            )
            self.studies[entry] = self.optuna.create_study(direction="minimize", pruner=pruner)
        return self.studies[entry]


def _train_loss(records: Sequence[Record], epoch: int) -> float:
    """The mean over the seeds; NaN, which the pruner rejects, if a run had diverged by then."""
    losses = [loss for record in records for loss in record.curve["train_loss"][epoch - 1 : epoch]]
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) / len(known) if len(known) == len(records) else math.nan
