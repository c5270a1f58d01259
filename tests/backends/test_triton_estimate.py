"""The kernel that updates an estimated lr, against the same in Python."""

import random
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from cubegrad import MADGRAD, MADGRADW, backends, distance
from cubegrad.functions import NumberFunctions
from cubegrad.optim.auto import estimate
from cubegrad.options import Hyper
from cubegrad.rule import MADGRAD as MADGRAD_RULE
from cubegrad.rule import MADGRADW_AUTO, Rule

triton = pytest.importorskip("cubegrad.backends.triton.estimate")
DEVICE = cases.TRITON.device
COUNTS = [10, 7, 0]
RULES = (MADGRAD_RULE, MADGRADW_AUTO)
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
each_class = pytest.mark.parametrize("cls", [MADGRAD, MADGRADW])


def on_device(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def sums_of(count: int, step: int) -> list[list[float]]:
    """Sums like those of a run: an agreement of either sign, and two that grow."""
    rng = random.Random(step)
    return [
        [rng.uniform(-1, 3), step + rng.random(), 2 * step + rng.random()] for _ in range(count)
    ]


@pytest.mark.parametrize("shrink", [None, 0.9])
@pytest.mark.parametrize("count", [1, 3])
@each_rule
def test_it_equals_the_python_function(rule: Rule, count: int, shrink: float | None) -> None:
    hypers = [Hyper(0.0, 0.9, 1e-6, 0.0, shrink if i != 1 else None, False) for i in range(count)]
    rows = [[1e-2, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0] for _ in range(count)]
    factors, counts = [1.0, 0.0, 0.5][:count], COUNTS[:count]
    values, kept = on_device(rows), None
    if shrink is not None:
        kept = on_device([h.shrink if h.shrink is not None else 1.0 for h in hypers])
    for step in range(1, 6):
        step_sums = sums_of(count, step)
        sums = on_device(step_sums)
        rates = on_device([rows[0][2] * factor for factor in factors])
        triton.advance(rule, values, sums, rates, kept, on_device(counts), None)
        rows = distance.advance(NumberFunctions, rule, rows, step_sums, factors, counts, hypers)
        assert values.tolist() == [pytest.approx(row, rel=1e-12) for row in rows]
        assert not sums.any()
    assert rows[0][0] > 0.1  # from 0.01


def test_factors_of_0_leave_the_rate() -> None:
    values, sums = on_device([[1e-2, 0.0, 0.3, 0.0, 4.0, 0.0, 0.0]]), on_device([[0.0, 0.0, 0.0]])
    triton.advance(MADGRAD_RULE, values, sums, on_device([0.0]), None, on_device([10.0]), None)
    assert values.tolist() == [[1e-2, 0.0, 0.3, 0.0, 5.0, 0.0, 0.0]]


@pytest.mark.parametrize("overflow", [0.0, 1.0])
@each_rule
def test_a_skipped_step_changes_nothing_but_the_sums(rule: Rule, overflow: float) -> None:
    row = [1e-2, 0.0, 0.3, 0.1, 4.0, 0.0, 2.0]
    values, sums = on_device([row]), on_device([[5.0, 6.0, 7.0]])
    found_inf = torch.full((1,), overflow, device=DEVICE)
    triton.advance(rule, values, sums, on_device([0.3]), None, on_device([10.0]), found_inf)
    assert (values.tolist() == [row]) == bool(overflow)
    assert not sums.any()


@each_rule
def test_a_damaged_gradient_does_not_move_the_distance(rule: Rule) -> None:
    nan, rate = float("nan"), 1e-2 if rule.anchored else 0.3
    values, sums = on_device([[1e-2, 0.0, rate, 0.1, 4.0, 0.0, 2.0]]), on_device([[nan, nan, nan]])
    triton.advance(rule, values, sums, on_device([0.3]), None, on_device([10.0]), None)
    distance, _, lr, *_ = values.tolist()[0]
    assert (distance, lr) == (1e-2, rate)


def groups_that_change(cls: Any, steps: int, **options: Any) -> tuple[list[Tensor], Any]:
    """Two groups with a parameter that lacks a gradient for two steps, later a third group."""
    params = [cases.parameter(cases.randn((n,), torch.float64, n), DEVICE) for n in (9, 4, 6, 5)]
    groups: list[dict[str, Any]] = [
        {"params": params[:2], "weight_decay": 0.02},
        {"params": params[2:3], "lr": torch.tensor([0.5])},
    ]
    optimizer = cls(groups, lr="auto", foreach=False, **options)
    for k in range(steps):
        if k == 6:
            optimizer.add_param_group({"params": params[3:], "lr": 0.0})
        for param in params:
            noise = cases.randn(param.shape, torch.float64, k).to(DEVICE)
            param.grad = param.detach() - 3 + 0.1 * noise
        if k in (3, 4):
            params[0].grad = None
        optimizer.step()
    return params, optimizer


def pretend_on_device(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Keep the numbers in tensors, and let the kernel or torch advance them."""
    never = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(estimate.Estimate, "on_host", never, raising=False)
    kernel = triton.advance if way == "kernel" else None
    monkeypatch.setattr(backends, "estimate_kernel", lambda *_: kernel)


@pytest.mark.parametrize("way", ["kernel", "tensors"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["", "decoupled"])
@each_class
def test_an_optimizer_makes_the_same_steps_on_a_device(
    cls: Any, way: str, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate in tensors, updated by the kernel or by torch, equals that of the host."""
    expected, reference = groups_that_change(cls, 12, decoupled_weight_decay=decoupled)
    pretend_on_device(monkeypatch, way)
    params, optimizer = groups_that_change(cls, 12, decoupled_weight_decay=decoupled)
    assert optimizer.estimated_lr() == pytest.approx(reference.estimated_lr(), rel=1e-11)
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["kernel", "tensors"])
@each_class
def test_a_factor_has_its_gradient_on_a_device(
    cls: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every step: the next one must not overwrite an estimate that autograd still needs."""

    def slopes_of_steps() -> list[float]:
        start = cases.randn((5,), torch.float64, 1).to(DEVICE)
        param, slopes = torch.nn.Parameter(start.clone()), []
        factor = torch.ones((), dtype=torch.float64, device=DEVICE, requires_grad=True)
        optimizer = cls([param], lr="auto", differentiable=True)
        optimizer.param_groups[0]["lr"] = factor
        for _ in range(4):
            moved = param.clone()
            optimizer.param_groups[0]["params"][0] = moved
            optimizer.state[moved] = optimizer.state.pop(param, {})
            moved.grad = moved.detach() - 3
            optimizer.step()
            slopes.append(torch.autograd.grad(moved.sum(), factor)[0].item())
            param = moved.detach().requires_grad_()
            kept = optimizer.state.pop(moved)
            optimizer.state[param] = {name: value.detach() for name, value in kept.items()}
        return slopes

    expected = slopes_of_steps()
    pretend_on_device(monkeypatch, way)
    assert slopes_of_steps() == pytest.approx(expected, rel=1e-10)
    assert abs(expected[-1]) > 0
