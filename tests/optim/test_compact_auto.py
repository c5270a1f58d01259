"""lr="auto" with compact=True: the estimate is that of the float32 state, to a few per cent."""

import pytest
import torch
from cases import EAGER, each_fast_backend
from compact_runs import SHAPES, build, noisy_grads
from short_runs import parameters

from cubegrad import MADGRAD, distance
from cubegrad.functions import TorchFunctions
from cubegrad.options import Hyper
from cubegrad.state import conversion

OPTIONS = {
    "plain": {},
    "no-momentum": {"momentum": 0.0},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "l2": {"weight_decay": 0.01},
}


def rates(backend, steps=40, dtype=torch.float32, idle=(), **options):
    """The estimate after each step."""
    params = parameters(SHAPES, dtype, backend.device)
    optimizer, seen = build(MADGRAD, params, backend, lr="auto", **options), []
    for k in range(steps):
        noisy_grads(params, k)
        if k in idle:
            params[1].grad = None
        optimizer.step()
        seen.append(optimizer.estimated_lr())
    return torch.tensor(seen)


@pytest.mark.parametrize("name", OPTIONS)
@each_fast_backend
def test_the_estimate_is_close(backend, name):
    """Measured: within 1 %."""
    coded = rates(backend, **OPTIONS[name])
    plain = rates(backend, compact=False, **OPTIONS[name])
    torch.testing.assert_close(coded, plain, rtol=0.03, atol=0)
    assert coded[-1] > 2 * coded[0]  # it has grown: there was something to estimate


def test_the_estimate_is_close_in_other_dtypes():
    """In bfloat16 to that of float32 weights: rounded to nearest, weights stall on their way."""
    plain = rates(EAGER, compact=False)
    torch.testing.assert_close(rates(EAGER, dtype=torch.bfloat16), plain, rtol=0.03, atol=0)
    plain = rates(EAGER, dtype=torch.complex64, compact=False)
    torch.testing.assert_close(rates(EAGER, dtype=torch.complex64), plain, rtol=0.03, atol=0)


@each_fast_backend
def test_idle_parameters_are_counted(backend):
    """Left out, one of 4,800 coordinates among 15,100 changes the rate by more than 10 %."""
    coded = rates(backend, idle=range(5, 20))
    plain = rates(backend, idle=range(5, 20), compact=False)
    torch.testing.assert_close(coded, plain, rtol=0.03, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_sums_of_codes_are_those_of_the_step_that_made_them(momentum):
    """What an idle parameter adds is what its last step added, but for the codes' rounding."""
    params = parameters(SHAPES[:3])
    optimizer = build(MADGRAD, params, lr=0.1, momentum=momentum)
    for k in range(10):
        noisy_grads(params, k)
        optimizer.step()
    h = Hyper(0.1, momentum, 1e-6, 0.0, None, maximize=False)
    for param in params:
        pieces = list(conversion.sums(param, optimizer.state[param], 1e-6))
        assert sum(s.numel() for s, _ in pieces) == param.numel()  # without what fills up blocks
        (s, nu), *_ = pieces
        idle = distance.idle_sums(TorchFunctions, h, s.double(), nu.double())
        root = nu.double() ** (1 / 3)
        assert idle[0] == pytest.approx((s.double() ** 2 / (root + 1e-6)).sum().item(), rel=1e-6)
        assert idle[1] == pytest.approx(root.sum().item(), rel=1e-6)
