"""Where a run starts: x_0 (z in the mirror form) is the weight before the first step with a weight.

A step at lr 0 has none. torch.distributed.checkpoint and others make one only to have the state
allocated, and load the weights afterwards; so until a step has had a weight, x_0 is read again.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import sharding
from cubegrad.states import copy

STARTS = ("initial_param", "z")
SUMS = ("grad_sum", "grad_sq_sum")


class Weight(Enum):
    """What the host knows of a step's weight λ_k."""

    NONE = 0
    UNKNOWN = 1  # a learning rate or a GradScaler's verdict on the device
    SOME = 2


class Mark(NamedTuple):
    """The start as a step without a weight left it."""

    start: Tensor
    version: int


class Starts:
    """The parameters that may not have had a step with a weight yet."""

    def __init__(self) -> None:
        self.open: dict[Tensor, Mark | None] = {}  # None: only the sums can tell

    @classmethod
    def of(cls, state: Mapping[Any, Any]) -> "Starts":
        """Of a state that was loaded: those whose sums are all 0."""
        found = cls()
        for param, entries in state.items():
            if isinstance(param, Tensor) and isinstance(entries, dict) and _name(entries):
                sums = [sharding.local(entries[name]) for name in SUMS if name in entries]
                if not any(tensor.is_meta or bool(tensor.any()) for tensor in sums):
                    found.open[param] = None
        return found

    def any_open(self, params: Iterable[Tensor]) -> bool:
        return bool(self.open) and any(param in self.open for param in params)

    def read_again(self, param: Tensor, entries: dict[str, Any], weight: Weight) -> None:
        """Start a parameter that is still open from its value now, before a step of this weight.

        One step of an unknown weight is waited for, not more.
        """
        if param not in self.open:
            return
        mark = self.open[param] if weight is Weight.NONE else self.open.pop(param)
        name = _name(entries)
        if name is None:
            return
        start = entries[name]
        if mark is None:
            shards = [sharding.local(entries[other]) for other in SUMS if other in entries]
            untouched = reduce(torch.logical_and, [shard == 0 for shard in shards])
            x, old = sharding.local(copy(param)), sharding.local(start)
            entries[name] = sharding.like(torch.where(untouched, x, old), param)
        elif mark.start is start and mark.version == start._version:
            entries[name] = copy(param)
        else:  # somebody has put another start there
            self.open.pop(param, None)

    def begin(self, param: Tensor, weight: Weight) -> None:
        """Of a parameter that gets its state in a step of this weight."""
        if weight is not Weight.SOME:
            self.open[param] = None

    def passed(self, params: Iterable[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """After a step that is known to have had no weight."""
        for param in params:
            name = _name(state[param]) if param in self.open else None
            if name is not None:
                start = state[param][name]
                self.open[param] = Mark(start, start._version)


def _name(entries: Mapping[str, Any]) -> str | None:
    return next((name for name in STARTS if name in entries), None)
