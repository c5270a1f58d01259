"""How lr="auto" begins: D_0 from the weights, the scale from the first gradients.

Here it waits for the device, and nowhere else. So this is also where the user is warned of
gradients that it cannot train with.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import distance, rule, sharding
from cubegrad.cautions import warn
from cubegrad.distance import FIELDS
from cubegrad.functions import NumberFunctions, TorchFunctions
from cubegrad.optim.auto.estimate import LR, coordinates, empty
from cubegrad.optim.auto.shared import Shared
from cubegrad.options import Hyper
from cubegrad.rule import Rule
from cubegrad.state import layout

Group = dict[str, Any]
State = Mapping[Tensor, Any]  # an optimizer's

LONG_WAIT = 100  # steps
NAMES = {2: "square", 3: "cube"}
DOMINANT = 0.99  # of the sum of all scales, by one of at least ten coordinates


class Totals(NamedTuple):
    """Sums over all coordinates that have a gradient."""

    scale: float  # Σ |g|^{2/3}
    square: float  # Σ x² where g is not 0
    moved: float  # the number of coordinates where g is not 0
    coordinates: int  # that have a gradient, even if it is 0
    largest: float  # the largest |g|^{2/3} in this process, or those that share the estimate


class Waiting:
    """What is known while there has been no gradient to begin with."""

    def __init__(self) -> None:
        self.steps = 0
        self.has_warned_of_size = False  # Python repeats a warning if its numbers differ

    def count(self, waits: bool) -> None:
        """Count a step that waits; warns the user if there are many."""
        self.steps = self.steps + 1 if waits else 0
        if self.steps == LONG_WAIT:
            warn(
                f"lr='auto' has had no gradient that it can begin with for {LONG_WAIT} steps, and "
                "no weight has moved; check that the loss depends on the parameters"
            )


def has_begun(row: Tensor) -> bool:
    return row[FIELDS.index("distance")].item() > 0


def held_rows(groups: Sequence[Group], device: torch.device) -> Tensor | None:
    """What the groups hold, if one has begun; those that join take over the shared numbers."""
    held = [group["estimate"].to(device, torch.float64) for group in groups]
    begun = [row for row in held if has_begun(row)]
    if not begun:
        return None
    joining = begun[0].clone()
    for name in ("agreement", "weight_sum", "root_sum"):
        joining[FIELDS.index(name)] = 0
    return torch.stack([row if has_begun(row) else joining for row in held])


def rows(
    used: Rule,
    groups: Sequence[Group],
    state: State,
    hypers: Sequence[Hyper],
    device: torch.device,
    shared: Shared | None,
    waiting: Waiting,
) -> Tensor | None:
    """What the groups begin with, if their gradients are good for it."""
    steps = _steps_counted(groups, state)
    first = begin(used, groups, hypers, device, shared, waiting)
    if shared is not None:
        first, steps = shared.agreed(first, steps, device)
    if first is None:
        return None
    _forget_waiting(groups, state)
    row = empty()
    row[FIELDS.index("distance")], row[LR] = first
    row[FIELDS.index("step")] = steps
    return row.repeat(len(groups), 1)


def _steps_counted(groups: Sequence[Group], state: State) -> float:
    """k of the parameters: they have counted the steps in which there was no gradient to use."""
    states = (state.get(param, {}) for group in groups for param in group["params"])
    return max((float(entries["step"]) for entries in states if "step" in entries), default=0.0)


def _forget_waiting(groups: Sequence[Group], state: State) -> None:
    """A parameter that has only waited, and has no gradient now, has not been stepped yet.

    torch.distributed.checkpoint, for one, makes the state of all parameters by a step with
    gradients of 0. One that trains without a gradient would count in the mean of their sizes.
    """
    for group in groups:
        for param in group["params"]:
            if param.grad is None and "step" in state.get(param, {}):
                state[param]["step"].zero_()


def begin(
    used: Rule,
    groups: Sequence[Group],
    hypers: Sequence[Hyper],
    device: torch.device,
    shared: Shared | None,
    waiting: Waiting,
) -> tuple[float, float] | None:
    """D_0 and γ_0, or None if the gradients are all 0, too small or not finite."""
    totals = _totals(groups, hypers, device, shared)
    if not math.isfinite(totals.scale):
        if hypers[0].found_inf is None:  # else a GradScaler takes care of it
            warn(
                "a gradient is not finite, so lr='auto' has nothing to begin with and no weight "
                "moves; look for the cause in the loss, or scale it down"
            )
        return None
    if totals.scale == 0:
        return None
    size = math.sqrt(totals.square / totals.moved)
    start = distance.first_distance(NumberFunctions, size)
    mean_scale = totals.scale / totals.coordinates
    lr = distance.learning_rate(used, start, mean_scale)
    obstacle = _too_small(used, groups, hypers, start, mean_scale)
    if obstacle:  # a rate for them would throw the weights far away when larger ones come
        if not waiting.has_warned_of_size:
            waiting.has_warned_of_size = True
            warn(f"lr='auto' waits for larger gradients, and no weight moves: {obstacle}")
        return None
    obstacle = _too_large(used, groups, totals, lr)
    if obstacle:
        warn(f"lr='auto' begins with lr={lr:.3g}, and the weights will hardly move: {obstacle}")
    return start, lr


def _totals(
    groups: Sequence[Group], hypers: Sequence[Hyper], device: torch.device, shared: Shared | None
) -> Totals:
    kinds = [None, *(sharding.sharded_over(p) for group in groups for p in group["params"])]
    sums = {over: torch.zeros(3, dtype=torch.float64, device=device) for over in kinds}
    largest = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for group, h in zip(groups, hypers, strict=True):
        for param in group["params"]:
            if param.grad is not None:
                x, grad = _as_stepped(h, param)
                scales = distance.first_scales(TorchFunctions, grad.double())
                moved = scales != 0  # a weight without a gradient says nothing about a distance
                squares = torch.where(moved, x.double(), 0.0).square()
                own = torch.stack([TorchFunctions.total(v) for v in (scales, squares, moved)])
                sums[sharding.sharded_over(param)] += own.to(device)
                count += coordinates(param)
                if scales.numel():
                    largest = TorchFunctions.larger(largest, scales.max().to(device))
    parts = [sharding.sum_over_shards(part, over) for over, part in sums.items()]
    numbers = torch.cat([torch.stack(parts).sum(0), largest.new_tensor([float(count)])])
    if shared is not None:
        numbers, largest = shared.sum(numbers), shared.largest(largest)
    scale, square, moved, number = numbers.tolist()
    return Totals(scale, square, moved, int(number), largest.item())


def _as_stepped(h: Hyper, param: Tensor) -> tuple[Tensor, Tensor]:
    """A parameter and its gradient, as the rule gets them."""
    pair = (sharding.local(param), sharding.gradient(param.grad, param))
    x, grad = map(layout.as_real, pair)
    x, grad = (t.to(layout.state_dtype(x)) for t in (x, grad))
    if h.grad_scale is not None:
        grad = grad / h.grad_scale.to(grad.device)
    return x, rule.effective_gradient(h, x, grad)


def _too_small(
    used: Rule,
    groups: Sequence[Group],
    hypers: Sequence[Hyper],
    distance: float,
    mean_scale: float,
) -> str | None:
    """Why gradients of this size would not move a weight."""
    typical = mean_scale**1.5
    # The root of ν after the first step, at a coordinate with g = H.
    root = typical if used.root == 2 else math.sqrt(distance * typical)
    eps = min(h.eps for h in hypers)
    least = max(limit.tiny for limit in _limits(groups))
    if root < eps / 10:
        return (
            f"the gradients are about {typical:.3g}, and the {NAMES[used.root]} root of their "
            f"squares, {root:.3g}, is far below eps={eps:g}; scale the loss up, or lower eps"
        )
    if root < least ** (1 / used.root):
        return (
            f"the gradients are about {typical:.3g}, and their squares less than {least:.3g}, the "
            "smallest number of the state; scale the loss up"
        )
    return None


def _too_large(used: Rule, groups: Sequence[Group], totals: Totals, lr: float) -> str | None:
    """Why the largest gradient keeps the others from moving a weight."""
    weight = lr if used.squares == rule.WEIGHTED else 1.0  # of g² in ν
    largest, most = totals.largest**1.5, min(limit.max for limit in _limits(groups))
    if weight * largest * largest > most / 1e6:  # a sum grows as k^{3/2}
        return (
            f"the gradients are at most {largest:.3g}, and their squares come near {most:.3g}, the "
            "largest number of the state; scale the loss down, or clip the gradients"
        )
    # Where a step has no scale, the rate fits all sizes of gradients.
    dominated = totals.moved >= 10 and totals.largest > DOMINANT * totals.scale
    if dominated and not used.anchored:
        return (
            f"one gradient of {largest:.3g} among {totals.moved:.0f} is so much larger than the "
            "others that lr fits it alone; clip the gradients, or give lr a number"
        )
    return None


def _limits(groups: Sequence[Group]) -> list[torch.finfo]:
    params = [param for group in groups for param in group["params"] if param.grad is not None]
    dtypes = [layout.state_dtype(param) for param in params]
    return [torch.finfo(dtype) for dtype in dtypes or [torch.float32]]


def device_of(groups: Sequence[Group]) -> torch.device | None:
    """The one device of the parameters that have a gradient; there the numbers live.

    A process without a gradient takes part with the others. None if no parameter has values.
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
