"""Where a run starts: x_0 (z in the mirror form) is the weight before the first step with a weight.

A step at lr 0 has none. torch.distributed.checkpoint and others make one only to have the state
allocated, and load the weights afterwards; so until a step has had a weight, x_0 is read again if
somebody has changed the weights since.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import sharding
from cubegrad.state.layout import copy

STARTS = ("initial_param", "z")
# Where these are 0 at a coordinate, no step has had a weight there. ν of the mirror form grows at
# any lr, but there z moves.
WEIGHED = ("grad_sum", "grad_sq_sum")


class Weight(Enum):
    """What the host knows of a step's weight λ_k."""

    NONE = 0
    UNKNOWN = 1  # a learning rate or a GradScaler's verdict on the device
    SOME = 2


class Mark(NamedTuple):
    """How a parameter and its start were left; sums tell whether they have changed since."""

    start: Tensor  # the very object
    start_sum: Tensor  # before the step: in the mirror form a weight moves it
    param_sum: Tensor | None  # after the step; None in a compiled one


class Starts:
    """The parameters that may not have had a step with a weight yet."""

    def __init__(self) -> None:
        self.open: dict[Tensor, Mark] = {}

    @classmethod
    def of(cls, state: Mapping[Any, Any]) -> "Starts":
        """Of a state that was loaded: those whose start is still their value."""
        found = cls()
        for param, entries in state.items():
            name = (
                _name(entries) if isinstance(param, Tensor) and isinstance(entries, dict) else None
            )
            if name is None or param.is_meta:
                continue
            start, x = sharding.local(entries[name]), sharding.local(copy(param.detach()))
            if torch.equal(start, x) and bool(_unweighed(entries).all()):
                found.open[param] = Mark(entries[name], _sum(start), _sum(param))
        return found

    def any_open(self, params: Iterable[Tensor]) -> bool:
        return bool(self.open) and any(param in self.open for param in params)

    def begin(self, param: Tensor, entries: dict[str, Any], weight: Weight) -> None:
        """Of a parameter that gets its state in a step of this weight."""
        name = _name(entries)
        if weight is not Weight.SOME and name is not None:
            self.open[param] = Mark(entries[name], _sum(entries[name]), None)

    def read_again(self, param: Tensor, entries: dict[str, Any], weight: Weight) -> None:
        """Start an open parameter from its value now, if that is not what the last step left.

        One step of an unknown weight is waited for, not more. Nothing is read on the host.
        """
        if param not in self.open:
            return
        mark, name = self.open.pop(param), _name(entries)
        if name is None or entries[name] is not mark.start:
            return  # somebody has put another start there
        x, old = sharding.local(copy(param)), sharding.local(mark.start)
        again = (_sum(old) == mark.start_sum) & _unweighed(entries)
        if mark.param_sum is not None:
            again = again & (_sum(param) != mark.param_sum)
        entries[name] = sharding.like(torch.where(again, x, old), param)
        if weight is Weight.NONE:
            self.open[param] = Mark(entries[name], _sum(entries[name]), None)

    def passed(self, params: Iterable[Tensor]) -> None:
        """After a step that may have had no weight."""
        for param in params:
            if param in self.open:
                self.open[param] = self.open[param]._replace(param_sum=_sum(param))


def _sum(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        values = sharding.local(tensor).detach()
        wide = torch.complex128 if values.is_complex() else torch.float64
        return values.sum(dtype=wide)


def _unweighed(entries: Mapping[str, Any]) -> Tensor:
    """The coordinates at which no step has had a weight, as far as the sums tell."""
    shards = [sharding.local(entries[name]) for name in WEIGHED if name in entries]
    if "grad_sum" not in entries:
        return torch.ones((), dtype=torch.bool, device=shards[0].device)
    return reduce(torch.logical_and, [shard == 0 for shard in shards])


def _name(entries: Mapping[str, Any]) -> str | None:
    return next((name for name in STARTS if name in entries), None)
