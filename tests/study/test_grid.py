"""Grids and their growth, against values worked out by hand."""

import math
import sys

import pytest

from cubegrad.study import StudyError
from cubegrad.study.grid import Grid, next_value, parse_grid, parse_values

TEN = Grid()
TWO = parse_grid("powers-of-2")


def test_between_has_both_ends() -> None:
    assert TEN.between(1e-4, 1e-2) == [1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2]
    assert TEN.between(2e-4, 9e-4) == [2.5e-4, 5e-4]
    assert TWO.between(0.1, 2) == [0.125, 0.25, 0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("grid", "value", "below", "above"),
    [
        (TEN, 1e-4, 5e-5, 2.5e-4),
        (TEN, 2.5e-4, 1e-4, 5e-4),
        (TEN, 5e-4, 2.5e-4, 1e-3),
        (TEN, 1.0, 0.5, 2.5),
        (TEN, 3e-4, 2.5e-4, 5e-4),  # a user's own value lies between two
        (TEN, 1000.0, 500.0, 2500.0),
        (TWO, 0.25, 0.125, 0.5),
        (TWO, 0.3, 0.25, 0.5),
    ],
)
def test_neighbours(grid: Grid, value: float, below: float, above: float) -> None:
    assert (grid.below(value), grid.above(value)) == (below, above)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1", (0.1,)),
        ("1e-3..1e-2", (1e-3, 2.5e-3, 5e-3, 1e-2)),
        ("0,1e-5..5e-5", (0.0, 1e-5, 2.5e-5, 5e-5)),
        ("0.3,0.1,0.1", (0.1, 0.3)),
    ],
)
def test_values(text: str, values: tuple[float, ...]) -> None:
    assert parse_values(text, TEN, "lr") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1", "--lr -1 must be >= 0 and finite; use"),
        ("nan", "--lr nan must be >= 0 and finite; use"),
        ("1e39", "--lr 1e39 is too large for a float32; use"),
        ("1..1e308", "--lr 1e308 is too large for a float32; use"),
        ("fast", "--lr 'fast' is not a number; use"),
        ("1e-1..1e-2", "--lr 1e-1..1e-2 has no value of the grid; use"),
        ("1e-4...1e-1", "--lr 1e-4...1e-1 has three dots; use two, as in 1e-4..1e-1"),
        (".1....5", "--lr .1....5 has three dots; use"),
        ("0.1,1...2", "--lr 1...2 has three dots; use"),
        ("0..1", "--lr 0..1 has no value of the grid; use"),
    ],
)
def test_bad_values(text: str, message: str) -> None:
    with pytest.raises(StudyError) as error:
        parse_values(text, TEN, "lr")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("text", ["5,1", "0.5,1", "1,10", "1,1", "a"])
def test_bad_grids(text: str) -> None:
    with pytest.raises(StudyError, match="grid"):
        parse_grid(text)


FIRST = (1e-3, 2.5e-3, 5e-3)


@pytest.mark.parametrize(
    ("tried", "best", "limit", "more"),
    [
        (FIRST, 2.5e-3, 6, None),  # inside
        (FIRST, 5e-3, 6, 1e-2),
        (FIRST, 1e-3, 6, 5e-4),
        (FIRST, None, 6, 5e-4),  # all diverged
        ((*FIRST, 1e-2), 1e-2, 2, 2.5e-2),
        ((*FIRST, 1e-2, 2.5e-2), 2.5e-2, 2, None),  # the limit
        ((2.5e-4, 5e-4, *FIRST), 2.5e-4, 2, None),
        ((2.5e-4, 5e-4, *FIRST), 5e-3, 2, 1e-2),  # each side has a limit of its own
        (FIRST, 5e-3, 0, None),
    ],
)
def test_growth(
    tried: tuple[float, ...], best: float | None, limit: int, more: float | None
) -> None:
    assert next_value(tried, best, FIRST, TEN, limit) == more


def test_growth_stops_at_0_and_never_moves_a_single_value() -> None:
    assert next_value((0.0, 1e-4), 0.0, (0.0, 1e-4), TEN, 6) is None
    assert next_value((0.0, 1e-4), 1e-4, (0.0, 1e-4), TEN, 6) == 2.5e-4
    assert next_value((1e-4,), 1e-4, (1e-4,), TEN, 6) is None


@pytest.mark.parametrize("grid", [TEN, TWO])
def test_growth_stops_at_the_ends_of_floats(grid: Grid) -> None:
    least, most = math.ulp(0.0), sys.float_info.max
    assert next_value((least, 1.0), least, (least, 1.0), grid, 6) is None
    assert next_value((1.0, 2.6e38), 2.6e38, (1.0, 2.6e38), grid, 6) is None  # those of the weights
    assert next_value((1.0, most), most, (1.0, most), grid, 6) is None
    assert len(grid.between(most / 16, most)) in (3, 4)
