"""Means, errors and choices, against values worked out by hand."""

import math

import pytest

from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import (
    Judge,
    best,
    by_entry,
    by_setting,
    estimate,
    searched,
    summarise,
)

ACCURACY = Judge("accuracy", True)
LOSS = Judge("loss", False)


def record(lr: float, seed: int, *accuracy: float, decay: float = 0.0, **more: object) -> Record:
    """A run with these accuracies in %, and 1 minus them as its losses."""
    hold_out = bool(more.pop("hold_out", False))
    s = Settings("toy", "cpu", 2, 16, "madgrad", "flat", lr, decay, seed, hold_out)
    curve: dict[str, list[float | None]] = {
        "train_loss": [a / 10 for a in accuracy],
        "accuracy": list(accuracy),
        "loss": [1 - a / 100 for a in accuracy],
    }
    status = "finished"
    if not accuracy:
        status, curve = "diverged", {"train_loss": [None]}
    if "loss" in more:
        curve["loss"] = [more["loss"]]  # type: ignore[list-item]
    return Record(s, status, curve, 1.0)


def test_two_standard_errors() -> None:
    # Mean 3, deviations -2 -1 0 3, sum of squares 14, variance 14/3, 2 sqrt(14/3/4).
    got = estimate([1.0, 2.0, 3.0, 6.0])
    assert (got.mean, got.n) == (3.0, 4)
    assert got.error == pytest.approx(2 * math.sqrt(7 / 6), rel=1e-15)
    assert estimate([5.0, 5.0]).error == 0.0


def test_one_value_has_no_error() -> None:
    assert estimate([4.0]).error is None


def test_best_is_the_highest_accuracy_or_the_lowest_loss_at_the_end() -> None:
    records = [record(0.1, 0, 99, 80), record(0.2, 0, 10, 90), record(0.3, 0)]
    assert best(by_setting(records), ACCURACY) == (0.2, 0.0)
    assert best(by_setting(records), LOSS) == (0.2, 0.0)


def test_ties_go_to_the_lower_loss_then_to_smaller_values() -> None:
    records = [record(0.1, 0, 90, loss=0.3), record(0.2, 0, 90, loss=0.2)]
    assert best(by_setting(records), ACCURACY) == (0.2, 0.0)
    even = [record(0.2, 0, 90, decay=0.1), record(0.2, 0, 90), record(0.3, 0, 90)]
    assert best(by_setting(even), ACCURACY) == (0.2, 0.0)


def test_a_setting_with_one_diverged_seed_loses() -> None:
    records = [record(0.1, 0, 50), record(0.1, 1, 50), record(0.2, 0, 90), record(0.2, 1)]
    assert best(by_setting(records), ACCURACY) == (0.1, 0.0)


def test_nothing_is_best_where_all_diverged() -> None:
    records = [record(0.1, 0), record(0.2, 0)]
    assert best(by_setting(records), ACCURACY) is None
    summary = summarise(records, ACCURACY)
    assert (summary.best, summary.searched, summary.search_diverged) == (None, 2, 2)


def test_common_seeds_choose_and_the_others_are_reported() -> None:
    search = [record(0.1, 0, 70, 80), record(0.2, 0, 80, 90), record(0.3, 0, 60, 70)]
    # Seed 0 of lr 0.2 was lucky; a mean over all seeds would have chosen lr 0.1.
    final = [record(0.2, 1, 40, 50), record(0.2, 2, 60, 70)]
    summary = summarise([*search, *final], ACCURACY)
    assert summary.best == (0.2, 0.0)
    assert summary.seeds == (1, 2)
    assert (summary.final["accuracy"].mean, summary.final["accuracy"].n) == (60.0, 2)
    # Deviations ±10: variance 200, 2 sqrt(200/2) = 20.
    assert summary.final["accuracy"].error == pytest.approx(20.0)
    assert [point.mean for point in summary.curves["accuracy"]] == [50.0, 60.0]
    assert [point.mean for point in summary.curves["train_loss"]] == [5.0, 6.0]
    assert summary.lr_curve == [(0.1, 80.0), (0.2, 90.0), (0.3, 70.0)]
    assert summary.at_edge == ()


def test_a_sweep_over_all_seeds_chooses_by_their_mean() -> None:
    records = [record(0.1, 0, 60), record(0.1, 1, 80), record(0.2, 0, 90), record(0.2, 1, 40)]
    summary = summarise(records, ACCURACY)
    assert summary.best == (0.1, 0.0)
    assert summary.final["accuracy"].mean == 70.0
    assert summary.seeds == (0, 1)


def test_a_held_out_split_chooses_where_there_is_one() -> None:
    search = [record(0.1, 0, 80, hold_out=True), record(0.2, 0, 70, hold_out=True)]
    final = [record(0.1, 1, 30), record(0.1, 2, 50), record(0.2, 1, 99)]
    summary = summarise([*search, *final], ACCURACY)
    assert summary.best == (0.1, 0.0)
    assert summary.final["accuracy"].mean == 40.0


def test_stray_runs_of_other_seeds_do_not_choose() -> None:
    groups = searched([record(0.1, 0, 50), record(0.2, 0, 60), record(0.9, 7, 99)])
    assert sorted(groups) == [(0.1, 0.0), (0.2, 0.0)]


def test_edges_are_named_and_0_is_none() -> None:
    grid = [record(lr, 0, 50 + lr, decay=decay) for lr in (1, 2) for decay in (0.0, 0.1)]
    assert summarise(grid, ACCURACY).at_edge == ("lr",)
    higher = [record(1, 0, 50), record(1, 0, 60, decay=0.1)]
    assert summarise(higher, ACCURACY).at_edge == ("decay",)
    elsewhere = [record(lr, 0, 50 - lr, decay=0.1) for lr in (1, 2, 3)]
    assert summarise([record(2, 0, 60), *elsewhere], ACCURACY).at_edge == ()
    beside = [record(1, 0, 55), record(2, 0, 60), *elsewhere]
    assert summarise(beside, ACCURACY).at_edge == ("lr",), "3 was tried at another decay only"


def test_a_diverged_seed_is_counted_and_left_out_of_the_mean() -> None:
    records = [record(0.1, 0, 80), record(0.2, 0, 70), record(0.1, 1, 60), record(0.1, 2)]
    summary = summarise(records, ACCURACY)
    assert (summary.diverged, len(summary.seeds)) == (1, 2)
    assert (summary.final["accuracy"].mean, summary.final["accuracy"].n) == (60.0, 1)


def test_entries_are_methods_under_schedules() -> None:
    assert list(by_entry([record(0.1, 0, 1), record(0.2, 0, 1)])) == ["madgrad@flat"]
