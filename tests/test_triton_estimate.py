"""The kernel that moves an estimated lr on, against the same in Python."""

import random
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from cubegrad import estimate
from cubegrad.options import Hyper

triton = pytest.importorskip("cubegrad.backends.triton")
DEVICE = next(backend.device for backend in cases.BACKENDS if backend.name == "triton")
COUNTS = [10, 7, 0]


def on_device(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def sums_of(count: int, step: int) -> list[list[float]]:
    """Grown as those of a run: agreement of either sign, norms and roots that rise."""
    rng = random.Random(step)
    return [[rng.uniform(-1, 3), step + rng.random(), 2 * step + rng.random()]] * count


@pytest.mark.parametrize("shrink", [None, 0.9])
@pytest.mark.parametrize("count", [1, 3])
def test_it_does_what_the_formulas_say(count: int, shrink: float | None) -> None:
    hypers = [Hyper(0.0, 0.9, 1e-6, 0.0, shrink if i != 1 else None, False) for i in range(count)]
    rows = [[1e-2, 0.0, 0.3, 0.0, 0.0] for _ in range(count)]
    factors, counts = [1.0, 0.0, 0.5][:count], COUNTS[:count]
    values, kept = on_device(rows), None
    if shrink is not None:
        kept = on_device([h.shrink if h.shrink is not None else 1.0 for h in hypers])
    for step in range(1, 6):
        told = sums_of(count, step)
        sums = on_device(told)
        rates = on_device([rows[0][2] * factor for factor in factors])
        triton.advance(values, sums, rates, kept, on_device(counts), None)
        rows = estimate._moved(estimate.Numbers, rows, told, factors, counts, hypers)
        assert values.tolist() == [pytest.approx(row, rel=1e-12) for row in rows]
        assert not sums.any()
    assert rows[0][0] > 0.1  # it grew


def test_factors_of_0_leave_the_rate() -> None:
    values, sums = on_device([[1e-2, 0.0, 0.3, 0.0, 4.0]]), on_device([[0.0, 0.0, 0.0]])
    triton.advance(values, sums, on_device([0.0]), None, on_device([10.0]), None)
    assert values.tolist() == [[1e-2, 0.0, 0.3, 0.0, 5.0]]


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_skipped_step_changes_nothing_but_the_sums(found: float) -> None:
    row = [1e-2, 0.0, 0.3, 0.1, 4.0]
    values, sums = on_device([row]), on_device([[5.0, 6.0, 7.0]])
    found_inf = torch.full((1,), found, device=DEVICE)
    triton.advance(values, sums, on_device([0.3]), None, on_device([10.0]), found_inf)
    assert (values.tolist() == [row]) == bool(found)
    assert not sums.any()


def test_a_damaged_gradient_does_not_move_the_distance() -> None:
    nan = float("nan")
    values, sums = on_device([[1e-2, 0.0, 0.3, 0.1, 4.0]]), on_device([[nan, nan, nan]])
    triton.advance(values, sums, on_device([0.3]), None, on_device([10.0]), None)
    distance, _, lr, *_ = values.tolist()[0]
    assert (distance, lr) == (1e-2, 0.3)
