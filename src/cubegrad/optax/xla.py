"""The rule's elementary functions for JAX, right in what XLA's compilers do to them."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import Array, lax

# By the bytes of a number: integers of its size, what a third of its bits lacks to be nearly the
# bits of its cube root, and the Newton steps from there to the last bit.
ROOTS = {4: (jnp.int32, 709_958_130, 3), 8: (jnp.int64, 715_094_163 << 32, 4)}


def newton_cbrt(x: Array) -> Array:
    """∛x for x >= 0 in operations that XLA vectorises on a CPU; 0 below the normal numbers.

    There `jnp.cbrt` calls a function for every number: a step of 16.8M parameters takes 210 ms in
    optax.contrib.madgrad, which uses it, and 26 ms in ours (docs/jax.md). XLA's arithmetic on a
    CPU takes subnormal numbers for 0.
    """
    integer, third, steps = ROOTS[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, integer)
    y = lax.bitcast_convert_type(lax.div(bits, integer(3)) + third, x.dtype)
    for _ in range(steps):
        y = y - (y - x / (y * y)) / 3
    return jnp.where(x < jnp.finfo(x.dtype).tiny, 0.0, jnp.where(jnp.isinf(x), x, y))


def _inverse(x: Array) -> Array:
    return jnp.where(_uninvertible(x), 0.0, 1 / x)


def _uninvertible(x: Array) -> Array:
    """Where 1/x is not finite, for x >= 0."""
    return jnp.less_equal(x, jnp.finfo(x.dtype).tiny / 4)


@jax.custom_jvp
def cbrt(x: Array) -> Array:
    """∛x for x >= 0, with derivative 0 at 0.

    The true one is infinite there and would meet a zero from g² as ∞·0 = NaN. Taken as 0 it leaves
    the true derivative of the step, λ/ε, when ε > 0.
    """
    return lax.platform_dependent(x, cpu=newton_cbrt, default=jnp.cbrt)  # type: ignore[no-any-return]


@cbrt.defjvp
def _cbrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = cbrt(x)
    return y, dx * _inverse(3 * y * y)


@jax.custom_jvp
def sqrt(x: Array) -> Array:
    """√x for x >= 0, with derivative 0 at 0, as `cbrt` has it."""
    return jnp.sqrt(x)


@sqrt.defjvp
def _sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = sqrt(x)
    return y, dx * _inverse(2 * y)


@jax.custom_jvp
def quotient(numerator: Array, denominator: Array) -> Array:
    """n/d, or 0 where 1/d is not finite; never a negative zero.

    Not n·(1/d): XLA fuses a product with the subtraction that follows it, rounding once, and then
    the difference of two equal displacements is not 0 but a rounding error, at every step the same
    one. And XLA takes away the `+ 0.0` by which the rule gets rid of negative zeros.
    """
    ratio = jnp.where(_uninvertible(denominator), 0.0, numerator / denominator)
    return jnp.where(ratio == 0, 0.0, ratio)


@quotient.defjvp
def _quotient_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (numerator, denominator), (dn, dd) = primals, tangents
    ratio = quotient(numerator, denominator)
    return ratio, (dn - ratio * dd) * _inverse(denominator)


def total(x: Array) -> Array:
    """The sum of all elements, in at least float32.

    XLA adds in blocks: of 1e8 float32 numbers in [0, 1) on a CPU the sum was right to 1e-8.
    """
    return jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))


def larger(a: Array, b: Array) -> Array:
    """The larger of two numbers; the other one if one is NaN."""
    return jnp.fmax(a, b)


def where_finite(x: Array, value: Array) -> Array:
    return jnp.where(jnp.isfinite(x), value, 0.0)


where = jnp.where

CHUNK = 2**17  # numbers; a few chunks fit into a core's cache
NOW = SimpleNamespace(cbrt=cbrt, quotient=quotient, where_finite=where_finite, total=total)
LATER = SimpleNamespace(**vars(NOW) | {"total": lambda terms: terms})


def sums(function: Callable[..., tuple[Array, ...]], *arrays: Array) -> tuple[Array, ...]:
    """function(xp, *arrays), arrays of one shape, where all that it returns are totals over them.

    On a CPU their terms are added chunk upon chunk. Left to itself XLA stores all terms before it
    adds them, and to find fresh memory for that takes longer than a step of MADGRAD. With several
    CPU devices the arrays may be sharded, and cutting would gather them.
    """
    plain = partial(function, NOW)
    sharded = jax.default_backend() == "cpu" and jax.device_count() > 1
    if sharded or not 2 * CHUNK <= arrays[0].size < 2**31:  # an index is an int32
        return plain(*arrays)

    def by_chunks(*arrays: Array) -> tuple[Array, ...]:
        flat = [array.ravel() for array in arrays]
        whole = flat[0].size // CHUNK
        left_over = plain(*(array[whole * CHUNK :] for array in flat))

        def add(i: Array, so_far: list[Array]) -> list[Array]:
            chunks = (lax.dynamic_slice(array, (i * CHUNK,), (CHUNK,)) for array in flat)
            return [a + b for a, b in zip(so_far, function(LATER, *chunks), strict=True)]

        zeros = [jnp.zeros(CHUNK, value.dtype) for value in left_over]
        added = lax.fori_loop(0, whole, add, zeros)
        return tuple(a + total(b) for a, b in zip(left_over, added, strict=True))

    chosen: tuple[Array, ...] = lax.platform_dependent(*arrays, cpu=by_chunks, default=plain)
    return chosen


def not_before(number: Array, new: Array, old: Array) -> Array:
    """`new`, on a CPU not before `number` is known.

    `old` was read for it and may lie where `new` is written: left to itself XLA copies it first.
    """

    def wait(number: Array, new: Array, old: Array) -> Array:
        return jnp.where(number < -jnp.inf, old, new)  # never so, which XLA does not see

    return lax.platform_dependent(number, new, old, cpu=wait, default=lambda _, new, __: new)  # type: ignore[no-any-return]
