"""lr="auto" under gradients and weights that no training should have, and some has."""

import math
import warnings

import cases
import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from cubegrad import MADGRAD, MirrorMADGRAD

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_backend = pytest.mark.parametrize(
    "backend", [b for b in cases.BACKENDS if not b.interpreted], ids=str
)


def bowl(backend, sizes=(30, 11), **options):
    params = [
        cases.parameter(cases.randn((size,), torch.float32, size), backend.device) for size in sizes
    ]
    return params, MADGRAD(params, lr="auto", **backend.flags, **options)


def train(params, optimizer, steps, scale=1.0, damage=None):
    for k in range(steps):
        for i, param in enumerate(params):
            noise = cases.randn(tuple(param.shape), torch.float32, 10 * k + i).to(param.device)
            param.grad = (param.detach() - 3 + 0.1 * noise) * scale
        if damage is not None:
            damage(k, params)
        optimizer.step()


def distance(params):
    return float(torch.cat([(p.detach() - 3).cpu() for p in params]).square().mean().sqrt())


@each_backend
def test_a_large_loss_trains(backend):
    plain, huge = bowl(backend), bowl(backend)
    train(*plain, 300)
    train(*huge, 300, scale=1e20)
    assert distance(huge[0]) == pytest.approx(distance(plain[0]), rel=0.05)
    assert distance(plain[0]) < 0.5


@each_backend
def test_a_tiny_loss_says_that_it_cannot_train(backend):
    params, optimizer = bowl(backend)
    with pytest.warns(UserWarning, match="far below eps=1e-06.*scale the loss up"):
        train(params, optimizer, 1, scale=1e-30)
    # A rate for these gradients would throw the weights away at the next ones.
    train(params, optimizer, 300)
    assert distance(params) < 0.5


def test_without_eps_a_tiny_loss_is_limited_by_the_states_dtype():
    params, optimizer = bowl(cases.BACKENDS[0], eps=0.0)
    with pytest.warns(UserWarning, match="the smallest number of the state.*scale the loss up"):
        train(params, optimizer, 1, scale=1e-30)


def test_squares_that_overflow_later_are_told():
    params, optimizer = bowl(cases.BACKENDS[0])
    with pytest.warns(UserWarning, match="the largest number of the state.*scale the loss down"):
        train(params, optimizer, 1, scale=1e28)


@each_backend
def test_one_huge_coordinate_is_told(backend):
    params, optimizer = bowl(backend)

    def damage(_, params):
        params[0].grad[3] = 2e19

    with pytest.warns(UserWarning, match=r"one gradient of 2e\+19 among 41"):
        train(params, optimizer, 1, damage=damage)
    assert 0 < optimizer.estimated_lr() < math.inf


@each_backend
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_it_rests_while_the_first_gradients_are_damaged(backend, value, momentum):
    """And begins with the first that are not, as if the others had not been."""
    params, optimizer = bowl(backend, momentum=momentum)

    def damage(_, params):
        params[0].grad[3] = value

    with cases.no_change(*params), pytest.warns(UserWarning, match="is not finite"):
        train(params, optimizer, 2, damage=damage)
    assert all(optimizer.state[param]["step"] == 2 for param in params)
    assert not any(optimizer.state[param]["grad_sq_sum"].any() for param in params)
    before = distance(params)
    train(params, optimizer, 300)
    assert distance(params) < before / 2  # 0.31 of it without momentum, 0.05 with


def test_a_long_rest_is_told():
    params, optimizer = bowl(cases.BACKENDS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(params, optimizer, 99, scale=0.0)
    with pytest.warns(UserWarning, match="100 steps"):
        train(params, optimizer, 1, scale=0.0)


def test_resting_steps_are_counted_in_the_estimate_too():
    """Or Σλ would not be the sum of the weights that the parameters have had."""
    param = nn.Parameter(torch.ones(20, dtype=torch.float64))
    optimizer = MADGRAD([param], lr="auto")
    for k in range(12):
        param.grad = torch.full_like(param, float(k > 8))
        optimizer.step()
    weights = optimizer.param_groups[0]["estimate"][3]
    torch.testing.assert_close(optimizer.state[param]["grad_sq_sum"], weights.expand(20))
    assert optimizer.state[param]["step"] == 12


@each_backend
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_damaged_coordinate_does_not_stop_the_estimate(backend, value, momentum):
    params, optimizer = bowl(backend, momentum=momentum)
    train(params, optimizer, 2)
    before = optimizer.estimated_lr()

    def damage(k, params):
        if k == 0:
            params[0].grad[3] = value

    train(params, optimizer, 40, damage=damage)
    sound, other = bowl(backend, momentum=momentum)
    train(sound, other, 42)
    assert optimizer.estimated_lr() > 2 * before
    # One coordinate of 41 is missing in the means.
    assert optimizer.estimated_lr() == pytest.approx(other.estimated_lr(), rel=0.2)
    rest = torch.cat([params[0].detach()[:3], params[0].detach()[4:], params[1].detach()])
    assert rest.isfinite().all()


@each_backend
def test_a_huge_weight_without_a_gradient_says_nothing(backend):
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
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_is_sometimes_none(compiled):
    torch._dynamo.reset()
    runs = []
    for trace in (compiled, False):
        torch.manual_seed(0)
        params = [nn.Parameter(cases.randn((n,), torch.float64, n)) for n in (9, 4, 6)]
        optimizer = MADGRAD(params, lr="auto", foreach=False)
        step = torch.compile(optimizer.step, backend="eager") if trace else optimizer.step
        for k in range(14):
            for i, param in enumerate(params):
                noise = cases.randn(tuple(param.shape), torch.float64, 10 * k + i)
                param.grad = param.detach() - 3 + 0.1 * noise
            if k % 3 == 2:
                params[k % 2].grad = None
            step()
        runs.append((params, optimizer))
    (params, optimizer), (others, plain) = runs
    assert optimizer.estimated_lr() == pytest.approx(plain.estimated_lr(), rel=1e-9)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-9, atol=1e-9)


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("rate", [0.1, "auto"])
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_a_compiled_step_unscales_and_skips_as_a_scaler_says(cls, rate):
    if (cls, rate) == (MirrorMADGRAD, "auto"):
        return
    torch._dynamo.reset()
    runs = []
    for trace in (True, False):
        params = [cases.parameter(cases.randn((5,), torch.float32, i), DEVICE) for i in range(2)]
        optimizer = cls(params, lr=rate)
        if trace:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        scaler = GradScaler(DEVICE, init_scale=1024.0, growth_interval=3)
        for k in range(8):
            optimizer.zero_grad()
            loss = sum((param * (i + 1) - 1).square().sum() for i, param in enumerate(params))
            scaler.scale(loss).backward()
            if k == 4:
                params[0].grad[2] = math.inf
            if k == 4:
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
