"""The same step again: what was looked up once, and how we know that it still holds.

A fused step is so short that looking up its tensors would cost more than updating them. So what a
step has found is kept, and the next one only checks that nothing but the gradients' addresses
changed. `Repeats.ready` is the one place where that is decided.
"""

from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from cubegrad import options, sharding
from cubegrad.backends.batch import Batch, Launch, Member, capturing
from cubegrad.backends.native import tensors
from cubegrad.optim.watched import Journal, watch
from cubegrad.state import layout

Group = dict[str, Any]

NOTHING = nullcontext()
TABLES_KEPT = 16  # of gradients that come back to the same addresses in turns


class PreparedLaunch:
    """A launch that can run again while its tensors stay where they are."""

    def __init__(self, launch: Launch, batch: Batch, owners: Sequence[Tensor]) -> None:
        self.launch = launch
        self.sharded_over = batch.sharded_over
        self.params = batch.params
        self.written = self.params + [
            owner for owner, param in zip(owners, self.params, strict=True) if owner is not param
        ]
        self.signature = tensors.signature(self.params, [])  # None: the step cannot be repeated
        self.tables: list[tuple[bytes, Any]] = []  # of gradients seen before, the latest first

    def table(self) -> Any:
        """The gradients' addresses for `Launch.run`; None if anything else has changed."""
        grads = tensors.addresses(self.params, [], self.signature)
        if grads is None:
            return None
        for place, (known, table) in enumerate(self.tables):
            if known == grads:
                if place:
                    self.tables.insert(0, self.tables.pop(place))
                return table
        if tensors.any_within(self.launch.written, self.launch.grad_lengths, grads):
            return None
        table, lasting = self.launch.table(grads)
        if lasting:
            self.tables.insert(0, (grads, table))
            del self.tables[TABLES_KEPT:]
        return table


class Prepared:
    """The last step of one group, ready to be repeated."""

    def __init__(
        self,
        group: Group,
        launches: list[PreparedLaunch],
        shards: sharding.ShardGradients,
        own: dict[Tensor, list[Tensor]],
        journal: Journal,
    ) -> None:
        self.flags = [group[name] for name in options.FLAGS]
        self.momentum = group["momentum"]
        self.eps = group["eps"]
        self.params = list(group["params"])
        self.idle = [param for param in self.params if param not in own]
        self.launches = launches
        self.journal = journal
        self.shards = shards

    def tables(self, group: Group) -> list[Any] | None:
        """One for each launch; None if the group cannot be stepped as it was."""
        momentum, had = group["momentum"], self.momentum
        if momentum is not had and layout.has_momentum(momentum) != layout.has_momentum(had):
            return None  # other buffers are needed
        if [group[name] for name in options.FLAGS] != self.flags:
            return None
        if group["eps"] != self.eps:
            return None  # the group has to note it: see `last_eps`
        if "betas" in group:
            return None  # to be refused
        if not tensors.same_objects(self.params, list(group["params"])):
            return None
        if any(param.grad is not None for param in self.idle):
            return None
        journal = self.journal
        journal.step += 1
        if journal.changed or (journal.exposed and not journal.nothing_moved()):
            return None
        tables = []
        with self.shards if self.shards.pairs else NOTHING:
            for one in self.launches:
                table = one.table()
                if table is None:
                    return None
                tables.append(table)
        return tables


def prepare(
    group: Group,
    members: Sequence[Member],
    batches: Sequence[Batch],
    launches: Sequence[Launch | None],
    state: MutableMapping[Tensor, Any],
) -> Prepared | None:
    """Make the step that these launches have just made ready to be repeated, if it can be."""
    if sum(len(batch.rows) for batch in batches) != len(members) or capturing():
        return None  # some were stepped by rows; or the tables exist in a graph's replay only
    own: dict[Tensor, list[Tensor]] = {}
    owners: dict[Tensor, Tensor] = {}
    for owner, _, row, drops in members:
        # An inference tensor has no version to increment.
        if drops or row.param.is_inference() or owner.is_inference():
            return None
        own[owner] = [row.step, *row.buffers]
        owners[row.param] = owner
    prepared = []
    shards = sharding.ShardGradients(list(own))
    with shards if shards.pairs else NOTHING:
        for batch, launch in zip(batches, launches, strict=True):
            if launch is None or any(row.param not in owners for row in batch.rows):
                return None  # copies were stepped, or real views of complex numbers
            one = PreparedLaunch(launch, batch, [owners[row.param] for row in batch.rows])
            if one.signature is None:
                return None
            prepared.append(one)
    return Prepared(group, prepared, shards, own, watch(state, own))


class Repeats:
    """The prepared steps of an optimizer, by the index of their group."""

    def __init__(self) -> None:
        self.prepared: dict[int, Prepared] = {}
        self.state_objects: list[Any] = []  # keys and values of the optimizer's state back then

    def ready(
        self, groups: list[Group], state: MutableMapping[Tensor, Any]
    ) -> dict[int, tuple[Prepared, list[Any]]]:
        """Those that can be repeated now, with their tables: nothing may happen before they run."""
        if not tensors.same_objects([*state, *state.values()], self.state_objects):
            self.prepared = {}
        ready = {}
        for index, prepared in self.prepared.items():
            if index < len(groups):
                tables = prepared.tables(groups[index])
                if tables is not None:
                    ready[index] = prepared, tables
        self.prepared = {index: prepared for index, (prepared, _) in ready.items()}
        return ready

    def keep(self, steps: dict[int, Prepared | None], state: MutableMapping[Tensor, Any]) -> None:
        """Keep the steps of these groups; None for a step that cannot be repeated."""
        for index, prepared in steps.items():
            if prepared is not None:
                self.prepared[index] = prepared
        self.state_objects = [*state, *state.values()]
