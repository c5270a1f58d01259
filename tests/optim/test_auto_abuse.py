"""lr="auto" with gradients and weights that no training should have, but some has."""

import math
import warnings

import cases
import numpy as np
import pytest
import torch
from cases import ScheduleFreeMADGRADW
from short_runs import parameters
from torch import nn
from torch.amp import GradScaler

from cubegrad import MADGRAD, MADGRADW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def quadratic(backend, **options):
    """Parameters and an optimizer; `train` has the gradients of |x - 3|² / 2, with noise."""
    params = parameters([(30,), (11,)], device=backend.device)
    return params, MADGRAD(params, lr="auto", **backend.flags, **options)


def train(params, optimizer, steps, scale=1.0, change=None):
    for k in range(steps):
        for i, param in enumerate(params):
            noise = cases.randn(tuple(param.shape), param.dtype, 10 * k + i).to(param.device)
            param.grad = (param.detach() - 3 + 0.1 * noise) * scale
        if change is not None:
            change(k, params)
        optimizer.step()


def damage_one(value, only=None):
    """Write `value` into one gradient in each step, or in one step only."""

    def damage(k, params):
        if only in (None, k):
            params[0].grad[3] = value

    return damage


def distance(params):
    return float(torch.cat([(p.detach() - 3).cpu() for p in params]).square().mean().sqrt())


@cases.each_fast_backend
def test_a_large_loss_trains(backend):
    plain, huge = quadratic(backend), quadratic(backend)
    train(*plain, 300)
    train(*huge, 300, scale=1e20)
    assert distance(huge[0]) == pytest.approx(distance(plain[0]), rel=0.05)
    assert distance(plain[0]) < 0.5


@cases.each_fast_backend
def test_it_warns_of_a_loss_too_small_to_train(backend):
    params, optimizer = quadratic(backend)
    with pytest.warns(UserWarning, match="far below eps=1e-06.*scale the loss up") as caught:
        train(params, optimizer, 3, scale=1e-30)
    assert len(caught) == 1
    # A rate that fits these gradients would be far too large for the next ones.
    train(params, optimizer, 300)
    assert distance(params) < 0.5


def test_without_eps_a_tiny_loss_is_limited_by_the_states_dtype():
    params, optimizer = quadratic(cases.BACKENDS[0], eps=0.0)
    with pytest.warns(UserWarning, match="the smallest number of the state.*scale the loss up"):
        train(params, optimizer, 1, scale=1e-30)


def test_it_warns_of_squares_that_will_overflow():
    params, optimizer = quadratic(cases.BACKENDS[0])
    with pytest.warns(UserWarning, match="the largest number of the state.*scale the loss down"):
        train(params, optimizer, 1, scale=1e28)


@cases.each_fast_backend
def test_it_warns_of_one_huge_gradient(backend):
    params, optimizer = quadratic(backend)
    with pytest.warns(UserWarning, match=r"one gradient of 2e\+19 among 41"):
        train(params, optimizer, 1, change=damage_one(2e19))
    assert 0 < optimizer.estimated_lr() < math.inf


@cases.each_fast_backend
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_nothing_moves_while_the_first_gradients_are_damaged(backend, value, momentum):
    """Training begins with the first gradients that are finite."""
    params, optimizer = quadratic(backend, momentum=momentum)
    with cases.no_change(*params), pytest.warns(UserWarning, match="is not finite"):
        train(params, optimizer, 2, change=damage_one(value))
    assert all(optimizer.state[param]["step"] == 2 for param in params)
    assert not any(optimizer.state[param]["grad_sq_sum"].any() for param in params)
    before = distance(params)
    train(params, optimizer, 300)
    assert distance(params) < before / 2  # 0.31 of it without momentum, 0.05 with


def test_it_warns_after_100_steps_without_a_gradient():
    params, optimizer = quadratic(cases.BACKENDS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(params, optimizer, 99, scale=0.0)
    with pytest.warns(UserWarning, match="100 steps"):
        train(params, optimizer, 1, scale=0.0)


def test_steps_before_the_first_estimate_are_counted():
    """Otherwise Σλ would not be the sum of the weights of the parameters' steps."""
    param = nn.Parameter(torch.ones(20, dtype=torch.float64))
    optimizer = MADGRAD([param], lr="auto")
    for k in range(12):
        param.grad = torch.full_like(param, float(k > 8))
        optimizer.step()
    weights = optimizer.param_groups[0]["estimate"][3]
    torch.testing.assert_close(optimizer.state[param]["grad_sq_sum"], weights.expand(20))
    assert optimizer.state[param]["step"] == 12


@cases.each_fast_backend
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_damaged_coordinate_does_not_stop_the_estimate(backend, value, momentum):
    params, optimizer = quadratic(backend, momentum=momentum)
    train(params, optimizer, 2)
    before = optimizer.estimated_lr()
    train(params, optimizer, 40, change=damage_one(value, only=0))
    sound, other = quadratic(backend, momentum=momentum)
    train(sound, other, 42)
    assert optimizer.estimated_lr() > 2 * before
    # The means lack one coordinate of 41.
    assert optimizer.estimated_lr() == pytest.approx(other.estimated_lr(), rel=0.2)
    rest = torch.cat([params[0].detach()[:3], params[0].detach()[4:], params[1].detach()])
    assert rest.isfinite().all()


@cases.each_fast_backend
def test_a_huge_weight_without_a_gradient_does_not_count(backend):
    results = []
    for last in (1e30, 0.15):
        param = cases.parameter(torch.tensor([0.1, 0.2, last]), backend.device)
        optimizer = MADGRAD([param], lr="auto", **backend.flags)
        for _ in range(50):
            param.grad = torch.where(torch.arange(3) < 2, param.detach().cpu() - 3, 0.0).to(
                param.device
            )
            optimizer.step()
        results.append((param.detach().cpu()[:2], optimizer.estimated_lr()))
        assert param[2] == torch.tensor(last)
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_with_a_gradient_that_is_sometimes_none():
    torch._dynamo.reset()

    def drop_one(k, params):
        if k % 3 == 2:
            params[k % 2].grad = None

    runs = []
    for compiled in (True, False):
        params = parameters([(9,), (4,), (6,)], torch.float64)
        optimizer = MADGRAD(params, lr="auto", foreach=False)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        train(params, optimizer, 14, change=drop_one)
        runs.append((params, optimizer))
    (params, optimizer), (others, plain) = runs
    assert optimizer.estimated_lr() == pytest.approx(plain.estimated_lr(), rel=1e-9)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-9, atol=1e-9)


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rate", [0.1, "auto"])
@cases.each_class
def test_a_compiled_step_works_with_a_grad_scaler(cls, rate):
    if rate == "auto" and cls is not MADGRAD:
        return
    torch._dynamo.reset()
    runs = []
    for compiled in (True, False):
        params = parameters([(5,)] * 2, device=DEVICE)
        optimizer = cls(params, lr=rate)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        scaler = GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
        for k in range(8):
            optimizer.zero_grad()
            loss = sum((param * (i + 1) - 1).square().sum() for i, param in enumerate(params))
            scaler.scale(loss).backward()
            if k == 4:
                params[0].grad[2] = math.inf
                with cases.no_change(*params):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        runs.append((params, optimizer))
    (params, optimizer), (others, plain) = runs
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
        assert optimizer.state[param]["step"] == plain.state[other]["step"] == 7
    assert np.isfinite(cases.numbers(params[0])).all()


def test_float64_gradients_whose_squares_overflow():
    """The weights hardly move, and nothing raises."""
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = MADGRADW([param], lr="auto")
    param.grad = torch.full((3,), 1e160, dtype=torch.float64)
    with pytest.warns(UserWarning, match="the weights will hardly move"):
        optimizer.step()
    assert param.isfinite().all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_clipping_outside_of_edit_weights_makes_the_estimate_grow_linearly_at_most(momentum):
    """By up to the width of the box a step (docs/algorithm.md)."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(50, generator=generator)
    param = torch.nn.Parameter(torch.zeros(50))
    optimizer = MADGRADW([param], lr="auto", weight_decay=0.0, momentum=momentum)
    for _ in range(300):
        param.grad = param.detach() - target
        optimizer.step()
        param.data.clamp_(-0.01, 0.01)
    assert 0.05 < optimizer.estimated_lr() <= 300 * 0.01


def test_a_scaler_does_not_move_the_start_of_a_schedule_free_run():
    """The host does not know whether its first step was skipped; z - y is 0 after it either way."""
    rates = []
    for scaled in (False, True):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 8))]
        optimizer = ScheduleFreeMADGRADW(params, lr="auto", weight_decay=0.0)
        for k in range(6):
            params[0].grad = params[0].detach() - 3
            if scaled:
                optimizer.found_inf = torch.zeros(1)
            optimizer.step()
            if k == 0:
                params[0].data.clamp_(-0.9, 0.9)
        rates.append(optimizer.estimated_lr())
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)
