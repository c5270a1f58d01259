"""A learning rate that is estimated: what is kept of it, and how a step moves it on.

One estimate serves all groups; a group's own `lr` is a factor on it. All of it are numbers on the
device, so that no step but the first waits for them.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import rule, sharding, states
from cubegrad.backends.eager import TorchFunctions
from cubegrad.options import Hyper

Group = dict[str, Any]

# What each group keeps as `estimate`; agreement and weights are its own, the rest is shared by all.
FIELDS = ("distance", "agreement", "scale", "weight_sum", "step")


class Estimate:
    """The numbers of all groups, a row for each, of which the groups hold views."""

    def __init__(self, groups: Sequence[Group], values: Tensor) -> None:
        self.values = values
        self.sums = torch.zeros(len(groups), 3, dtype=torch.float64, device=values.device)
        self.rows = list(values)
        # For the backends to add to. What is cut up among processes is added up over them later,
        # in an order that is the same in all of them.
        self.parts: list[dict[sharding.Spread, Tensor]] = []
        for group, row, sums in zip(groups, self.rows, self.sums, strict=True):
            group["estimate"] = row
            spreads = dict.fromkeys(map(sharding.spread, group["params"]))
            self.parts.append({s: torch.zeros_like(sums) if s else sums for s in spreads})
        self.counts = [0] * len(groups)  # coordinates that have been stepped
        self.idle: list[list[Tensor]] = [[] for _ in groups]  # which have been, and are not now

    def belongs_to(self, groups: Sequence[Group]) -> bool:
        return len(groups) == len(self.rows) and all(
            group["estimate"] is row for group, row in zip(groups, self.rows, strict=True)
        )

    def renewed(self) -> float | Tensor:
        """γ for the step that begins, without any group's factor, and sums that start at 0."""
        self.sums.zero_()
        for part in self.parts:
            for sums in part.values():
                sums.zero_()
        if self._on_host():
            return lr_of(self.values[0])
        distance, _, scale, *_ = self.values[0]
        lr: Tensor = rule.estimated_lr(distance, scale)
        return lr

    def _on_host(self) -> bool:
        return self.values.device.type == "cpu" and not torch.compiler.is_compiling()

    @torch.no_grad()
    def advance(self, factors: Sequence[Any], hypers: Sequence[Hyper]) -> None:
        """One step on, after every group has added its sums; not where inf was found."""
        found_inf = hypers[0].found_inf
        for total, part in zip(self.sums, self.parts, strict=True):
            for spread, sums in part.items():
                if spread is not None:
                    total += sharding.added_up(sums, spread)
        if self._on_host():
            if found_inf is None or not found_inf.item():
                self._advance_on_host([float(factor) for factor in factors], hypers)
            return
        device = self.values.device
        factors = [f.to(device) if isinstance(f, Tensor) else f for f in factors]
        new = torch.stack([torch.stack(row) for row in self._moved(factors, hypers)])
        if found_inf is not None:
            new = torch.where(found_inf.to(device) == 0, new, self.values)
        self.values.copy_(new)

    def _moved(self, factors: Sequence[Any], hypers: Sequence[Hyper]) -> list[list[Any]]:
        rows, totals = ([row.unbind() for row in table] for table in (self.values, self.sums))
        return _moved(Scalars, rows, totals, factors, self.counts, hypers)

    def _advance_on_host(self, factors: Sequence[float], hypers: Sequence[Hyper]) -> None:
        """In Python's numbers, which are quicker than tensors of one number each."""
        rows, totals = self.values.tolist(), self.sums.tolist()
        try:
            new = _moved(Numbers, rows, totals, factors, self.counts, hypers)
        except (OverflowError, ZeroDivisionError):  # where tensors say inf
            new = [list(map(float, row)) for row in self._moved(factors, hypers)]
        self.values.copy_(torch.tensor(new, dtype=torch.float64))


class Scalars(TorchFunctions):
    """The rule's functions of tensors of one number."""

    @staticmethod
    def where(condition: Tensor, a: Tensor, b: Tensor | float) -> Tensor:
        return torch.where(condition, a, b)


class Numbers:
    """And of Python's own."""

    @staticmethod
    def quotient(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator > 0 else 0.0

    @staticmethod
    def larger(a: float, b: float) -> float:
        return b if b > a else a  # a where b is NaN

    @staticmethod
    def where(condition: bool, a: float, b: float) -> float:
        return a if condition else b


def _moved(
    xp: Any,
    rows: Sequence[Sequence[Any]],
    sums: Sequence[Sequence[Any]],
    factors: Sequence[Any],
    counts: Sequence[int],
    hypers: Sequence[Hyper],
) -> list[list[Any]]:
    """The rows after a step with these sums."""
    distance, _, scale, _, step = rows[0]
    lr = rule.estimated_lr(distance, scale)
    own, scales, coordinates = [], 0.0, 0
    told = zip(rows, sums, factors, counts, hypers, strict=True)
    for row, (newest, _, root_sum), factor, count, h in told:
        weight_sum = row[3] + rule.step_weight(lr * factor, step)  # Σ λ_k
        # A group whose factor has been 0 so far has neither weights nor a scale.
        weighted = weight_sum > 0
        one = xp.where(weighted, weight_sum, 1.0)
        scales = scales + xp.where(weighted, rule.gradient_scale(root_sum, one), 0.0)
        coordinates = coordinates + weighted * count
        own.append((rule.agreement(h, row[1], newest), weight_sum))
    known = coordinates > 0
    scale = xp.where(known, scales / (coordinates + (coordinates == 0)), scale)
    agreement = sum(mine for mine, _ in own)
    distance = rule.distance(xp, distance, agreement, sum(row[1] for row in sums))
    return [[distance, mine, scale, weight_sum, step + 1] for mine, weight_sum in own]


@torch.no_grad()
def found(groups: Sequence[Group], hypers: Sequence[Hyper]) -> Estimate | None:
    """The estimate that the groups hold, or one that begins with the gradients they have now.

    None if those are all 0 or not finite. To know that, it waits for the device.
    """
    device = _device_of(groups)
    held = [group["estimate"].to(device, torch.float64) for group in groups]
    known = [row for row in held if _begun(row)]
    if known:
        joining = known[0].clone()
        joining[FIELDS.index("weight_sum")] = joining[FIELDS.index("agreement")] = 0
        rows = [row if _begun(row) else joining for row in held]
        return Estimate(groups, torch.stack(rows))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() is being captured in a CUDA graph before lr='auto' has seen a gradient; run "
            "one step before the capture"
        )
    first = _first_row(groups, hypers, device)
    return None if first is None else Estimate(groups, first.repeat(len(groups), 1))


def nothing_yet() -> Tensor:
    """What a group holds before the first step: a checkpoint has a place for it from the start."""
    return torch.zeros(len(FIELDS), dtype=torch.float64)


def _begun(row: Tensor) -> bool:
    return row[FIELDS.index("distance")].item() > 0


def _first_row(
    groups: Sequence[Group], hypers: Sequence[Hyper], device: torch.device
) -> Tensor | None:
    spreads = dict.fromkeys(sharding.spread(p) for group in groups for p in group["params"])
    sums = {s: torch.zeros(2, dtype=torch.float64, device=device) for s in spreads}
    count = 0
    for group, h in zip(groups, hypers, strict=True):
        for param in group["params"]:
            if param.grad is not None:
                x, grad = _seen(h, param)
                pair = (rule.first_scale(TorchFunctions, grad), TorchFunctions.total(x * x))
                sums[sharding.spread(param)] += torch.stack(pair).to(device)
                count += coordinates(param)
    totals = torch.stack([sharding.added_up(pair, spread) for spread, pair in sums.items()]).sum(0)
    scale, square = totals / max(1, count)
    if not 0 < scale.item() < float("inf"):
        return None
    row = nothing_yet().to(device)
    row[FIELDS.index("distance")] = rule.first_distance(TorchFunctions, square)
    row[FIELDS.index("scale")] = scale
    return row


def _seen(h: Hyper, param: Tensor) -> tuple[Tensor, Tensor]:
    """A parameter and its gradient, as the rule will see them."""
    pair = (sharding.local(param), sharding.gradient(param.grad, param))
    x, grad = map(states.real, pair)
    x, grad = (t.to(states.dtype_of(x)) for t in (x, grad))
    if h.grad_scale is not None:
        grad = grad / h.grad_scale.to(grad.device)
    return x, rule.effective_gradient(h, x, grad)


def advance(
    estimate: Estimate | None,
    groups: Sequence[Group],
    state: Mapping[Tensor, Any],
    hypers: Sequence[Hyper],
    unchanged: Container[int] = (),
) -> None:
    """Let the estimate, if there is one, take in the sums of a step that all groups have made.

    `unchanged` are the groups in which the same parameters have gradients as in the step before.
    """
    if estimate is None or hypers[0].sums is None:
        return
    for index, (group, h) in enumerate(zip(groups, hypers, strict=True)):
        if index not in unchanged:
            params = group["params"]
            live = [param for param in params if param.grad is not None]
            idle = [p for p in params if p.grad is None and state.get(p)] if state else []
            estimate.counts[index] = sum(map(coordinates, live + idle))
            estimate.idle[index] = idle
        for param in estimate.idle[index]:
            _add_idle(h.sums, param, state[param])
    estimate.advance([group["lr"] for group in groups], hypers)


@torch.no_grad()
def _add_idle(parts: dict[sharding.Spread, Tensor], param: Tensor, state: Any) -> None:
    """The sums of a parameter that has no gradient this time: it agrees with nothing."""
    sums = parts[sharding.spread(param)]
    grad_sum, grad_sq_sum = (
        states.real(sharding.local(state[name])) for name in ("grad_sum", "grad_sq_sum")
    )
    sums[1] += TorchFunctions.total(abs(grad_sum)).to(sums.device)
    sums[2] += TorchFunctions.total(TorchFunctions.cbrt(grad_sq_sum)).to(sums.device)


def lr_of(row: Tensor) -> float:
    """γ without a group's factor, on the host; nan before the first step."""
    distance, _, scale, *_ = row.tolist()
    if not distance > 0:
        return math.nan
    try:
        return float(rule.estimated_lr(distance, scale))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def coordinates(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def _device_of(groups: Sequence[Group]) -> torch.device:
    """Where the numbers live: with the first parameter there is."""
    first = next(param for group in groups for param in group["params"])
    return sharding.local(first).device
