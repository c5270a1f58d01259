"""How many runs and epochs a plan takes, growth of its grids included."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from cubegrad.study.grid import growing_ends
from cubegrad.study.halving import FACTOR, decision_epochs
from cubegrad.study.methods import Entry
from cubegrad.study.plan import Plan
from cubegrad.study.records import Record, Settings


@dataclass(frozen=True)
class Cost:
    runs: float = 0.0  # up to the last epoch
    epochs: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.runs + other.runs, self.epochs + other.epochs)


def first_grid(plan: Plan, entry: Entry) -> list[Settings]:
    return [
        plan.settings(entry, (lr, decay), seed, plan.hold_out)
        for lr in plan.first_lrs(entry)
        for decay in plan.first_decays(entry)
        for seed in range(plan.search_seeds)
    ]


def growth(plan: Plan, entry: Entry) -> float:
    """Runs that the search adds on average, if each value is as likely to be the best."""
    lrs, decays = plan.first_lrs(entry), plan.first_decays(entry)
    rows = growing_ends(lrs) / len(lrs) * len(decays)
    columns = growing_ends(decays) / len(decays) * len(lrs)
    return (rows + columns) * plan.search_seeds if plan.widen else 0.0


def search(plan: Plan, runs: float) -> Cost:
    """Of one method's grid of so many runs."""
    epochs = plan.preset.epochs
    if plan.search == "grid" or not runs:
        return Cost(runs, runs * epochs)
    total, before, going = 0.0, 0, runs
    for epoch in decision_epochs(epochs):
        total += going * (epoch - before)
        before, going = epoch, max(going / FACTOR, 1.0)
    # The next larger rate of the best one runs again, from its start.
    again = min(plan.search_seeds, runs - going)
    return Cost(going + again, total + going * (epochs - before) + again * epochs)


def expected(plan: Plan, recorded: Container[str]) -> Cost:
    """What is left of a plan, given the keys of the runs that are recorded."""
    return sum((of_entry(plan, entry, recorded) for entry in plan.entries), Cost())


def of_entry(plan: Plan, entry: Entry, recorded: Container[str]) -> Cost:
    todo = sum(one.key not in recorded for one in first_grid(plan, entry))
    seeds = Cost(plan.final_seeds, plan.final_seeds * plan.preset.epochs)
    return search(plan, todo + growth(plan, entry)) + seeds


def seconds_per_epoch(plan: Plan, entry: Entry, records: Iterable[Record]) -> float | None:
    """By records of this problem at this size: the method's, or else the other methods'."""
    alike: list[Record] = []
    others: list[Record] = []
    for record in records:
        s = record.settings
        same = plan.settings(entry, (s.lr, s.decay), s.seed, s.hold_out)
        size = (s.problem, s.preset, s.batch, s.device, s.options)
        if size == (same.problem, same.preset, same.batch, same.device, same.options):
            (alike if s.method == entry.method else others).append(record)
    used = alike or others
    epochs = sum(record.epochs for record in used)
    return sum(record.seconds for record in used) / epochs if epochs else None
