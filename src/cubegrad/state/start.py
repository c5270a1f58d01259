"""Where a run starts: x_0, or z without a pull, is the parameter before the first real step.

A step at lr 0 gives its gradient no weight. torch.distributed.checkpoint and others make one only
to have the state allocated, and load the weights afterwards. So until a step has had a weight, x_0
is read again if somebody has changed the parameters since.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import sharding
from cubegrad.rule import Rule
from cubegrad.state import layout
from cubegrad.state.layout import Layout


class Weight(Enum):
    """What the host knows of a step's weight λ_k."""

    NONE = 0
    UNKNOWN = 1  # a learning rate or a GradScaler's verdict on the device
    SOME = 2

    @classmethod
    def of(cls, lr: float | Tensor, found_inf: Tensor | None) -> "Weight":
        if isinstance(lr, Tensor):
            return cls.UNKNOWN
        if lr == 0:
            return cls.NONE
        return cls.SOME if found_inf is None else cls.UNKNOWN


class Mark(NamedTuple):
    """How a step left a parameter and its start; sums show whether they have changed since."""

    start: Tensor  # the very object
    start_sum: Tensor  # before the step: a step with a weight moves a z
    param_sum: Tensor | None  # after the step; None in a compiled one


class Starts:
    """The parameters that may not have had a step with a weight yet."""

    def __init__(self) -> None:
        self.marks: dict[Tensor, Mark] = {}

    @classmethod
    def of_loaded(cls, rule: Rule, state: Mapping[Any, Any]) -> "Starts":
        """The parameters of a loaded state whose start is still their value."""
        starts = cls()
        for param, entries in state.items():
            if not isinstance(param, Tensor) or param.is_meta or not isinstance(entries, dict):
                continue
            held = layout.held(rule, entries)
            if held is None or held.start is None:
                continue
            if bool(held.unweighted(entries).all()) and _is_start(held, entries, param):
                start = entries[held.start]
                starts.marks[param] = Mark(start, _sum(start), _sum(param))
        return starts

    def any_marked(self, params: Iterable[Tensor]) -> bool:
        return bool(self.marks) and any(param in self.marks for param in params)

    def add(self, param: Tensor, start: Tensor) -> None:
        """A parameter whose state is made in a step that may have no weight."""
        self.marks[param] = Mark(start, _sum(start), None)

    def read_again(
        self, param: Tensor, held: Layout, entries: dict[str, Any], weight: Weight
    ) -> None:
        """Start a marked parameter from its value now, if that is not what the last step left.

        After one step of unknown weight the mark is gone. Nothing is read on the host.
        """
        mark = self.marks.pop(param, None)
        if mark is None or held.start is None or entries[held.start] is not mark.start:
            return  # not marked, or somebody has put another start there
        again = (_sum(mark.start) == mark.start_sum) & held.unweighted(entries)
        if mark.param_sum is not None:
            again = again & (_sum(param) != mark.param_sum)
        for name, now in held.started(param).items():
            old = sharding.local(entries[name])
            chosen = torch.where(again, sharding.local(now), old)
            entries[name] = sharding.like(chosen, now)
        if weight is Weight.NONE:
            self.add(param, entries[held.start])

    def renew(self, param: Tensor, held: Layout, entries: dict[str, Any]) -> None:
        """Follow the start of a marked parameter whose state has changed its form."""
        if self.marks.pop(param, None) is not None and held.start is not None:
            self.add(param, entries[held.start])

    def finish_step(self, params: Iterable[Tensor]) -> None:
        """Note how a step left the parameters that are marked."""
        if self.marks:
            for param in params:
                if param in self.marks:
                    self.marks[param] = self.marks[param]._replace(param_sum=_sum(param))


def _sum(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        values = sharding.local(tensor).detach()
        wide = torch.complex128 if values.is_complex() else torch.float64
        return values.sum(dtype=wide)


def _is_start(held: Layout, entries: Mapping[str, Any], param: Tensor) -> bool:
    """Whether the start in these entries is the parameter's value now."""
    return all(
        torch.equal(sharding.local(entries[name]), sharding.local(value))
        for name, value in held.started(param.detach()).items()
    )
