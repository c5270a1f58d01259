"""What `madgrad(learning_rate="auto")` estimates its learning rate from: five numbers."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from cubegrad import distance as distances
from cubegrad import rule
from cubegrad.optax import xla
from cubegrad.options import Hyper

Tree = Any


class Estimate(NamedTuple):
    """For all parameters together, as they are before step k."""

    distance: Array  # D_k
    agreement: Array  # Σ_{j<k} λ_j ⟨g_j, x_0 - x_j⟩ of what does not decay
    decaying: Array  # and of what does: decoupled decay shrinks it
    gradient_scale: Array  # H_k^{2/3}, a mean over coordinates; 0 before the first gradient
    weight_sum: Array  # Σ_{j<k} λ_j


def wide(param: Array) -> Any:
    """What is computed in: at least float32, since ν of a float16 gradient of 300 overflows."""
    return jnp.promote_types(param.dtype, jnp.float32)


def parts(array: Array) -> tuple[Array, ...]:
    """The real coordinates: a complex number is two."""
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def nothing_yet() -> Estimate:
    """Before the first gradient."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    return Estimate(*(jnp.zeros([], dtype) for _ in Estimate._fields))  # apart, to be donated


def coordinates(params: Tree) -> int:
    """How many real ones there are; 1 if there are none, so that a mean of none is 0."""
    sizes = (jnp.size(p) * (2 if jnp.iscomplexobj(p) else 1) for p in jax.tree.leaves(params))
    return max(sum(sizes), 1)


def begun(
    estimate: Estimate, leaves: list[tuple[Hyper, ArrayLike, ArrayLike]], size: int
) -> Estimate:
    """With D_0 and the scale of the first gradient, if there was none before.

    `leaves` are each parameter's numbers, value and gradient. Only then are they looked at: a step
    needs the gradients once, and this before it. A gradient that is not finite begins nothing.
    """
    so_far = (estimate.distance, estimate.gradient_scale)
    found = lax.cond(so_far[1] > 0, lambda: so_far, lambda: _first(so_far[0].dtype, leaves, size))
    return estimate._replace(distance=found[0], gradient_scale=found[1])


def _first(
    dtype: Any, leaves: list[tuple[Hyper, ArrayLike, ArrayLike]], size: int
) -> tuple[Array, Array]:
    """D_0 and H_0^{2/3}."""
    rows: list[tuple[Hyper, Array, Array]] = []
    for h, param, grad in leaves:
        real = wide(jnp.asarray(param))
        both = (parts(jnp.asarray(value).astype(real)) for value in (param, grad))
        rows += [(h, x, g) for x, g in zip(*both, strict=True) if x.size]
    zero = jnp.zeros([], dtype)
    # Relative to the largest weight that has a gradient, since squares could overflow.
    sizes = [jnp.max(jnp.abs(_moved(*row))).astype(dtype) for row in rows]
    unit = jnp.max(jnp.stack([*sizes, zero]))
    unit = jnp.where((unit > 0) & (unit < jnp.inf), unit, 1.0)
    sums = [zero, zero, zero]
    for h, x, g in rows:
        told = xla.sums(partial(_first_sums, h), x, g, jnp.broadcast_to(unit, x.shape))
        sums = [so_far + newest.astype(dtype) for so_far, newest in zip(sums, told, strict=True)]
    scale, square, moved = sums
    distance = distances.first_distance(xla, unit * jnp.sqrt(square / jnp.maximum(moved, 1.0)))
    known = jnp.isfinite(scale) & (scale > 0)
    return jnp.where(known, distance, 0.0).astype(dtype), jnp.where(known, scale / size, 0.0)


def _moved(h: Hyper, param: Array, grad: Array) -> Array:
    """The weights that have a gradient; the others say nothing about a distance."""
    return jnp.where(rule.effective_gradient(h, param, grad) != 0, param, 0.0)


def _first_sums(
    h: Hyper, xp: Any, param: Array, grad: Array, unit: Array
) -> tuple[Array, Array, Array]:
    scales = distances.first_scales(xp, rule.effective_gradient(h, param, grad))
    weights = _moved(h, param, grad) / unit.astype(param.dtype)
    return xp.total(scales), xp.total(weights * weights), xp.total(jnp.sign(scales))


def sums(
    numbers: tuple[Hyper, Array], old: tuple[Array, ...], new: tuple[Array, ...]
) -> tuple[Array, ...]:
    """distance.step_sums; `old` are x_k, g_k and the buffers, `new` the buffers after the step."""

    def told(xp: Any, param: Array, grad: Array, *arrays: Array) -> tuple[Array, ...]:
        before, after, start = arrays[:2], arrays[2:4], arrays[4:]
        return distances.step_sums(xp, *numbers, param, grad, before, after, *start)

    return xla.sums(told, *old[:4], *new[:2], *old[4:])


def rate(estimate: Estimate) -> Array:
    """γ of the next step, without a schedule's factor; 0 as long as there was no gradient."""
    scale = estimate.gradient_scale
    known = scale > 0
    gamma = distances.learning_rate(estimate.distance, jnp.where(known, scale, 1.0))
    return jnp.where(known, gamma, 0.0)


def after(
    estimate: Estimate,
    h: Hyper,
    weight: Array,
    told: Iterable[tuple[bool, tuple[Array, ...]]],
    size: int,
) -> Estimate:
    """After a step of weight λ_k over `size` coordinates.

    `told` are the sums (distance.step_sums) of each parameter, and whether it decays.
    """
    zero = jnp.zeros_like(estimate.distance)
    newest, product, roots = [zero, zero], zero, zero
    for decays, (agreed, its_product, its_roots) in told:
        newest[decays] = newest[decays] + agreed
        product, roots = product + its_product, roots + its_roots
    agreement = distances.agreement(xla, h._replace(shrink=None), estimate.agreement, newest[False])
    decaying = distances.agreement(xla, h, estimate.decaying, newest[True])
    weight_sum = estimate.weight_sum + weight
    weighed = weight_sum > 0  # not while a schedule starts at 0
    scale = distances.gradient_scale(roots / size, jnp.where(weighed, weight_sum, 1.0))
    new = Estimate(
        distances.lower_bound(xla, estimate.distance, agreement + decaying, product, roots),
        agreement,
        decaying,
        # Kept where the sums have overflowed or underflowed: at 0 the estimate would begin again.
        jnp.where(weighed & (scale > 0) & (scale < jnp.inf), scale, estimate.gradient_scale),
        weight_sum,
    )
    return Estimate(*(v.astype(old.dtype) for v, old in zip(new, estimate, strict=True)))
