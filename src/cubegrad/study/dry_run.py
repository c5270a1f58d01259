"""What --dry-run prints: each method's runs, their epochs, and how long they may take."""

import torch

from cubegrad.study import cost, faults, report, train
from cubegrad.study.methods import Entry, lr_text
from cubegrad.study.plan import Plan
from cubegrad.study.problem import StudyError
from cubegrad.study.progress import duration
from cubegrad.study.records import Record, Runs

HEAD = ["method", "schedule", "lr", "decay", "search", "recorded", "growth", "seeds of the best"]


def text(plan: Plan, runs: Runs, place: train.Place, workers: int | None) -> str:
    """Nothing is written, and no run is started, but a few steps may be timed."""
    records, _ = runs.load()
    preset = plan.preset
    rows = [HEAD, *(_row(plan, entry, records) for entry in plan.entries)]
    left = cost.expected(plan, records)
    how = "every run to its end"
    if plan.search == "halving":
        how = "runs that fall behind are stopped early, so fewer reach their end"
    lines = [
        f"{plan.problem.name}, preset {plan.preset_name}: {preset.epochs} epochs, batch "
        f"{preset.batch}, on {plan.device}; records in {runs.folder}",
        report.plain(rows),
        f"Numbers of runs; {how}. Growth is the average if every value of a grid is equally likely "
        f"to be the best (at most --widen {plan.widen} values beyond each end).",
        f"To do: about {left.runs:.0f} whole runs, {left.epochs:.0f} epochs in all; "
        f"{_time(plan, list(records.values()), place, workers)}.",
    ]
    return "\n\n".join(lines)


def _row(plan: Plan, entry: Entry, records: dict[str, Record]) -> list[str]:
    grid = cost.first_grid(plan, entry)
    known = sum(settings.key in records for settings in grid)
    lrs = ", ".join(lr_text(entry.method, lr) for lr in plan.first_lrs(entry))
    decays = ", ".join(f"{decay:g}" for decay in plan.first_decays(entry))
    counts = (len(grid), known, f"{cost.growth(plan, entry):.1f}", plan.final_seeds)
    return [entry.method, entry.schedule, lrs, decays, *map(str, counts)]


def _time(plan: Plan, records: list[Record], place: train.Place, workers: int | None) -> str:
    """By the records; without any, by a few steps of each method's first setting."""
    recorded = {record.settings.key for record in records}
    total, measured = 0.0, "by the records"
    for entry in plan.entries:
        seconds = cost.seconds_per_epoch(plan, entry, records)
        if seconds is None:
            measured = "by a few steps of each method, without evaluation"
            seconds = _timed(plan, entry, place)
        if seconds is None:
            return "the time is unknown: no record, and no data or device here to time a step with"
        total += seconds * cost.of_entry(plan, entry, recorded).epochs
    if workers is None:
        return f"about {duration(total)} of training {measured}, shared by the cluster's runs"
    at_a_time = f"{workers} run{'s' if workers > 1 else ''} at a time"
    return f"about {duration(total / workers)}, {at_a_time}, {measured}"


def _timed(plan: Plan, entry: Entry, place: train.Place) -> float | None:
    if plan.device == "cuda" and not torch.cuda.is_available():
        return None
    settings = cost.first_grid(plan, entry)[0]
    with faults.reported():
        try:
            return train.seconds_per_epoch(plan.problem, settings, place)
        except StudyError:  # no data
            return None
