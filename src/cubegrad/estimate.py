"""A learning rate that is estimated: what is kept of it, and how a step moves it on.

One estimate serves all groups; a group's own `lr` is a factor on it. All of it are numbers on the
device, so that no step but the first waits for them.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import backends, rule, sharding, states
from cubegrad.backends.eager import TorchFunctions
from cubegrad.backends.prepared import capturing
from cubegrad.options import Hyper

Group = dict[str, Any]

# What each group keeps as `estimate`; agreement and weights are its own, the rest is shared by all.
FIELDS = ("distance", "agreement", "lr", "weight_sum", "step")


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
        self.counts = [-1] * len(groups)  # coordinates that have been stepped; -1: not looked yet
        self.is_spread = any(spread is not None for part in self.parts for spread in part)
        self.cleared = False  # whether a kernel has set `sums` to 0 for the next step
        # Counts on the device. None is dropped, as a captured graph may read it.
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.idle: list[list[Tensor]] = [[] for _ in groups]  # which have been, and are not now

    def belongs_to(self, groups: Sequence[Group]) -> bool:
        return len(groups) == len(self.rows) and all(
            group["estimate"] is row for group, row in zip(groups, self.rows, strict=True)
        )

    def renewed(self) -> float | Tensor:
        """γ for the step that begins, without any group's factor, and sums that start at 0."""
        # A graph is replayed whatever the step before it left, and a trace should not ask.
        if torch.compiler.is_compiling() or capturing() or not self.cleared:
            self.sums.zero_()
        self.cleared = False
        for part in self.parts:
            for spread, sums in part.items():
                if spread is not None:  # else these are views of the others
                    sums.zero_()
        return lr_of(self.values[0]) if self._on_host() else self.values[0, FIELDS.index("lr")]

    def _on_host(self) -> bool:
        return self.values.device.type == "cpu" and not torch.compiler.is_compiling()

    @torch.no_grad()
    def advance(
        self, factors: Sequence[Any], hypers: Sequence[Hyper], kernel: Callable[..., None] | None
    ) -> None:
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
        if kernel is not None:
            self._advance_by(kernel, hypers)
            return
        device = self.values.device
        factors = [f.to(device).reshape(()) if isinstance(f, Tensor) else f for f in factors]
        new = torch.stack([torch.stack(row) for row in self._moved(factors, hypers)])
        if found_inf is not None:
            new = torch.where(found_inf.to(device) == 0, new, self.values)
        self.values.copy_(new)

    def _advance_by(self, kernel: Callable[..., None], hypers: Sequence[Hyper]) -> None:
        """In one launch, where the others are some sixty."""
        rates, kept = hypers[0].lr, None
        if len(hypers) > 1:
            rates = torch.stack([h.lr for h in hypers])
        if any(h.shrink is not None for h in hypers):
            kept = torch.stack([self._here(1.0 if h.shrink is None else h.shrink) for h in hypers])
        counts = self._counted()
        kernel(self.values, self.sums, rates, kept, counts, hypers[0].found_inf)
        self.cleared = not capturing()

    def _here(self, number: float | Tensor) -> Tensor:
        if isinstance(number, Tensor):
            return number.to(self.values)
        return torch.full((), number, dtype=torch.float64, device=self.values.device)

    def _counted(self) -> Tensor:
        key = tuple(self.counts)
        if key in self.tables:
            return self.tables[key]
        counts = torch.stack([self._here(float(count)) for count in key])
        if not capturing():  # else only the graph's replay fills it
            self.tables[key] = counts
        return counts

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

    sqrt = staticmethod(math.sqrt)

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
    distance, _, lr, _, step = rows[0]
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
    agreement = sum(mine for mine, _ in own)
    product, root_sum = (sum(row[column] for row in sums) for column in (1, 2))
    distance = rule.distance(xp, distance, agreement, product, root_sum)
    known = scales > 0
    mean_scale = xp.where(known, scales / (coordinates + (coordinates == 0)), 1.0)
    lr = xp.where(known, rule.estimated_lr(distance, mean_scale), lr)
    return [[distance, mine, lr, weight_sum, step + 1] for mine, weight_sum in own]


@torch.no_grad()
def found(groups: Sequence[Group], hypers: Sequence[Hyper]) -> Estimate | None:
    """The estimate that the groups hold, or one that begins with the gradients they have now.

    None if those are all 0 or not finite. To know that, it waits for the device.
    """
    device = _device_of(groups)
    _refuse_several(groups)
    if capturing():
        raise RuntimeError(
            "step() is being captured in a CUDA graph before the first one of lr='auto'; run one "
            "step before the capture"
        )
    held = [group["estimate"].to(device, torch.float64) for group in groups]
    known = [row for row in held if _begun(row)]
    if known:
        joining = known[0].clone()
        joining[FIELDS.index("weight_sum")] = joining[FIELDS.index("agreement")] = 0
        rows = [row if _begun(row) else joining for row in held]
        return Estimate(groups, torch.stack(rows))
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
    distance = rule.first_distance(TorchFunctions, square)
    row[FIELDS.index("distance")] = distance
    row[FIELDS.index("lr")] = rule.estimated_lr(distance, scale)
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
        if index not in unchanged or estimate.counts[index] < 0:
            params = group["params"]
            live = [param for param in params if param.grad is not None]
            idle = [p for p in params if p.grad is None and state.get(p)] if state else []
            estimate.counts[index] = sum(map(coordinates, live + idle))
            estimate.idle[index] = idle
        for param in estimate.idle[index]:
            _add_idle(h, param, state[param])
    kernel = None if torch.compiler.is_compiling() else _kernel(estimate, groups)
    estimate.advance([group["lr"] for group in groups], hypers, kernel)


def _kernel(estimate: Estimate, groups: Sequence[Group]) -> Callable[..., None] | None:
    return backends.scalar_kernel(
        estimate.values.device,
        foreach_wanted=any(group["foreach"] for group in groups),
        fused_wanted=None if all(group["fused"] is not False for group in groups) else False,
    )


@torch.no_grad()
def _add_idle(h: Hyper, param: Tensor, state: Any) -> None:
    """The sums of a parameter that has no gradient this time: it agrees with nothing."""
    sums = h.sums[sharding.spread(param)]
    buffers = (states.real(sharding.local(state[name])) for name in ("grad_sum", "grad_sq_sum"))
    told = rule.state_sums(TorchFunctions, h, *buffers)
    sums[1:] += torch.stack(told).to(sums.device)


def lr_of(row: Tensor) -> float:
    """γ without a group's factor, on the host; nan before the first step."""
    distance, _, lr, *_ = row.tolist()
    return lr if distance > 0 else math.nan


def coordinates(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


def _refuse_several(groups: Sequence[Group]) -> None:
    devices = {str(sharding.local(param).device) for group in groups for param in group["params"]}
    if len(devices) > 1:
        raise ValueError(
            f"lr='auto' makes one estimate of all parameters, which must be on one device, and "
            f"these are on {' and '.join(sorted(devices))}; build an optimizer for each device"
        )


def _device_of(groups: Sequence[Group]) -> torch.device:
    """Where the numbers live: with the first parameter there is."""
    first = next(param for group in groups for param in group["params"])
    return sharding.local(first).device
