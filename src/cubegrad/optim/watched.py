"""The state of parameters whose step is prepared, watched for changes.

A prepared step knows its tensors by address, and a user may move one between steps: by
`.data = `, `set_()`, `share_memory_()`, or by putting another in its place. Comparing every tensor
of the state at every step was measured at 250 us for 2,000 parameters on one core of an EPYC,
cache misses mostly, where the whole step took 420. But nobody can move a tensor without getting
hold of it first. So the dicts note what they hand out, and a tensor is compared from then on,
until only the optimizer holds it again.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cubegrad.backends.native import tensors as look

_storage_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _holders(tensors: Sequence[Any]) -> list[tuple[int, ...]]:
    """How many references there are to each tensor, and to its storage."""
    found: list[tuple[int, ...]] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        uses = _storage_uses(storage._cdata) if _storage_uses else sys.maxsize
        references = sys.getrefcount(tensor), sys.getrefcount(storage)
        weak = weakref.getweakrefcount(tensor), weakref.getweakrefcount(storage)
        found.append((*references, *weak, tensor._use_count(), uses))
    return found


def _alone() -> tuple[int, ...]:
    """What `_holders` finds of a tensor that only the optimizer holds.

    It is in `Watched.tensors`, in the dict and in the launch.
    """
    alone = (torch.zeros(1),)
    held = [alone[0]], [alone[0]]
    (holders,) = _holders(alone)
    del held
    return holders


ALONE = _alone()


class Journal:
    """What happened to the dicts that write into it."""

    def __init__(self) -> None:
        self.changed = False  # an entry was replaced
        self.lent: list[Watched] = []  # whose tensors somebody else may hold
        self.step = 0
        self.lent_at = self.taken_at = 0  # the steps of the last loan and of the last taking back
        self.wait = 1  # steps after a loan until it is seen whether it is over
        self.compared: tuple[list[Tensor], Any] = ([], look.signature([], []))

    def lend(self, watched: "Watched") -> None:
        if not self.lent and self.step - self.taken_at > 4 * self.wait:
            self.wait = 1
        self.lent.append(watched)
        self.lent_at = self.step

    def holds(self) -> bool:
        """Whether every tensor is where it was."""
        self.step += 1
        if self.changed:
            return False
        if not self.lent:
            return True
        if len(self.compared[0]) != sum(len(watched.tensors) for watched in self.lent):
            tensors = [tensor for watched in self.lent for tensor in watched.tensors]
            self.compared = tensors, look.joined([watched.signature for watched in self.lent])
            del tensors
        if look.addresses([], *self.compared) is None:
            return False
        if self.step - self.lent_at >= self.wait:
            self.take_back()
        return True

    def take_back(self) -> None:
        """See who still holds what: 2 us a tensor, so ever more seldom where it is read often."""
        self.compared = ([], look.signature([], []))
        for watched in self.lent:
            watched.lent = not watched.is_alone()
        self.lent = [watched for watched in self.lent if watched.lent]
        self.lent_at = self.taken_at = self.step
        self.wait = min(2 * self.wait, 1024)


class Watched(dict[str, Any]):
    """A parameter's state, which notes what is replaced and handed out; a copy is a dict."""

    __slots__ = ("journal", "lent", "signature", "tensors")

    def __init__(
        self, entries: dict[str, Any], tensors: Sequence[Tensor], journal: Journal
    ) -> None:
        super().__init__(entries)
        self.watch(tensors, journal)

    def watch(self, tensors: Sequence[Tensor], journal: Journal) -> None:
        """Begin to note, into this journal, what happens to these tensors of the state."""
        self.tensors = tuple(tensors)
        self.signature = look.signature([], list(tensors))
        known = getattr(self, "journal", journal)
        if known is not journal:  # of a step that another optimizer may have prepared
            known.changed = True
        self.journal = journal
        self.lent = True  # until it is seen that nobody else holds them
        journal.lend(self)

    def lend(self) -> None:
        if not self.lent:
            self.lent = True
            self.journal.lend(self)

    def is_alone(self) -> bool:
        """Whether nobody but the optimizer can reach these tensors or their storages."""
        entries = set(map(id, dict.values(self)))
        if not all(id(tensor) in entries for tensor in self.tensors):
            return False  # they are shards, which whoever holds the entry can reach
        return _storage_uses is not None and set(_holders(self.tensors)) == {ALONE}

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    # Of a copy, which holds the tensors as long as somebody holds the view.
    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()


def _noting(name: str, is_change: bool) -> Callable[..., Any]:
    method = getattr(dict, name)

    def noted(self: Watched, *args: Any, **kwargs: Any) -> Any:
        self.lend()
        self.journal.changed = self.journal.changed or is_change
        return method(self, *args, **kwargs)

    return wraps(method)(noted)


# Overriding __iter__ also keeps `dict(watched)` and `{**watched}` from copying past the others.
for _name in ("__getitem__", "__iter__", "get"):
    setattr(Watched, _name, _noting(_name, is_change=False))
for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault"):
    setattr(Watched, _name, _noting(_name, is_change=True))
Watched.update = _noting("update", is_change=True)  # type: ignore[method-assign]


def watch(
    state: MutableMapping[Tensor, Any], tensors: Mapping[Tensor, Sequence[Tensor]]
) -> Journal:
    """A journal of what happens from now on to these tensors of the parameters' state."""
    journal = Journal()
    for param, watched in tensors.items():
        entries = state[param]
        if isinstance(entries, Watched):
            entries.watch(watched, journal)
        else:
            state[param] = Watched(entries, watched, journal)
    return journal
