"""Differences, ranks and widths, against values worked out by hand and by scipy."""

import math
from dataclasses import replace

import pytest
from scipy import stats

from cubegrad.study.comparison import (
    GRID_STEP,
    Difference,
    Rate,
    common_span,
    difference,
    first_epoch,
    lr_profile,
    one_step_off,
    ranks,
    reported,
    share_within,
    t_quantile,
)
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Estimate, Judge, summarise

ACCURACY, LOSS = Judge("accuracy", True), Judge("loss", False)


def test_two_standard_errors_of_three_seeds_cover_82_percent() -> None:
    # With 2 degrees of freedom P(|t| < x) is x / sqrt(2 + x²): 2 / sqrt(6).
    assert t_quantile(2, 2 / math.sqrt(6)) == pytest.approx(2, rel=1e-12)


def test_a_difference_is_taken_seed_for_seed() -> None:
    ours = {1: 3.0, 2: 5.0, 3: 4.0, 8: 9.0}
    theirs = {3: 3.5, 2: 4.0, 1: 2.5, 9: 0.0}
    found = difference(ours, theirs, ACCURACY)
    assert found.gains == {1: 0.5, 2: 1.0, 3: 0.5}
    expected = stats.ttest_rel([3, 5, 4], [2.5, 4, 3.5]).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-12)
    # The mean is 2/3, the standard error 1/6, t 4.3027: 2/3 ± 0.717.
    assert found.interval == pytest.approx((-0.0504, 1.3838), abs=1e-4)
    assert found.sign == 0
    assert difference(ours, theirs, LOSS).gains == {1: -0.5, 2: -1.0, 3: -0.5}


def test_a_difference_has_a_sign_if_its_interval_excludes_zero() -> None:
    # Standard error 0.1 / sqrt(3), times 4.3027: ± 0.248.
    assert Difference({1: 0.2, 2: 0.3, 3: 0.4}).sign == 1
    assert Difference({1: -0.2, 2: -0.3, 3: -0.4}).sign == -1
    assert Difference({1: 0.1, 2: 0.2, 3: 0.3}).sign == 0


def test_a_diverged_seed_is_no_pair_and_one_pair_is_no_interval() -> None:
    found = difference({1: 1.0, 2: None, 3: 2.0}, {1: 0.5, 2: 1.0, 3: None}, ACCURACY)
    assert (found.gains, found.lost, found.interval, found.sign) == ({1: 0.5}, (2, 3), None, 0)
    assert difference({1: 1.0}, {2: 1.0}, ACCURACY).estimate is None


@pytest.mark.parametrize("values", [(3.0, 1.0, 2.0), (1.0, 1.0, 2.0), (5.0, 5.0, 5.0), (0.0,)])
def test_ranks_are_scipys(values: tuple[float, ...]) -> None:
    found = ranks(dict(zip("abc", values, strict=False)))
    assert list(found.values()) == list(stats.rankdata([-value for value in values]))


def test_a_profile_is_in_decades_and_percent_of_the_best() -> None:
    accuracy = lr_profile([(0.01, 45.0), (0.1, 50.0), (1.0, None)], 0.1, higher_is_better=True)
    assert accuracy == [Rate(-1.0, 10.0), Rate(0.0, 0.0), Rate(1.0, math.inf)]
    loss = lr_profile([(0.1, 2.0), (0.2, 2.5)], 0.1, higher_is_better=False)
    assert loss == [Rate(0.0, 0.0), Rate(pytest.approx(math.log10(2)), 25.0)]
    assert lr_profile([(0.1, None)], 0.1, higher_is_better=True) == []
    equal = [(0.01, 99.0), (0.1, 99.0), (1.0, 98.01)]
    assert lr_profile(equal, 0.1, higher_is_better=True)[0] == Rate(-1.0, 0.0)
    assert lr_profile(equal, 0.01, higher_is_better=True)[-1] == Rate(2.0, pytest.approx(1.0))
    assert lr_profile([(0.1, 0.0), (1.0, 1.0)], 0.1, higher_is_better=False)[1].behind == math.inf


def test_the_common_span_is_what_every_profile_reaches() -> None:
    wide = [Rate(-1.0, 9.0), Rate(0.0, 0.0), Rate(0.4, 1.0)]
    narrow = [Rate(-0.3, 1.0), Rate(0.0, 0.0), Rate(0.7, 9.0)]
    at_edge = [Rate(0.0, 0.0), Rate(0.3, 9.0)]
    assert common_span([wide, narrow, []]) == (-0.3, 0.4)
    assert common_span([wide, narrow, at_edge]) == (0.0, 0.3)
    assert common_span([]) == (0.0, 0.0)


def test_a_rate_stands_for_half_the_way_to_its_neighbours() -> None:
    # Cells: -0.3 to -0.15, -0.15 to 0.15, 0.15 to 0.3 (cut off by the span).
    rates = [Rate(-0.3, 3.0), Rate(0.0, 0.0), Rate(0.3, 1.0), Rate(0.7, 0.5)]
    share = share_within(rates, 2.0, (-0.3, 0.3))
    assert (share.within, share.run, share.span) == pytest.approx((0.45, 0.6, 0.6))
    assert share.missing == pytest.approx(0.0, abs=1e-12)
    assert share_within(rates, 3.0, (-0.3, 0.3)).within == pytest.approx(0.6)
    assert share_within(rates, 0.0, (-0.3, 0.3)).within == pytest.approx(0.3)


def test_decades_far_from_any_rate_were_not_run() -> None:
    # From -1 to 0 there are two half steps of the grid at the ends, and nothing between.
    share = share_within([Rate(-1.0, 1.0), Rate(0.0, 0.0)], 5.0, (-1.0, 0.0))
    assert share.within == share.run == pytest.approx(GRID_STEP)
    assert share.missing == pytest.approx(1 - GRID_STEP)


def test_one_step_off_is_the_next_rate_of_the_grid() -> None:
    grid = [0.01, 0.025, 0.05, 0.1]
    curve = list(zip(grid, [4.0, 2.0, 3.0, 9.0], strict=True))
    assert one_step_off(lr_profile(curve, 0.025, False)) == (100.0, 50.0)
    assert one_step_off(lr_profile([curve[1], curve[3]], 0.025, False)) == (None, None)
    assert one_step_off(lr_profile(curve[1:], 0.025, False)) == (None, 50.0)


def test_the_first_epoch_as_good_as_a_target() -> None:
    curve = [Estimate(value, None, 1) for value in (3.0, 2.0, 2.5, 1.0)]
    assert first_epoch(curve, 2.0, higher_is_better=False) == 2
    assert first_epoch(curve, 0.5, higher_is_better=False) is None
    assert first_epoch(curve, 3.0, higher_is_better=True) == 1


def record(lr: float, seed: int, accuracy: float, **changes: object) -> Record:
    settings = Settings("toy", "cpu", 1, 16, "sgd", "flat", lr, 0.0, seed)
    curve: dict[str, list[float | None]] = {"train_loss": [1.0], "accuracy": [accuracy]}
    return Record(replace(settings, **changes), "finished", curve, 1.0)


def test_the_reported_runs_are_those_of_the_summary() -> None:
    search = [record(0.1, 0, 80.0), record(0.2, 0, 90.0)]
    seeds = [record(0.2, 1, 88.0), record(0.2, 2, 86.0)]
    records = [*search, *seeds]
    found = reported(records, summarise(records, ACCURACY))
    assert {seed: run.last("accuracy") for seed, run in found.items()} == {1: 88.0, 2: 86.0}


def test_a_run_on_the_test_set_replaces_the_held_out_one() -> None:
    held = [record(lr, 0, lr, hold_out=True) for lr in (0.1, 0.2)]
    records = [record(0.2, 0, 50.0), *held]
    found = reported(records, summarise(records, ACCURACY))
    assert [run.last("accuracy") for run in found.values()] == [50.0]
