"""How lr="auto" begins: D_0 from the weights, the scale from the first gradients.

This is the one place where it waits for the device, so it is also where it tells the user of
gradients that it cannot train with.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import distance as distances
from cubegrad import rule, sharding
from cubegrad.backends.eager import TorchFunctions
from cubegrad.options import Hyper
from cubegrad.state import layout as states

Group = dict[str, Any]

LONG_REST = 100  # steps
DOMINANT = 0.99  # of the sum of all scales, by one of at least ten coordinates


class Numbers:
    """The rule's functions of Python's own numbers."""

    @staticmethod
    def quotient(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator > 0 else 0.0

    sqrt = staticmethod(math.sqrt)

    @staticmethod
    def larger(a: float, b: float) -> float:
        return b if b > a else a  # a where b is NaN

    @staticmethod
    def where(condition: bool, a: float, b: float) -> float:
        return a if condition else b


class Totals(NamedTuple):
    """Sums over all coordinates that have a gradient."""

    scale: float  # Σ |g|^{2/3}
    square: float  # Σ x² where g is not 0
    moved: float  # how many these are
    coordinates: int  # with a gradient, be it 0
    largest: float  # |g|^{2/3}, in this process


def begin(
    groups: Sequence[Group], hypers: Sequence[Hyper], device: torch.device
) -> tuple[float, float] | None:
    """D_0 and γ_0, or None if the gradients are all 0 or not finite."""
    totals = _totals(groups, hypers, device)
    if not math.isfinite(totals.scale):
        if hypers[0].found_inf is None:  # else a GradScaler knows
            _warn(
                "a gradient is not finite, so lr='auto' has nothing to begin with and no weight "
                "moves; look for the cause in the loss, or scale it down"
            )
        return None
    if totals.scale == 0:
        return None
    distance = distances.first_distance(Numbers, math.sqrt(totals.square / totals.moved))
    mean_scale = totals.scale / totals.coordinates
    lr = distances.learning_rate(distance, mean_scale)
    obstacle = _too_small(groups, hypers, distance, mean_scale)
    if obstacle:  # a rate for them would throw the weights far away when larger ones come
        _warn(f"lr='auto' waits for larger gradients, and no weight moves: {obstacle}")
        return None
    obstacle = _too_large(groups, totals, lr)
    if obstacle:
        _warn(f"lr='auto' begins with lr={lr:.3g}, and the weights will hardly move: {obstacle}")
    return distance, lr


def _totals(groups: Sequence[Group], hypers: Sequence[Hyper], device: torch.device) -> Totals:
    spreads = dict.fromkeys(sharding.spread(p) for group in groups for p in group["params"])
    sums = {s: torch.zeros(3, dtype=torch.float64, device=device) for s in spreads}
    largest = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for group, h in zip(groups, hypers, strict=True):
        for param in group["params"]:
            if param.grad is not None:
                x, grad = _seen(h, param)
                scales = distances.first_scales(TorchFunctions, grad.double())
                moved = scales != 0  # a weight without a gradient says nothing about a distance
                squares = torch.where(moved, x.double(), 0.0).square()
                told = torch.stack([TorchFunctions.total(v) for v in (scales, squares, moved)])
                sums[sharding.spread(param)] += told.to(device)
                count += coordinates(param)
                if scales.numel():
                    largest = TorchFunctions.larger(largest, scales.max().to(device))
    parts = [sharding.added_up(part, spread) for spread, part in sums.items()]
    scale, square, moved = torch.stack(parts).sum(0).tolist()
    return Totals(scale, square, moved, count, largest.item())


def _seen(h: Hyper, param: Tensor) -> tuple[Tensor, Tensor]:
    """A parameter and its gradient, as the rule will see them."""
    pair = (sharding.local(param), sharding.gradient(param.grad, param))
    x, grad = map(states.real, pair)
    x, grad = (t.to(states.dtype_of(x)) for t in (x, grad))
    if h.grad_scale is not None:
        grad = grad / h.grad_scale.to(grad.device)
    return x, rule.effective_gradient(h, x, grad)


def _too_small(
    groups: Sequence[Group], hypers: Sequence[Hyper], distance: float, mean_scale: float
) -> str | None:
    """Why gradients of this size would not move a weight."""
    typical = mean_scale**1.5
    root = math.sqrt(distance * typical)  # ∛ν after the first step, at a coordinate with g = H
    eps = min(h.eps for h in hypers)
    least = max(limit.tiny for limit in _limits(groups))
    if root < eps / 10:
        return (
            f"the gradients are about {typical:.3g}, and the cube root of their squares, "
            f"{root:.3g}, is far below eps={eps:g}; scale the loss up, or lower eps"
        )
    if root**3 < least:
        return (
            f"the gradients are about {typical:.3g}, and their squares less than {least:.3g}, the "
            "smallest number of the state; scale the loss up"
        )
    return None


def _too_large(groups: Sequence[Group], totals: Totals, lr: float) -> str | None:
    """Why the largest gradient keeps the others from moving a weight."""
    largest, most = totals.largest**1.5, min(limit.max for limit in _limits(groups))
    if lr * largest * largest > most / 1e6:  # ν grows as k^{3/2}
        return (
            f"the gradients are at most {largest:.3g}, and their squares come near {most:.3g}, the "
            "largest number of the state; scale the loss down, or clip the gradients"
        )
    if totals.moved >= 10 and totals.largest > DOMINANT * totals.scale:
        return (
            f"one gradient of {largest:.3g} among {totals.moved:.0f} is so much larger than the "
            "others that lr fits it alone; clip the gradients, or give lr a number"
        )
    return None


def _limits(groups: Sequence[Group]) -> list[torch.finfo]:
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    return [torch.finfo(states.dtype_of(param)) for param in params]


def rested(steps: int) -> int:
    """One step more without a gradient to begin with; tells the user if there are many."""
    if steps + 1 == LONG_REST:
        _warn(
            f"lr='auto' has had no gradient that it can begin with for {LONG_REST} steps, and no "
            "weight has moved; check that the loss depends on the parameters"
        )
    return steps + 1


def _warn(message: str) -> None:
    """At the line that calls step(): below it there are only frames of torch and cubegrad."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "cubegrad")


def coordinates(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def device_of(groups: Sequence[Group]) -> torch.device | None:
    """Where the numbers live: with the parameters that have a gradient, all on one device.

    A process without a gradient takes part with the others. None where nothing has values.
    """
    params = [param for group in groups for param in group["params"]]
    real = [param for param in params if not param.is_meta]
    live = [param for param in params if param.grad is not None] or real[:1]
    devices = list(dict.fromkeys(sharding.local(param).device for param in live))
    if len(devices) > 1:
        raise ValueError(
            f"lr='auto' makes one estimate of all parameters, which must be on one device, and "
            f"these are on {' and '.join(sorted(map(str, devices)))}; build an optimizer for each "
            "device"
        )
    return devices[0] if devices else None
