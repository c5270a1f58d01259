"""The named methods of `cubegrad.family`, and short runs of them with random gradients."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from cases import randn, same_bits
from torch import Tensor, nn
from torch.optim import Optimizer

from cubegrad import family

NAMED = (
    family.DA,
    family.WeightedDA,
    family.AdaGradDA,
    family.UnweightedDenominator,
    family.WeightedDenominator,
    family.WeightedNumerator,
    family.MADGRAD,
    family.TheoreticalMADGRAD,
    family.MADGRADW,
    family.InlineAveragedSGD,
)
each_method = pytest.mark.parametrize("method", NAMED, ids=lambda method: method.__name__)


def build(method: type[family.DualAveraging], params: Any, **options: Any) -> family.DualAveraging:
    if method is family.TheoreticalMADGRAD:
        options.setdefault("grad_bound", 10.0)
    return method(params, **options)


def two_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix and a scalar."""
    return [nn.Parameter(randn(shape, dtype, seed)) for seed, shape in enumerate([(4, 3), ()])]


def set_grads(params: Iterable[Tensor], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = randn(tuple(param.shape), param.dtype, 10 * step + index).to(param.device)


def train(optimizer: Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    """Make steps number `first`, `first` + 1, …"""
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def same_values(params: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    pairs = zip(params, others, strict=True)
    return all(same_bits(param.detach(), other.detach()) for param, other in pairs)


def end_on_the_interval(
    make: Any, large: float, small: float, period: int, steps: int, decaying: bool
) -> list[float]:
    """x, clipped to [-1, 1], in the last three periods.

    The gradient is `large` once a period and -`small` at the other steps.
    """
    x = nn.Parameter(torch.zeros(1).double())
    optimizer = make([x])
    lr = optimizer.param_groups[0]["lr"]
    iterates = []
    for k in range(steps):
        x.grad = torch.full((1,), large if k % period == 0 else -small).double()
        if decaying:
            optimizer.param_groups[0]["lr"] = lr / math.sqrt(k + 1)
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
        iterates.append(x.item())
    return iterates[-3 * period :]
