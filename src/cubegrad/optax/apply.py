"""`apply_gradients`: a step that returns the new parameters, and so can write them in place."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax import Array
from jax.sharding import NamedSharding, Sharding

Tree = Any


class Written:
    """A new parameter in the place of an update.

    It has none of an array's attributes, so a transformation that comes after ours and would change
    the update raises an error.
    """

    def __init__(self, param: Array) -> None:
        self.param = param


class Place(NamedTuple):
    """Where a parameter lies."""

    sharding: NamedSharding | None = None  # None: on one device


class Request:
    """Passed through other transformations to ours, as optax passes extra arguments."""

    def __init__(self, shardings: Mapping[int, Sharding]) -> None:
        self.shardings = shardings  # by the id of the parameter
        self.answered = False

    def place(self, param: Any) -> Place | None:
        """None if it is not known: what XLA splits over devices, it would gather for a kernel.

        Inside `jit` only the caller knows, and inside `shard_map` an array is a shard.
        """
        sharding = self.shardings.get(id(param))
        if sharding is None and not isinstance(param, jax.core.Tracer):
            sharding = getattr(param, "sharding", None)
        if sharding is None:
            alone = jax.device_count() == 1
            return Place() if alone or _is_shard() else None
        if len(sharding.device_set) == 1:
            return Place()
        return Place(sharding) if isinstance(sharding, NamedSharding) else None


def _is_shard() -> bool:
    return getattr(jax.sharding.get_abstract_mesh(), "are_all_axes_manual", False)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Tree,
    state: Tree,
    params: Tree,
    *,
    kernel: bool = False,
    shardings: Tree | None = None,
    **extra_args: Any,
) -> tuple[Tree, Tree]:
    """One step: the new parameters and the new state.

    It is `tx.update` and `optax.apply_updates`, and works with any optax transformation. With
    kernel=True an NVIDIA GPU takes a step of ours in one pass over each large parameter, and with
    donated arguments in place (docs/jax.md). Where that is not possible, the step is the same as
    with kernel=False.

    Args:
        tx: ours, alone or in `optax.chain`, `masked`, `partition` or `inject_hyperparams`. A kernel
            is used if no other transformation changes the update that ours returns.
        grads: the gradients.
        state: what `tx.init` or the last step returned.
        params: the parameters.
        kernel: use kernels where they can be used. They have no derivatives.
        shardings: how parameters are sharded, as in `jax.tree.map(lambda p: p.sharding, params)`.
            Needed for kernels inside `jit` where there is more than one device.
        **extra_args: for transformations that take more, such as `value`.
    """
    tx = optax.with_extra_args_support(tx)
    if kernel:
        treedef: Any
        leaves, treedef = jax.tree.flatten(params)
        known = [] if shardings is None else treedef.flatten_up_to(shardings)
        request = Request({id(p): s for p, s in zip(leaves, known, strict=False)})
        try:
            updates, new_state = tx.update(grads, state, params, write=request, **extra_args)
        except Exception:
            if not request.answered:
                raise
        else:
            return _applied(params, updates), new_state
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def _applied(params: Tree, updates: Tree) -> Tree:
    def applied(param: Any, update: Any) -> Any:
        if isinstance(update, Written):
            return update.param
        return optax.apply_updates(param, update)

    return jax.tree.map(applied, params, updates, is_leaf=lambda leaf: leaf is None)
