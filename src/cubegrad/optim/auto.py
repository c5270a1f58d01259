"""A learning rate that is estimated: what is kept of it, and how a step moves it on.

One estimate serves all groups; a group's own `lr` is a factor on it. Everything stays on the
device, so that no step but the first waits for it.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import backends, rule, sharding
from cubegrad import distance as distances
from cubegrad.backends.eager import TorchFunctions
from cubegrad.backends.launching import capturing
from cubegrad.optim import first_estimate
from cubegrad.optim.first_estimate import Numbers, coordinates
from cubegrad.options import Hyper
from cubegrad.state import layout as states

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
        self.idle: list[list[Tensor]] = [[] for _ in groups]  # stepped before, no gradient now

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
        self,
        factors: Sequence[Any],
        hypers: Sequence[Hyper],
        kernel: Callable[..., None] | None = None,
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
        return _moved(TorchFunctions, rows, totals, factors, self.counts, hypers)

    def _advance_on_host(self, factors: Sequence[float], hypers: Sequence[Hyper]) -> None:
        """In Python's numbers, which are quicker than tensors of one number each."""
        rows, totals = self.values.tolist(), self.sums.tolist()
        try:
            new = _moved(Numbers, rows, totals, factors, self.counts, hypers)
        except (OverflowError, ZeroDivisionError):  # where tensors say inf
            new = [list(map(float, row)) for row in self._moved(factors, hypers)]
        self.values.copy_(torch.tensor(new, dtype=torch.float64))


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
        scales = scales + xp.where(weighted, distances.gradient_scale(root_sum, one), 0.0)
        coordinates = coordinates + weighted * count
        own.append((distances.agreement(xp, h, row[1], newest), weight_sum))
    agreement = sum(mine for mine, _ in own)
    product, root_sum = (sum(row[column] for row in sums) for column in (1, 2))
    distance = distances.lower_bound(xp, distance, agreement, product, root_sum)
    known = scales > 0
    mean_scale = xp.where(known, scales / (coordinates + (coordinates == 0)), 1.0)
    lr = xp.where(known, distances.learning_rate(distance, mean_scale), lr)
    return [[distance, mine, lr, weight_sum, step + 1] for mine, weight_sum in own]


@torch.no_grad()
def found(
    groups: Sequence[Group], state: Mapping[Tensor, Any], hypers: Sequence[Hyper]
) -> Estimate | None:
    """The estimate that the groups hold, or one that begins with the gradients they have now.

    None if those are all 0 or not finite. To know that, it waits for the device.
    """
    device = first_estimate.device_of(groups)
    if device is None:
        return None
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
    begun = first_estimate.begin(groups, hypers, device)
    if begun is None:
        return None
    row = nothing_yet()
    row[FIELDS.index("distance")], row[FIELDS.index("lr")] = begun
    row[FIELDS.index("step")] = _steps_rested(groups, state)
    return Estimate(groups, row.repeat(len(groups), 1).to(device))


def _steps_rested(groups: Sequence[Group], state: Mapping[Tensor, Any]) -> float:
    """k of the parameters: they have counted the steps in which there was no gradient to use."""
    params = (param for group in groups for param in group["params"])
    return max((float(state[p]["step"]) for p in params if "step" in state.get(p, {})), default=0.0)


def nothing_yet() -> Tensor:
    """What a group holds before the first step: a checkpoint has a place for it from the start."""
    return torch.zeros(len(FIELDS), dtype=torch.float64)


def _begun(row: Tensor) -> bool:
    return row[FIELDS.index("distance")].item() > 0


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
            live = [param for param in group["params"] if param.grad is not None]
            others = (param for param in group["params"] if param.grad is None)
            idle = [param for param in others if "grad_sum" in state.get(param, {})]
            estimate.counts[index] = sum(map(coordinates, live + idle))
            estimate.idle[index] = idle
        for param in estimate.idle[index]:
            buffers = (state[param][name] for name in ("grad_sum", "grad_sq_sum"))
            _add_idle(h, h.sums[sharding.spread(param)], *map(sharding.local, buffers))
    estimate.advance([group["lr"] for group in groups], hypers, _kernel(estimate, groups))


def advance_traced(
    estimate: Estimate | None,
    groups: Sequence[Group],
    hypers: Sequence[Hyper],
    idle: Sequence[Sequence[Tensor]],
) -> None:
    """As `advance`, where the compiler sees it; `idle` has the sums of idle parameters in pairs."""
    if estimate is None:
        return
    for index, (group, h) in enumerate(zip(groups, hypers, strict=True)):
        live = [param for param in group["params"] if param.grad is not None]
        resting = idle[index]
        estimate.counts[index] = sum(map(coordinates, [*live, *resting[::2]]))
        for grad_sum, grad_sq_sum in zip(resting[::2], resting[1::2], strict=True):
            _add_idle(h, h.sums[None], grad_sum, grad_sq_sum)
    estimate.advance([group["lr"] for group in groups], hypers)


def _kernel(estimate: Estimate, groups: Sequence[Group]) -> Callable[..., None] | None:
    return backends.scalar_kernel(
        estimate.values.device,
        foreach_wanted=any(group["foreach"] for group in groups),
        fused_wanted=None if all(group["fused"] is not False for group in groups) else False,
    )


@torch.no_grad()
def _add_idle(h: Hyper, sums: Tensor, grad_sum: Tensor, grad_sq_sum: Tensor) -> None:
    """The sums of a parameter that has no gradient this time: it agrees with nothing."""
    told = distances.idle_sums(TorchFunctions, h, states.real(grad_sum), states.real(grad_sq_sum))
    sums[1:] += torch.stack(told).to(sums.device)


def lr_of(row: Tensor) -> float:
    """γ without a group's factor, on the host; nan before the first step."""
    distance, _, lr, *_ = row.tolist()
    return lr if distance > 0 else math.nan
