"""A group's step, made ready once and repeated while its tensors stay where they are.

A fused step is so short that finding its tensors would cost more than updating them. What does
not change from step to step is looked up once, and each step only checks that it has not changed.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad.backends import overlap
from cubegrad.backends.launching import Launch
from cubegrad.backends.native import tensors as look
from cubegrad.optim.watched import Journal, watch
from cubegrad.options import Hyper
from cubegrad.state.layout import lie_alike

Group = dict[str, Any]

TABLES_KEPT = 16


class Member(NamedTuple):
    """A parameter of a group."""

    owner: Tensor  # as the optimizer knows it
    param: Tensor  # what is stepped here: the same, or the shard of it that this process holds
    entries: dict[str, Tensor]  # the state of that


class Part:
    """Tensors that are checked and launched together.

    Before each step every parameter and gradient is compared with what was prepared, and so is
    the state as far as anybody else can have moved it (see `watched`).
    """

    def __init__(
        self,
        make: Callable[..., Launch],
        method: str,
        members: list[Member],
        layout: Sequence[str],
        written: bytes,
    ) -> None:
        entries = [member.entries for member in members]
        steps, *buffers = [[state[name] for state in entries] for name in ("step", *layout)]
        self.params = params = [member.param for member in members]
        owners = [member.owner for member in members if member.owner is not member.param]
        self.stepped = params + owners
        grads = [param.grad for param in params if param.grad is not None]
        self.written, self.lengths = written, overlap.lengths(grads)
        self.signature = look.signature(params, [])
        self.tables: list[tuple[bytes, Any]] = []  # of gradients seen before, the latest first
        self.launch = make(method, params, grads[0].dtype, steps, buffers)

    def table(self) -> Any:
        """The gradients' addresses as `run` wants them; None if anything else has changed."""
        if self.signature is None:
            return None
        grads = look.addresses(self.params, [], self.signature)
        if grads is None:
            return None
        for place, (known, table) in enumerate(self.tables):
            if known == grads:
                if place:
                    self.tables.insert(0, self.tables.pop(place))
                return table
        if overlap.meets(self.written, self.lengths, grads):
            return None
        table, lasting = self.launch.table(grads)
        if lasting:
            self.tables.insert(0, (grads, table))
            del self.tables[TABLES_KEPT:]
        return table

    def run(self, h: Hyper, table: Any) -> None:
        self.launch.run(h, table)
        look.bump_versions(self.stepped)


class Prepared:
    """The parts of one group, in the order in which they are launched."""

    spread: Any = None  # how its parameters are spread over processes, if sums are wanted

    def __init__(
        self,
        make: Callable[..., Launch],
        method: str,
        members: list[Member],
        layout_of: Callable[[Tensor], Sequence[str]],
        journal: Journal,
        written: bytes,
        loan: AbstractContextManager[None],
    ) -> None:
        self.group = [member.owner for member in members]
        self.idle = [param for param in self.group if param.grad is None]
        self.journal = journal
        self.loan = loan
        alike: dict[Any, list[Member]] = {}
        for member in members:
            if member.param.grad is not None:
                key = (member.param.device, member.param.dtype, member.param.grad.dtype)
                alike.setdefault(key, []).append(member)
        self.parts = [
            Part(make, method, part, layout_of(part[0].param), written) for part in alike.values()
        ]

    def tables(self, group: list[Tensor]) -> list[Any] | None:
        """One for each part, or None if the group cannot be stepped as it was prepared."""
        if not self.journal.holds() or not look.same(group, self.group):
            return None
        if any(param.grad is not None for param in self.idle):
            return None
        tables = []
        with self.loan:
            for part in self.parts:
                table = part.table()
                if table is None:
                    return None
                tables.append(table)
        return tables

    def run(self, h: Hyper, tables: list[Any]) -> None:
        for part, table in zip(self.parts, tables, strict=True):
            part.run(h, table)


class Ready(NamedTuple):
    """A prepared step that has been checked: nothing may happen before it is run."""

    prepared: Prepared
    tables: list[Any]


class Repeated:
    """The prepared steps of an optimizer, by the number of their group."""

    def __init__(self) -> None:
        self.prepared: dict[int, tuple[Prepared, Any]] = {}
        self.states: list[Any] = []  # the optimizer's state when they were prepared: keys, values

    def ready(self, groups: list[Group], state: Mapping[Tensor, Any]) -> dict[int, Ready]:
        """Those that may be run: same parameters, same state, same choices."""
        if not look.same([*state, *state.values()], self.states):
            self.prepared = {}
        ready = {}
        for index, (prepared, choice) in self.prepared.items():
            group = groups[index] if index < len(groups) else None
            if group is None or _choice(group) != choice:
                continue
            tables = prepared.tables(list(group["params"]))
            if tables is not None:
                ready[index] = Ready(prepared, tables)
        self.prepared = {index: self.prepared[index] for index in ready}
        return ready

    def keep(self, index: int, group: Group, prepared: Prepared | None) -> None:
        if prepared is not None:
            self.prepared[index] = (prepared, _choice(group))

    def remember(self, state: Mapping[Tensor, Any]) -> None:
        self.states = [*state, *state.values()]


def _choice(group: Group) -> tuple[Any, ...]:
    """What decides which backend runs on which buffers."""
    momentum = group["momentum"]
    centred = isinstance(momentum, Tensor) or momentum != 0
    # Without x_0 the weights belong to the eps they were reached with.
    eps = None if centred else group["eps"]
    return group["foreach"], group["fused"], group["differentiable"], centred, eps


def prepare(
    make: Callable[..., Launch],
    method: str,
    members: list[Member],
    state: MutableMapping[Tensor, dict[str, Tensor]],
    layout_of: Callable[[Tensor], Sequence[str]],
    loan: AbstractContextManager[None],
) -> Prepared | None:
    """None if some tensor has to be copied or viewed otherwise before it can be stepped.

    `loan` gives the shards among what is stepped their gradients while it is entered, as it must
    be now; plain parameters have their own.
    """
    live = [member for member in members if member.owner.grad is not None]
    written: list[overlap.Span] = []
    read: list[overlap.Span] = []
    watched = {}
    for owner, param, entries in live:
        grad = param.grad
        if type(grad) is not Tensor or grad.layout != torch.strided or param.is_complex():
            return None
        if param.is_inference() or owner.is_inference():  # no version to bump
            return None
        layout = layout_of(param)
        buffers = [entries[name] for name in layout if name in entries]
        stale = "initial_param" in entries and "initial_param" not in layout  # to be dropped
        if stale or len(buffers) < len(layout):
            return None
        if not lie_alike(param, grad, *buffers):
            return None
        watched[owner] = [entries["step"], *buffers]
        written += map(overlap.span, (param, *watched[owner]))
        read.append(overlap.span(grad))
    if overlap.any_meet(written, read):
        return None
    journal = watch(state, watched)
    return Prepared(make, method, members, layout_of, journal, overlap.packed(written), loan)
