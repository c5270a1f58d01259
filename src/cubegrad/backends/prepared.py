"""A group's step, made ready once and repeated while its tensors stay where they are.

A fused step is so short that finding its tensors would cost more than updating them. What does
not change from step to step is looked up once, and each step only makes sure that it has not.
"""

from array import array
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cubegrad.backends import look
from cubegrad.options import Hyper
from cubegrad.states import dtype_of, lie_alike

Group = dict[str, Any]

ADDRESS = Tensor.data_ptr
# Checking a tensor takes the host about as long as a GPU of 4 TB/s needs for this many elements.
ELEMENTS_PER_CHECK = 80_000
ELEMENTS_PER_LAUNCH = 2_000_000
TABLES_KEPT = 16


def capturing() -> bool:
    """Whether a CUDA graph is being made: what is allocated now has its values in a replay only."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(started and torch.cuda.is_current_stream_capturing())


class Journal:
    """Whether any of the dicts that write into it has changed."""

    changed = False


class Watched(dict[str, Tensor]):
    """A parameter's state, which notes when an entry is replaced; a copy or pickle is a dict.

    To look at every entry at every step instead took 0.2 us a tensor of the host's time.
    """

    __slots__ = ("journal",)

    def __init__(self, entries: dict[str, Tensor], journal: Journal) -> None:
        super().__init__(entries)
        self.journal = journal

    def __reduce__(self) -> tuple[type, tuple[dict[str, Tensor]]]:
        return dict, (dict(self),)


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def changes(self: Watched, *args: Any, **kwargs: Any) -> Any:
        self.journal.changed = True
        return method(self, *args, **kwargs)

    return wraps(method)(changes)


def watch(state: MutableMapping[Tensor, dict[str, Tensor]], params: list[Tensor]) -> Journal:
    """A journal of what changes in these parameters' state from now on."""
    journal = Journal()
    for param in params:
        entries = state[param]
        if isinstance(entries, Watched):
            entries.journal = journal
        else:
            state[param] = Watched(entries, journal)
    return journal


for _name in ("setitem__", "delitem__", "ior__"):
    setattr(Watched, f"__{_name}", _noting(f"__{_name}"))
for _name in ("clear", "pop", "popitem", "setdefault", "update"):
    setattr(Watched, _name, _noting(_name))


class Launch(Protocol):
    """What a fused backend makes of tensors of one device and dtype that lie densely."""

    alive: Any  # what must live as long as a graph may replay the launch

    def table(self, grads: bytes) -> tuple[Any, bool]:
        """The gradients' addresses where `run` wants them, and whether they will stay there."""

    def run(self, h: Hyper, table: Any) -> None: ...


def rows_of(
    params: list[Tensor], steps: list[Tensor], buffers: Sequence[list[Tensor]]
) -> list[tuple[int, ...]]:
    """What a kernel's table says of each tensor: parameter, three buffers, step count, elements."""
    columns = [list(map(ADDRESS, column)) for column in (params, *buffers)]
    columns += [[0] * len(params)] * (4 - len(columns))
    columns += [list(map(ADDRESS, steps)), [param.numel() for param in params]]
    return list(zip(*columns, strict=True))


class Member(NamedTuple):
    """A parameter of a group."""

    owner: Tensor  # as the optimizer knows it
    param: Tensor  # what is stepped here: the same, or the shard of it that this process holds
    entries: dict[str, Tensor]  # the state of that


class Part:
    """Tensors that are checked and launched together.

    What is not looked at: the one buffer among many that someone moves by `.data =` while leaving
    the others, and whether a gradient is the negated view of one that was met before.
    """

    def __init__(
        self,
        make: Callable[..., Launch],
        method: str,
        members: list[Member],
        layout: Sequence[str],
    ) -> None:
        states = [member.entries for member in members]
        steps, *buffers = [[state[name] for state in states] for name in ("step", *layout)]
        self.owners = [member.owner for member in members]
        self.params = params = [member.param for member in members]
        self.signature = look.signature(params)
        # Who moves state in place moves all of it, so a few buffers' addresses tell.
        self.watched = buffers[0][:: max(1, len(params) // 8)]
        self.addresses = list(map(ADDRESS, self.watched))
        self.tables: list[tuple[bytes, Any]] = []  # of gradients seen before, the latest first
        grad = params[0].grad
        assert grad is not None
        self.launch = make(method, params, grad.dtype, steps, buffers)

    def run(self, h: Hyper) -> bool:
        """Step if every tensor is where and what it was; else change nothing and say so."""
        grads = look.addresses(self.params, self.signature)
        if grads is None or list(map(ADDRESS, self.watched)) != self.addresses:
            return False
        table = self._table(grads)
        if table is None:
            return False
        self.launch.run(h, table)
        return True

    def _table(self, grads: bytes) -> Any:
        """The addresses of these gradients, from memory if they lie where some lay before."""
        for place, (known, table) in enumerate(self.tables):
            if known == grads:
                if place:
                    self.tables.insert(0, self.tables.pop(place))
                return table
        if any(param.grad.is_neg() for param in self.params):  # type: ignore[union-attr]
            return None
        table, lasting = self.launch.table(grads)
        if lasting:
            self.tables.insert(0, (grads, table))
            del self.tables[TABLES_KEPT:]
        return table


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
            Part(make, method, part, layout_of(part[0].param))
            for together in alike.values()
            for part in _split(together)
        ]

    def fits(self, group: list[Tensor]) -> bool:
        """Whether the group still has these parameters, and no others have gradients now."""
        return (
            not self.journal.changed
            and look.same(group, self.group)
            and all(param.grad is None for param in self.idle)
        )

    def run(self, h: Hyper) -> list[Tensor]:
        """Step; returns the parameters of the parts that no longer fit, which have not moved."""
        with self.loan:
            return [param for part in self.parts if not part.run(h) for param in part.owners]


class Repeated:
    """The prepared steps of an optimizer, by the number of their group."""

    def __init__(self) -> None:
        self.prepared: dict[int, tuple[Prepared, Any]] = {}
        self.states: list[Any] = []  # the values of the optimizer's state when they were prepared

    def ready(self, groups: list[Group], state: Mapping[Tensor, Any]) -> dict[int, Prepared]:
        """Those that may be run: same parameters, same state, same choices."""
        if not look.same(list(state.values()), self.states):
            self.prepared = {}
        fit = {}
        for index, (prepared, choice) in self.prepared.items():
            group = groups[index] if index < len(groups) else None
            if group is None or _choice(group) != choice:
                continue
            if prepared.fits(group["params"]):
                fit[index] = prepared
        self.prepared = {index: self.prepared[index] for index in fit}
        return fit

    def keep(self, index: int, group: Group, prepared: Prepared | None) -> None:
        if prepared is not None:
            self.prepared[index] = (prepared, _choice(group))

    def drop(self, index: int) -> None:
        del self.prepared[index]

    def remember(self, state: Mapping[Tensor, Any]) -> None:
        self.states = list(state.values())


def _choice(group: Group) -> tuple[Any, ...]:
    """What decides which backend runs on which buffers."""
    momentum = group["momentum"]
    centred = isinstance(momentum, Tensor) or momentum != 0
    return group["foreach"], group["fused"], group["differentiable"], centred


def _split(members: list[Member]) -> list[list[Member]]:
    """Large tensors first, if their update lasts until the others have been checked."""
    order = sorted(members, key=lambda member: member.param.numel(), reverse=True)
    covered = 0
    for lead, member in enumerate(order, start=1):
        covered += member.param.numel()
        rest = len(order) - lead
        if rest >= 8 and covered >= ELEMENTS_PER_LAUNCH + ELEMENTS_PER_CHECK * rest:
            return [order[:lead], order[lead:]]
    return [members]


def prepare(
    make: Callable[..., Launch],
    method: str,
    members: list[Member],
    state: MutableMapping[Tensor, dict[str, Tensor]],
    layout_of: Callable[[Tensor], Sequence[str]],
    loan: AbstractContextManager[None],
) -> Prepared | None:
    """None if some tensor has to be copied or seen otherwise before it can be stepped.

    `loan` gives the shards among what is stepped their gradients while it is entered, as it must
    be now; plain parameters have their own.
    """
    live = [member for member in members if member.owner.grad is not None]
    for _, param, entries in live:
        grad = param.grad
        if type(grad) is not Tensor or grad.layout != torch.strided or param.is_complex():
            return None
        layout = layout_of(param)
        if set(entries) != {"step", *layout}:  # x_0 is still to be dropped
            return None
        if not lie_alike(param, grad, *(entries[name] for name in layout)):
            return None
    journal = watch(state, [member.owner for member in live])
    return Prepared(make, method, members, layout_of, journal, loan)


def step_once(
    make: Callable[..., Launch],
    method: str,
    h: Hyper,
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    buffers: Sequence[list[Tensor]],
) -> None:
    """Any tensors, once: with tables for the occasion, and copies of what does not lie densely."""
    alike: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in zip(params, grads, steps, *buffers, strict=True):
        _check(row[0], *row[2:])
        alike.setdefault((row[0].device, row[0].dtype, row[1].dtype), []).append(row)
    for rows in alike.values():
        flat = [_flattened(row) for row in rows]
        columns = [list(column) for column in zip(*flat, strict=True)]
        launch = make(method, columns[0], columns[1][0].dtype, columns[2], columns[3:])
        launch.alive = columns
        table, _ = launch.table(array("q", map(ADDRESS, columns[1])).tobytes())
        launch.run(h, table)
        for row, copy in zip(rows, flat, strict=True):
            for target, source in zip(row, copy, strict=True):
                if source is not target and target is not row[1]:
                    target.copy_(source)


def _check(param: Tensor, count: Tensor, *state: Tensor) -> None:
    """A kernel trusts its addresses, so what somebody put into the state is looked at first."""
    expected = (param.shape, dtype_of(param), param.device)
    found = [(tensor.shape, tensor.dtype, tensor.device) for tensor in state]
    found += [(count.shape, count.dtype, param.device)]
    wanted = [expected] * len(state) + [(torch.Size(), torch.float32, param.device)]
    for have, want in zip(found, wanted, strict=True):
        if have != want:
            shape, dtype, device = have
            raise ValueError(
                f"a state tensor is {dtype} of shape {tuple(shape)} on {device}, and must be "
                f"{want[1]} of shape {tuple(want[0])} on {want[2]}; put states in with "
                "load_state_dict, which converts them"
            )


def _flattened(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The row if its tensors lie densely and alike on one device, else copies that do."""
    param, grad, count, *state = row
    count = count.to(param.device)
    if lie_alike(param, grad, *state):
        return (param, grad, count, *state)
    return (param.contiguous(), grad.contiguous(), count, *(t.contiguous() for t in state))
