"""learning_rate="auto": the numbers it keeps, and how a step updates them."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from cubegrad import distance, rule
from cubegrad.optax import xla
from cubegrad.optax.layout import OFFSET, SUMS, compute_dtype, real_parts
from cubegrad.optax.xla import Sums
from cubegrad.options import Hyper
from cubegrad.rule import Rule

Tree = Any


class Distance(NamedTuple):
    """Of MADGRADW, for all parameters together, before step k; the rate is the distance."""

    distance: Array  # D_k; 0 before the first gradient
    agreement: Array  # Σ_{j<k} γ_j ⟨g_j, x_0 - x_j⟩ / Σ√ν over the parameters that do not decay
    decaying: Array  # the same over those that do: decoupled decay shrinks it


class Estimate(NamedTuple):
    """Of MADGRAD, for all parameters together, before step k."""

    distance: Array  # D_k
    agreement: Array  # Σ_{j<k} λ_j ⟨g_j, x_0 - x_j⟩ over the parameters that do not decay
    decaying: Array  # the same over those that do: decoupled decay shrinks it
    gradient_scale: Array  # H_k^{2/3}, a mean over coordinates; 0 before the first gradient
    weight_sum: Array  # Σ_{j<k} w_j λ_j
    uncounted: Array  # the share of the steps that does not count
    root_mean: Array  # ∛ν_k, a mean over coordinates


AnyEstimate = Distance | Estimate
KINDS = (Distance, Estimate)


def kind_of(state_type: Any) -> Any:
    """The type of estimate that a type of state has."""
    return state_type.__annotations__["estimate"]


def initial_estimate(kind: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(float)
    # One buffer for each number: the same one cannot be donated twice.
    return kind(*(jnp.zeros([], dtype) for _ in kind._fields))


def find(state: Tree) -> list[AnyEstimate]:
    """The estimates in a tree, with plain arrays.

    flax nnx puts each number into a variable, a node with one leaf, and makes a mapping of a named
    tuple when it takes a state out of an object.
    """
    nodes = jax.tree.leaves(state, is_leaf=_is_estimate)
    found = [_as_tuple(node) for node in nodes if _is_estimate(node)]
    return [type(estimate)(*jax.tree.leaves(estimate)) for estimate in found]


def _is_estimate(node: Any) -> bool:
    return isinstance(node, KINDS) or _kind_of_mapping(node) is not None


def _kind_of_mapping(node: Any) -> Any:
    if not isinstance(node, Mapping):
        return None
    return next((kind for kind in KINDS if set(node) == set(kind._fields)), None)


def _as_tuple(node: Any) -> Any:
    return node if isinstance(node, KINDS) else _kind_of_mapping(node)(**node)


def has_started(estimate: AnyEstimate) -> Array:
    """Whether there has been a gradient to start from: finite, and not 0 everywhere."""
    if isinstance(estimate, Distance):
        return estimate.distance > 0
    return estimate.gradient_scale > 0


def learning_rate(estimate: AnyEstimate) -> Array:
    """γ of the next step, without lr_factor; 0 before the first gradient."""
    if isinstance(estimate, Distance):
        return estimate.distance
    started = has_started(estimate)
    scale = jnp.where(started, estimate.gradient_scale, 1.0)
    rate = distance.learning_rate(rule.MADGRAD, estimate.distance, scale)
    rate = rate * jnp.sqrt(1 - estimate.uncounted)
    return jnp.where(started, rate, 0.0)


def coordinates(params: Tree) -> int:
    """The number of real coordinates; 1 for an empty tree, so that its means are 0."""
    sizes = (jnp.size(p) * (2 if jnp.iscomplexobj(p) else 1) for p in jax.tree.leaves(params))
    return max(sum(sizes), 1)


def start(estimate: Any, leaves: list[tuple[Hyper, Array, Array]], coordinates: int) -> Any:
    """Set D_0 and the gradient scale from the first gradient; later estimates are left alone.

    `leaves` are each parameter's numbers, value and gradient. They are read in the first step only.
    """
    has_scale, dtype = isinstance(estimate, Estimate), estimate.distance.dtype
    current = estimate.distance, estimate.gradient_scale if has_scale else jnp.zeros([], dtype)
    started = lax.cond(
        has_started(estimate), lambda: current, lambda: _first(dtype, leaves, coordinates)
    )
    estimate = estimate._replace(distance=started[0])
    return estimate._replace(gradient_scale=started[1]) if has_scale else estimate


def _first(
    dtype: Any, leaves: list[tuple[Hyper, Array, Array]], coordinates: int
) -> tuple[Array, Array]:
    """D_0 and H_0^{2/3}; both 0 if no gradient is other than 0, or one is not finite."""
    rows: list[tuple[Hyper, Array, Array]] = []
    for h, param, grad in leaves:
        arrays = {"param": param, "grad": grad}
        arrays = {name: array.astype(compute_dtype(param)) for name, array in arrays.items()}
        rows += [(h, p["param"], p["grad"]) for p in real_parts(arrays) if param.size]
    zero = jnp.zeros([], dtype)
    # Squares could overflow, so weights are taken relative to the largest that has a gradient.
    sizes = [jnp.max(jnp.abs(_with_gradient(*row))).astype(dtype) for row in rows]
    unit = jnp.max(jnp.stack([*sizes, zero]))
    unit = jnp.where((unit > 0) & (unit < jnp.inf), unit, 1.0)
    totals = [zero, zero, zero]
    for h, x, g in rows:
        sums = xla.sums(partial(_first_sums, h), x, g, jnp.broadcast_to(unit, x.shape))
        totals = [total + new.astype(dtype) for total, new in zip(totals, sums, strict=True)]
    scale, squares, number = totals
    size = unit * jnp.sqrt(squares / jnp.maximum(number, 1.0))
    usable = jnp.isfinite(scale) & (scale > 0)
    first_distance = jnp.where(usable, distance.first_distance(xla, size), 0.0).astype(dtype)
    return first_distance, jnp.where(usable, scale / coordinates, 0.0)


def _first_sums(h: Hyper, xp: Any, param: Array, grad: Array, unit: Array) -> Sums:
    """Σ H_i^{2/3}; of the weights with a gradient, the sum of squares and the number."""
    scales = distance.first_scales(xp, rule.effective_gradient(h, param, grad))
    weights = _with_gradient(h, param, grad) / unit.astype(param.dtype)
    return xp.total(scales), xp.total(weights * weights), xp.total(jnp.sign(scales))


def _with_gradient(h: Hyper, param: Array, grad: Array) -> Array:
    """The weights that have a gradient, 0 for the others: those say nothing about the distance."""
    return jnp.where(rule.effective_gradient(h, param, grad) != 0, param, 0.0)


def step_sums(
    rule: Rule, h: Hyper, step: Array, old: dict[str, Array], new: dict[str, Array]
) -> Sums:
    """distance.step_sums, from a parameter's arrays before and after its step."""

    def sums(xp: Any, *arrays: Any) -> Sums:
        return distance.step_sums(xp, rule, h, step, *arrays)

    def at_once(*arrays: Any) -> Sums:
        return xla.finite_totals(*sums(xla.ALL_TERMS, *arrays))

    before = {name: array for name, array in old.items() if name not in ("param", "grad")}
    names = SUMS if rule.pulls else ("grad_sq_sum", OFFSET, "initial_param")
    after = new["param"], {name: new[name] for name in names}
    return xla.sums(sums, old["param"], old["grad"], before, *after, elsewhere=at_once)


def stored_sums(h: Hyper, step: Array, old: dict[str, Array], new: dict[str, Array]) -> Sums:
    """s and ν after a parameter's step, as they are to be stored.

    On a GPU they are computed once more, apart from those that x and `step_sums` are made of. Else
    XLA stores ν first and loads it again, to compute x from it.
    """

    def again(old: dict[str, Array], _: Any) -> Sums:
        grad = jnp.where(h.lr < -jnp.inf, 0.0, old["grad"])  # the same, but XLA does not know that
        _, stored = rule.step(xla, rule.MADGRAD, h, step, old["param"], grad, old)
        return tuple(stored[name] for name in SUMS)

    computed = tuple(new[name] for name in SUMS)
    return lax.platform_dependent(old, computed, cpu=lambda _, new: new, default=again)  # type: ignore[no-any-return]


def advance(
    estimate: Any,
    h: Hyper,
    count: Array,
    sums: Iterable[tuple[bool, Sums]],
    coordinates: int,
) -> AnyEstimate:
    """The estimate after step `count`.

    `sums` are those of each parameter (`step_sums`), and whether it decays.
    """
    zero = jnp.zeros_like(estimate.distance)
    newest, product, root_sum = {False: zero, True: zero}, zero, zero
    for decays, (agreed, its_product, its_root_sum) in sums:
        newest[decays] = newest[decays] + agreed
        product, root_sum = product + its_product, root_sum + its_root_sum
    if isinstance(estimate, Distance):
        return _advance_distance(estimate, h, newest, product, root_sum)
    no_decay = h._replace(shrink=None)
    agreement = distance.agreement(xla, no_decay, estimate.agreement, newest[False])
    decaying = distance.agreement(xla, h, estimate.decaying, newest[True])
    step = count.astype(h.lr.dtype)
    weight = rule.step_weight(rule.MADGRAD, h.lr, step)
    old_root, root = estimate.root_mean, root_sum / coordinates
    old_sum, weight_sum = estimate.weight_sum, estimate.weight_sum + weight
    pairs = (old_root, old_sum), (old_root, weight_sum), (root, weight_sum)
    scales = distance.scales(xla, *(([mean], [total]) for mean, total in pairs))
    share, uncounted = distance.share_counted(xla, step, estimate.uncounted, *scales)
    weight_sum = old_sum + share * weight
    (scale,) = distance.scales(xla, ([root], [weight_sum]))
    new = Estimate(
        distance.lower_bound(xla, estimate.distance, agreement + decaying, product, root_sum),
        agreement,
        decaying,
        # At 0 the estimate would start again, so sums that overflow or underflow are not used. Nor
        # is there a scale while a schedule of lr_factor starts at 0.
        jnp.where((scale > 0) & (scale < jnp.inf), scale, estimate.gradient_scale),
        weight_sum,
        uncounted,
        root,
    )
    return Estimate(*(jnp.asarray(number, zero.dtype) for number in new))


def _advance_distance(
    estimate: Distance, h: Hyper, newest: dict[bool, Array], product: Array, root_sum: Array
) -> Distance:
    """As distance.py has it for two groups: the parameters that do not decay, and those that do."""
    zero = jnp.zeros_like(product)
    sums = [(newest[False], product, root_sum), (newest[True], zero, zero)]
    hypers = (h._replace(shrink=None), h)
    rows = [
        (estimate.distance, agreement, 0.0, 0.0, 0.0, 0.0, 0.0)
        for agreement in (estimate.agreement, estimate.decaying)
    ]
    one, other = distance.advance(xla, rule.MADGRADW_AUTO, rows, sums, (), (), hypers)
    new = Distance(one[0], one[1], other[1])
    return Distance(*(jnp.asarray(number, zero.dtype) for number in new))
