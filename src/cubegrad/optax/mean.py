"""`madgradw(schedule_free=True)`: the three numbers it keeps, and x, the mean of all z.

The weights of the mean are the squares of the largest learning rate so far. Their sum is kept in
units of the newest: it then counts the steps of a constant rate, exactly. A float32 sum of the
squares themselves is 2 % off after 2,000,000 steps of 1e-3, and the square of 1e-23 is 0 there.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import keystr, tree_leaves_with_path

from cubegrad.optax import codes, xla
from cubegrad.optax.layout import compute_dtype
from cubegrad.options import Hyper

Tree = Any

NUMBERS = ("largest_lr", "weight_sum", "momentum")


def numbers(*values: Any) -> dict[str, Array]:
    """The fields of a state. One buffer for each: the same one cannot be donated twice."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    return {name: jnp.asarray(x, dtype) for name, x in zip(NUMBERS, values, strict=True)}


def advance(state: Any, h: Hyper) -> tuple[Hyper, dict[str, Array]]:
    """The numbers of a step with the share of z_{k+1} in x_{k+1}, and those of the state after it.

    The share is 0 as long as the learning rate has been 0.
    """
    largest = jnp.maximum(state.largest_lr, h.lr)
    older = state.weight_sum * xla.quotient(state.largest_lr, largest) ** 2
    weight_sum = jnp.where(largest > 0, older + 1.0, 0.0)
    share = xla.quotient(jnp.ones_like(weight_sum), weight_sum)
    # The same number, unless momentum was another; a constant would not be donated.
    momentum = jnp.where(state.momentum == h.momentum, state.momentum, h.momentum)
    new = dict(zip(NUMBERS, (largest, weight_sum, momentum), strict=True))
    kept = {name: jnp.asarray(x, getattr(state, name).dtype) for name, x in new.items()}
    return h._replace(mean_share=share), kept


class Found(NamedTuple):
    """A state's buffers by the path of their parameter, and its momentum."""

    momentum: Array
    dual_offset: dict[str, Array]
    offset_code: dict[str, Array]
    offset_scale: dict[str, Array]

    def paths(self) -> set[str]:
        return {*self.dual_offset, *self.offset_code}

    def mean(self, path: str, y: Array) -> Array:
        """x = y + (1 - 1/β) (z - y), in the dtype of y."""
        part = (self.momentum - 1) / self.momentum
        if path in self.offset_code:
            offset = codes.offset(y, self.offset_code[path], self.offset_scale[path])
        else:
            offset = self.dual_offset[path]
        dtype = compute_dtype(y, offset)
        move = offset.astype(dtype) * part.astype(jnp.finfo(dtype).dtype)
        mean: Array = (y.astype(dtype) + move).astype(y.dtype)
        return mean


def find(state: Tree) -> list[Found]:
    """The states of schedule-free transformations in a tree.

    Paths are compared instead of trees: a parameter may be masked, and flax nnx puts each array
    into a variable, of another class in a state than in a model.
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_ours)
    return [_found(node) for node in nodes if _is_ours(node)]


def _is_ours(node: Any) -> bool:
    fields = node if isinstance(node, Mapping) else getattr(node, "_fields", ())
    return {*NUMBERS, "dual_offset"} <= set(fields)


def _found(node: Any) -> Found:
    fields = node if isinstance(node, Mapping) else node._asdict()
    (momentum,) = jax.tree.leaves(fields["momentum"])
    trees = (by_path(fields.get(name)) for name in Found._fields[1:])
    return Found(jnp.asarray(momentum), *trees)


def by_path(tree: Tree) -> dict[str, Any]:
    return {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def averaged(state: Tree, params: Tree) -> Tree:
    """As `cubegrad.optax.averaged_params`."""
    states, leaves = find(state), by_path(params)
    owners = {path: own for own in states for path in own.paths()}
    _check(states, owners, leaves)
    means = (
        owners[path].mean(path, jnp.asarray(leaf)) if path in owners else leaf
        for path, leaf in leaves.items()
    )
    return jax.tree.unflatten(jax.tree.structure(params), means)


def _check(states: list[Found], owners: dict[str, Found], leaves: dict[str, Any]) -> None:
    """Refuse a state without means, and one of other parameters."""
    if not states:
        raise ValueError(
            "the state has no mean of the weights; pass what init() or update() of "
            "madgradw(schedule_free=True) returned, and a plain tuple that was restored of it as "
            "ScheduleFreeMadgradwState(*state)"
        )
    if sum(len(own.paths()) for own in states) > len(owners):
        raise ValueError(
            f"the state has {len(states)} means of the same parameters and must have 1; pass the "
            "state of one optimizer"
        )
    if any(own.momentum.ndim for own in states):
        raise ValueError(
            f"the state's momentum has shape {states[0].momentum.shape}, and must have (); after "
            "vmap use jax.vmap(averaged_params)(state, params)"
        )
    for path, own in owners.items():
        if path not in leaves:
            raise ValueError(
                f"the state has the mean of params{path}, which params lack; pass the params that "
                "init() was given, as a tree with the same names. A wrapper that changes the tree, "
                "such as optax.flatten, needs them as it made them"
            )
        shape = jnp.shape(leaves[path])
        found = jnp.shape(own.dual_offset.get(path, leaves[path]))
        if found != shape:
            raise ValueError(
                f"the state's dual_offset of params{path} has shape {found}, and must have {shape};"
                " pass params and state of one model"
            )
