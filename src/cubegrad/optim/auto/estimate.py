"""The numbers of lr="auto": where they live, and how a step advances them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import backends, distance, sharding
from cubegrad.backends.batch import capturing
from cubegrad.distance import FIELDS, SUMS
from cubegrad.functions import NumberFunctions, TorchFunctions
from cubegrad.options import Hyper
from cubegrad.rule import Rule
from cubegrad.state import layout

Group = dict[str, Any]
LR = FIELDS.index("lr")


def empty() -> Tensor:
    """What a group holds before the first step: a checkpoint has a place for it from the start."""
    return torch.zeros(len(FIELDS), dtype=torch.float64)


def hold(group: Group, row: Tensor) -> None:
    """Give the group its numbers; `estimated_lr`, for loggers, is a view of one of them."""
    group["estimate"], group["estimated_lr"] = row, row[LR]


def lr_of(row: Tensor) -> float:
    """γ without a group's factor, on the host; nan before the first step."""
    distance, _, lr, *_ = row.tolist()
    return lr if distance > 0 else math.nan


def coordinates(param: Tensor) -> int:
    return param.numel() * (2 if param.is_complex() else 1)


class Estimate:
    """The numbers of all groups, a row for each, of which the groups hold views."""

    def __init__(self, rule: Rule, groups: Sequence[Group], values: Tensor) -> None:
        self.rule = rule
        self.values = values
        self.on_host = values.is_cpu  # its numbers can be read without waiting
        self.sums = values.new_zeros(len(groups), len(SUMS))
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

    def begin(self, traced: bool) -> Any:
        """Set the sums to 0; returns γ, a number if that needs no waiting."""
        # A graph is replayed whatever the step before it left, and a trace should not ask.
        if not self.cleared or traced or capturing():
            self.sums.zero_()
        self.cleared = False
        for _, _, sums in self.sharded:
            sums.zero_()
        if traced:  # a second input that is a view of the first would be copied
            return self.values[0, LR]
        return self.lr.item() if self.on_host else self.lr

    def look_up(
        self, index: int, group: Group, silent: list[Tensor], state: Mapping[Tensor, Any]
    ) -> None:
        """Note what a step does to a group in which these parameters have no gradient."""
        self.idle[index] = [
            param
            for param in silent
            if "step" in state.get(param, {}) and layout.held(self.rule, state[param])
        ]
        self.live[index] = len(silent) < len(group["params"])
        without = set(map(id, silent))  # among them may be lazy ones, which have no size yet
        live = (param for param in group["params"] if id(param) not in without)
        self.counts[index] = sum(map(coordinates, live))

    def stepped_counts(self, state: Mapping[Tensor, Any]) -> Sequence[int] | Tensor:
        """Each group's coordinates that have been stepped, now or before.

        A state alone does not say so: a fused step that a GradScaler skips makes one. Its count of
        steps does, which is on the device; reading it here would wait for that.
        """
        counts = []
        for live, idle in zip(self.counts, self.idle, strict=True):
            count: Any = live
            for param in idle:
                count = count + (state[param]["step"] > 0) * coordinates(param)
            counts.append(self._here(count))
        table = torch.stack(counts)
        return table.tolist() if self.on_host else table

    def advance_on_host(
        self, factors: Sequence[Any], hypers: Sequence[Hyper], counts: Sequence[int]
    ) -> None:
        """Python's own numbers are faster than tensors of one number each."""
        if hypers[0].found_inf is not None and hypers[0].found_inf.item():
            return
        factors = list(map(float, factors))
        rows, sums = self.values.tolist(), self.sums.tolist()
        try:
            new = distance.advance(NumberFunctions, self.rule, rows, sums, factors, counts, hypers)
        except (OverflowError, ZeroDivisionError, ValueError):  # where tensors give inf or nan
            new = [list(map(float, row)) for row in self._advanced(factors, counts, hypers)]
        self.values.copy_(torch.tensor(new, dtype=torch.float64))

    @torch.no_grad()
    def advance_on_device(
        self,
        factors: Sequence[Any],
        hypers: Sequence[Hyper],
        counts: Sequence[int] | Tensor,
        groups: Sequence[Group] | None = None,
    ) -> None:
        """By one launch, if `groups` are given and let it run."""
        device, found_inf = self.values.device, hypers[0].found_inf
        kernel = None if groups is None else backends.estimate_kernel(device, groups)
        if kernel is not None:
            rates, shrinks = hypers[0].lr, None
            if len(hypers) > 1:
                rates = torch.stack([h.lr for h in hypers])
            if any(h.shrink is not None for h in hypers):
                own = (1.0 if h.shrink is None else h.shrink for h in hypers)
                shrinks = torch.stack(list(map(self._here, own)))
            counts = counts if isinstance(counts, Tensor) else self._table(counts)
            kernel(self.rule, self.values, self.sums, rates, shrinks, counts, found_inf)
            self.cleared = not capturing()
            return
        factors = [f.to(device).reshape(()) if isinstance(f, Tensor) else f for f in factors]
        new = torch.stack([torch.stack(row) for row in self._advanced(factors, counts, hypers)])
        if found_inf is not None:
            new = torch.where(found_inf.to(device) == 0, new, self.values)
        self.values.copy_(new)

    def _advanced(self, factors: Sequence[Any], counts: Any, hypers: Any) -> list[list[Any]]:
        """The rows after the step, each number a tensor."""
        rows, sums = ([row.unbind() for row in table] for table in (self.values, self.sums))
        return distance.advance(TorchFunctions, self.rule, rows, sums, factors, counts, hypers)

    def _here(self, number: float | Tensor) -> Tensor:
        """The number where the others are."""
        if isinstance(number, Tensor):
            return number.to(self.values)
        return torch.full((), number, dtype=torch.float64, device=self.values.device)

    def _table(self, counts: Sequence[int]) -> Tensor:
        key = tuple(counts)
        if key in self.tables:
            return self.tables[key]
        table = torch.stack([self._here(float(count)) for count in key])
        if not capturing():  # else only the graph's replay fills it
            self.tables[key] = table
        return table


def weighed(
    factors: Sequence[Any], hypers: Sequence[Hyper], live: Sequence[bool] | Tensor
) -> tuple[list[Any], Sequence[Hyper]]:
    """The groups' factors and numbers, as they count for the estimate.

    A group without a gradient makes no step: that adds no weight λ, and shrinks nothing.
    """
    if isinstance(live, list) and False not in live:
        return list(factors), hypers
    pairs = list(zip(hypers, live, strict=True))
    new = [h._replace(lr=h.lr * one, shrink=_shrink_if(one, h.shrink)) for h, one in pairs]
    return [factor * one for factor, one in zip(factors, live, strict=True)], new


def _shrink_if(live: bool | Tensor, shrink: Any) -> Any:
    if shrink is None or not isinstance(live, Tensor):
        return shrink if live else None
    return 1 - (1 - shrink) * live
