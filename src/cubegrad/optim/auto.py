"""lr="auto": where its numbers live, and how a step advances them.

One estimate serves all groups; a group's own `lr` is a factor on it. Everything stays on the
device, so that only the first step waits for it. The maths is in distance.py.
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from cubegrad import backends, distance, sharding
from cubegrad.backends.batch import capturing
from cubegrad.distance import FIELDS
from cubegrad.functions import NumberFunctions, TorchFunctions
from cubegrad.optim import auto_checks, first_estimate
from cubegrad.optim.first_estimate import coordinates
from cubegrad.options import Hyper
from cubegrad.rule import MADGRAD
from cubegrad.state import conversion, layout

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


class Estimate:
    """The numbers of all groups, a row for each, of which the groups hold views."""

    def __init__(self, groups: Sequence[Group], values: Tensor) -> None:
        self.values = values
        self.on_host = values.is_cpu  # its numbers can be read without waiting
        self.sums = torch.zeros(len(groups), 3, dtype=torch.float64, device=values.device)
        self.rows = list(values)
        # Where the backends add their sums. Those of sharded parameters are reduced over the
        # processes afterwards, in an order that is the same in all of them.
        self.parts: list[dict[sharding.ShardedOver, Tensor]] = [{None: sums} for sums in self.sums]
        self.sharded: list[tuple[Tensor, sharding.ShardedOver, Tensor]] = []
        for group, row in zip(groups, self.rows, strict=True):
            hold(group, row)
        self.lr: Tensor = groups[0]["estimated_lr"]
        self.follow(groups)
        self.live = [True] * len(groups)  # which groups have a gradient in this step
        self.counts = [-1] * len(groups)  # coordinates that have a gradient; -1: not counted yet
        self.idle: list[list[Tensor]] = [[] for _ in groups]  # have a state and no gradient
        self.cleared = False  # whether a kernel has set `sums` to 0 for the next step
        # Counts on the device. None is dropped, as a captured graph may read it.
        self.tables: dict[tuple[int, ...], Tensor] = {}

    def follow(self, groups: Sequence[Group]) -> None:
        """Make places for the sums of sharded parameters that are new in the groups."""
        for group, total, part in zip(groups, self.sums, self.parts, strict=True):
            for over in dict.fromkeys(map(sharding.sharded_over, group["params"])):
                if over not in part:
                    part[over] = torch.zeros_like(total)
                    self.sharded.append((total, over, part[over]))

    def look_up(self, index: int, group: Group, silent: list[Tensor], state: Any) -> None:
        """Note what a step does to a group in which these parameters have no gradient."""
        self.idle[index] = [
            param
            for param in silent
            if "step" in state.get(param, {}) and layout.held(MADGRAD, state[param])
        ]
        self.live[index] = len(silent) < len(group["params"])
        without = set(map(id, silent))  # among them may be lazy ones, which have no size yet
        live = (param for param in group["params"] if id(param) not in without)
        self.counts[index] = sum(map(coordinates, live))

    def counted(self, state: Any) -> Sequence[int] | Tensor:
        """Each group's coordinates that have been stepped, now or before.

        A state alone does not say so: a fused step that a GradScaler skips makes one. Its count of
        steps does, which is on the device; reading it here would wait for that.
        """
        if not any(self.idle):
            return self.counts
        counts = []
        for live, idle in zip(self.counts, self.idle, strict=True):
            count: Any = live
            for param in idle:
                count = count + (state[param]["step"] > 0) * coordinates(param)
            counts.append(self._on_device(count))
        table = torch.stack(counts)
        return table.tolist() if self.on_host else table

    @torch.no_grad()
    def advance_on_device(
        self,
        groups: Sequence[Group],
        hypers: Sequence[Hyper],
        counts: Sequence[int] | Tensor,
        live: Sequence[bool] | Tensor,
        may_launch: bool,
    ) -> None:
        factors, hypers = _weighed(groups, hypers, live)
        kernel = backends.estimate_kernel(self.values.device, groups) if may_launch else None
        found_inf = hypers[0].found_inf
        if kernel is not None:  # one launch, where the code below makes some sixty
            rates, kept = hypers[0].lr, None
            if len(hypers) > 1:
                rates = torch.stack([h.lr for h in hypers])
            if any(h.shrink is not None for h in hypers):
                shrinks = (1.0 if h.shrink is None else h.shrink for h in hypers)
                kept = torch.stack(list(map(self._on_device, shrinks)))
            there = counts if isinstance(counts, Tensor) else self._counts_on_device(counts)
            kernel(self.values, self.sums, rates, kept, there, found_inf)
            self.cleared = not capturing()
            return
        device = self.values.device
        factors = [f.to(device).reshape(()) if isinstance(f, Tensor) else f for f in factors]
        new = torch.stack([torch.stack(row) for row in self.advanced(factors, counts, hypers)])
        if found_inf is not None:
            new = torch.where(found_inf.to(device) == 0, new, self.values)
        self.values.copy_(new)

    def advanced(self, factors: Sequence[Any], counts: Any, hypers: Any) -> list[list[Any]]:
        """The rows after the step, each number a tensor."""
        rows, sums = ([row.unbind() for row in table] for table in (self.values, self.sums))
        return distance.advance(TorchFunctions, rows, sums, factors, counts, hypers)

    def _on_device(self, number: float | Tensor) -> Tensor:
        if isinstance(number, Tensor):
            return number.to(self.values)
        return torch.full((), number, dtype=torch.float64, device=self.values.device)

    def _counts_on_device(self, counts: Sequence[int]) -> Tensor:
        key = tuple(counts)
        if key in self.tables:
            return self.tables[key]
        table = torch.stack([self._on_device(float(count)) for count in key])
        if not capturing():  # else only the graph's replay fills it
            self.tables[key] = table
        return table


def begin_step(
    optimizer: "BaseOptimizer", hyper: Callable[..., Hyper], same_params: bool = False
) -> list[Hyper] | None:
    """The numbers of every group at the estimated rate, with sums for the backends to add to.

    None while no gradient gives the estimate a scale: then no weight may move. `same_params` says
    that the groups are known to have the parameters of the last step.
    """
    groups, estimate = optimizer.param_groups, optimizer._estimate
    traced = torch.compiler.is_compiling()
    changed = not (traced or same_params) and auto_checks.params_changed(optimizer)
    if not traced and not _is_held(estimate, groups):  # else `against_tracing` has asked
        estimate = optimizer._estimate = _begin(optimizer, hyper)
    elif changed and estimate is not None:
        estimate.follow(groups)
    if estimate is None:
        return None
    if optimizer._factor_watch is not None and not traced:
        optimizer._factor_watch.look(optimizer)
    # A graph is replayed whatever the step before it left, and a trace should not ask.
    if not estimate.cleared or traced or capturing():
        estimate.sums.zero_()
    estimate.cleared = False
    for _, _, sums in estimate.sharded:
        sums.zero_()
    lr: Any = estimate.lr
    if traced:  # a second input that is a view of the first would be copied
        lr = estimate.values[0, FIELDS.index("lr")]
    elif estimate.on_host:
        lr = lr.item()
    return [
        hyper(optimizer, group, lr)._replace(sums=part)
        for group, part in zip(groups, estimate.parts, strict=True)
    ]


def _is_held(estimate: Estimate | None, groups: Sequence[Group]) -> TypeGuard[Estimate]:
    """Whether the groups hold this estimate; not after one was added, or a checkpoint loaded."""
    if estimate is None or len(groups) != len(estimate.rows):
        return False
    pairs = zip(groups, estimate.rows, strict=True)
    return all(group["estimate"] is row for group, row in pairs)


@torch.no_grad()
def _begin(optimizer: "BaseOptimizer", hyper: Callable[..., Hyper]) -> Estimate | None:
    """The estimate that the groups hold, or one that begins with the gradients they have now.

    None if those are all 0 or not finite. To know that, it waits for the device.
    """
    groups = optimizer.param_groups
    device = first_estimate.device_of(groups)
    if device is None and optimizer._shared is not None:
        device = optimizer._shared.default_device()
    if device is not None and capturing():
        raise RuntimeError(
            "step() is being captured in a CUDA graph before the first one of lr='auto'; run one "
            "step before the capture"
        )
    rows = None if device is None else first_estimate.rows(optimizer, hyper, device)
    if rows is None:
        optimizer._steps_waited = first_estimate.waited(optimizer._steps_waited)
        return None
    optimizer._steps_waited = 0
    return Estimate(groups, rows.to(device))


def hold(group: Group, row: Tensor) -> None:
    """Give the group its numbers; `estimated_lr`, for loggers, is a view of one of them."""
    group["estimate"], group["estimated_lr"] = row, row[FIELDS.index("lr")]


@torch.no_grad()
def end_step(optimizer: "BaseOptimizer", hypers: Sequence[Hyper], repeated: Container[int]) -> None:
    """Take in the sums of a step that all groups have made.

    In the groups that were repeated the same parameters have gradients as in the step before.
    """
    groups, estimate = optimizer.param_groups, optimizer._estimate
    assert estimate is not None  # begin_step has made it
    for index, (group, h) in enumerate(zip(groups, hypers, strict=True)):
        if index not in repeated or estimate.counts[index] < 0:
            silent = [param for param in group["params"] if param.grad is None]
            estimate.look_up(index, group, silent, optimizer.state)
        for param in estimate.idle[index]:
            for own in conversion.sums(param, optimizer.state[param], h.eps):
                _add_idle(h, h.sums[sharding.sharded_over(param)], *own)
    for total, over, sums in estimate.sharded:
        total += sharding.sum_over_shards(sums, over)
    counts: Any = estimate.counted(optimizer.state)
    live: Any = estimate.live
    if optimizer._shared is not None:
        counts, live, found_inf = optimizer._shared.totals(estimate, counts, hypers[0].found_inf)
        hypers = [h._replace(found_inf=found_inf) for h in hypers]
    if not estimate.on_host:
        estimate.advance_on_device(groups, hypers, counts, live, may_launch=True)
        return
    if hypers[0].found_inf is not None and hypers[0].found_inf.item():
        return
    factors, hypers = _weighed(groups, hypers, live)
    factors = list(map(float, factors))
    rows, step_sums = estimate.values.tolist(), estimate.sums.tolist()
    try:
        new = distance.advance(NumberFunctions, rows, step_sums, factors, counts, hypers)
    except (OverflowError, ZeroDivisionError, ValueError):  # where tensors give inf or nan
        new = [list(map(float, row)) for row in estimate.advanced(factors, counts, hypers)]
    estimate.values.copy_(torch.tensor(new, dtype=torch.float64))


def _weighed(
    groups: Sequence[Group], hypers: Sequence[Hyper], live: Sequence[bool] | Tensor
) -> tuple[list[Any], Sequence[Hyper]]:
    """The groups' factors and numbers, as they count for the estimate.

    A group without a gradient makes no step: that adds no weight λ, and shrinks nothing.
    """
    factors = [group["lr"] for group in groups]
    if isinstance(live, list) and False not in live:
        return factors, hypers
    factors = [factor * one for factor, one in zip(factors, live, strict=True)]
    new = (h._replace(lr=h.lr * one) for h, one in zip(hypers, live, strict=True))
    return factors, [
        h._replace(shrink=None) if one is False else h for h, one in zip(new, live, strict=True)
    ]


@torch.no_grad()
def _add_idle(h: Hyper, sums: Tensor, grad_sum: Tensor, grad_sq_sum: Tensor) -> None:
    """The sums of a parameter that has no gradient this time; s and ν as real numbers."""
    new = distance.idle_sums(TorchFunctions, h, grad_sum, grad_sq_sum)
    sums[1:] += torch.stack(new).to(sums.device)


def against_tracing(optimizer: "BaseOptimizer") -> str | None:
    """Why this step cannot be traced, if it cannot."""
    estimate = optimizer._estimate
    if not _is_held(estimate, optimizer.param_groups):
        return (
            "the first step of lr='auto' reads its gradients on the host, so it cannot be traced: "
            "make one plain optimizer.step() before the compiled one, or leave fullgraph=True out"
        )
    if optimizer._shared is not None or estimate.sharded:
        return (
            "a step of lr='auto' over several processes sums numbers over them and cannot be "
            "traced; leave fullgraph=True out"
        )
    return None


def end_traced_step(
    optimizer: "BaseOptimizer", hypers: Sequence[Hyper], idle: Sequence[Sequence[Tensor]]
) -> None:
    """As `end_step`, for the compiler; `idle` has step count, s and ν of idle parameters in turns.

    It leaves the counts of the estimate to steps that are not compiled, which may be repeated.
    """
    groups, estimate = optimizer.param_groups, optimizer._estimate
    assert estimate is not None
    counts: list[Any] = []
    live = []
    for group, h, tensors in zip(groups, hypers, idle, strict=True):
        with_gradient = [param for param in group["params"] if param.grad is not None]
        count: Any = sum(map(coordinates, with_gradient))
        steps, *sums = tensors[::3], tensors[1::3], tensors[2::3]
        for step, *own in zip(steps, *sums, strict=True):
            grad_sum, grad_sq_sum = map(layout.as_real, own)
            _add_idle(h, h.sums[None], grad_sum, grad_sq_sum)
            count = count + (step > 0) * grad_sum.numel()
        counts.append(count)
        live.append(len(with_gradient) > 0)  # torch 2.11 cannot trace bool() of a list
    estimate.advance_on_device(groups, hypers, counts, live, may_launch=False)


def lr_of(row: Tensor) -> float:
    """γ without a group's factor, on the host; nan before the first step."""
    distance, _, lr, *_ = row.tolist()
    return lr if distance > 0 else math.nan
