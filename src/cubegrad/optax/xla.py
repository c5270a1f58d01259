"""The elementary functions of rule.py and distance.py for JAX, safe under XLA's optimizations."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Sums = tuple[Array, ...]

# For each float size in bytes: the integer type of that size, the constant that turns a third of a
# number's bits into about those of its cube root, and the Newton steps to the last bit from there.
ROOTS = {4: (jnp.int32, 709_958_130, 3), 8: (jnp.int64, 715_094_163 << 32, 4)}


def newton_cbrt(x: Array) -> Array:
    """∛x for x >= 0 in operations that XLA vectorises on a CPU; 0 for subnormal numbers.

    On a CPU `jnp.cbrt` is a function call for every number: a step of 16.8M parameters takes 210 ms
    in optax.contrib.madgrad, which uses it, and 26 ms in ours (docs/jax.md). XLA's arithmetic on a
    CPU flushes subnormal numbers to 0.
    """
    integer, offset, steps = ROOTS[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, integer)
    y = lax.bitcast_convert_type(lax.div(bits, integer(3)) + offset, x.dtype)
    for _ in range(steps):
        y = _newton_step(x, y)
    return _with_ends(x, y)


def cuda_cbrt(x: Array) -> Array:
    """`newton_cbrt` with one division and no integer division, from Newton steps to 1/∛x.

    XLA decides by its own table of costs whether a kernel for a GPU computes a number or loads it.
    There `jnp.cbrt` costs so much that XLA stores the cube roots for the sums of
    learning_rate="auto": 44 bytes moved for a float32 parameter without momentum instead of 28.
    """
    integer, offset, steps = ROOTS[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, integer).astype(x.dtype)
    inverse = lax.bitcast_convert_type((2.0 * offset - bits / 3).astype(integer), x.dtype)
    for _ in range(steps - 1):
        inverse = inverse + inverse * (1 - x * inverse * inverse * inverse) / 3
    return _with_ends(x, _newton_step(x, x * inverse * inverse))


def _newton_step(x: Array, y: Array) -> Array:
    return y - (y - x / (y * y)) / 3


def _with_ends(x: Array, root: Array) -> Array:
    """The cube root of x, where `root` is right for numbers that are neither tiny nor infinite."""
    return jnp.where(x < jnp.finfo(x.dtype).tiny, 0.0, jnp.where(x < jnp.inf, root, x))


def _inverse(x: Array) -> Array:
    return jnp.where(_uninvertible(x), 0.0, 1 / x)


def _uninvertible(x: Array) -> Array:
    """Where 1/x is not finite, for x >= 0."""
    return jnp.less_equal(x, jnp.finfo(x.dtype).tiny / 4)


@jax.custom_jvp
def cbrt(x: Array) -> Array:
    """∛x for x >= 0, with derivative 0 at 0.

    The true one is infinite there, and times the derivative 0 of g² it would be NaN. With 0
    instead the derivative of the step, λ/ε, is right for ε > 0.
    """
    return lax.platform_dependent(x, cpu=newton_cbrt, cuda=cuda_cbrt, default=jnp.cbrt)  # type: ignore[no-any-return]


@cbrt.defjvp
def _cbrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = cbrt(x)
    return y, dx * _inverse(3 * y * y)


def nearest(x: Array, dtype: str) -> Array:
    """The nearest number of half precision, still as float32.

    Within a program XLA leaves out a conversion to half precision and back, which would round.
    """
    if dtype == "bfloat16":
        return lax.reduce_precision(x, 8, 7)
    # Below 2^-14 the last place is 2^-24, whatever the exponent; XLA would make 0 of these.
    subnormal = jnp.round(x * 2.0**24) * 2.0**-24
    return jnp.where(abs(x) < 2.0**-14, subnormal, lax.reduce_precision(x, 5, 10))


@jax.custom_jvp
def sqrt(x: Array) -> Array:
    """√x for x >= 0, with derivative 0 at 0, like `cbrt`."""
    return jnp.sqrt(x)


@sqrt.defjvp
def _sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = sqrt(x)
    return y, dx * _inverse(2 * y)


@jax.custom_jvp
def quotient(numerator: Array, denominator: Array) -> Array:
    """n/d, or 0 where 1/d is not finite; never a negative zero.

    Not n·(1/d): XLA fuses a product and a subtraction into one rounding, and the difference of two
    equal displacements would then be a rounding error instead of 0, the same one at every step. And
    XLA removes the `+ 0.0` by which the rule turns negative zeros into 0.
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

    XLA adds in blocks: on a CPU the sum of 1e8 float32 numbers in [0, 1) had an error of 1e-8.
    """
    return jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))


def larger(a: Array, b: Array) -> Array:
    """The larger of two numbers; the other one if one is NaN."""
    return jnp.fmax(a, b)


def where_finite(x: Array, value: Array) -> Array:
    return jnp.where(jnp.isfinite(x), value, 0.0)


where = jnp.where
sign = jnp.sign


@jax.custom_jvp
def finite_totals(*terms: Array) -> Sums:
    """The sum of each term, over the coordinates where the last one is finite.

    One reduction, which tests for finiteness itself: only then does XLA on a GPU add the terms in
    the kernel that steps the parameter in place, so that a sum costs no memory traffic. With a
    reduction for each sum it would store the cube roots and copy the parameter: 56 bytes moved for
    a float32 parameter instead of 32.
    """

    def finite(numbers: Sums) -> list[Array]:
        return [where_finite(numbers[-1], number) for number in numbers]

    def add(a: Sums, b: Sums) -> Sums:
        return tuple(map(jnp.add, finite(a), finite(b)))

    zeros = tuple(jnp.zeros([], term.dtype) for term in terms)
    return tuple(lax.reduce(terms, zeros, add, range(terms[0].ndim)))


@finite_totals.defjvp
def _finite_totals_jvp(primals: Sums, tangents: Sums) -> tuple[Sums, Sums]:
    changes = tuple(total(where_finite(primals[-1], tangent)) for tangent in tangents)
    return finite_totals(*primals), changes


CHUNK = 2**17  # numbers; a few chunks fit into a core's cache
# What `sums` passes as xp: TOTALS.total adds the terms, TERMS.total returns them to be added later.
# ALL_TERMS returns them for `finite_totals`.
TOTALS = SimpleNamespace(
    cbrt=cbrt,
    sqrt=sqrt,
    quotient=quotient,
    smaller=jnp.minimum,
    where_finite=where_finite,
    total=total,
)
TERMS = SimpleNamespace(**vars(TOTALS) | {"total": lambda terms: terms})
ALL_TERMS = SimpleNamespace(**vars(TERMS) | {"where_finite": lambda _, terms: terms})
# What codec.py takes as xp.
CODEC = SimpleNamespace(
    **vars(TOTALS),
    sign=sign,
    where=jnp.where,
    isfinite=jnp.isfinite,
    round=jnp.round,
    bits=lambda x: lax.bitcast_convert_type(x, jnp.int32),
    from_bits=lambda x: lax.bitcast_convert_type(x, jnp.float32),
    float32=lambda codes: codes.astype(jnp.float32),
    int32=lambda codes: codes.astype(jnp.int32),
    largest=lambda x: jnp.max(x, axis=-1, keepdims=True),
)


def may_be_sharded_on_cpu() -> bool:
    return jax.default_backend() == "cpu" and jax.device_count() > 1


def sums(
    function: Callable[..., Sums], *arrays: Any, elsewhere: Callable[..., Sums] | None = None
) -> Sums:
    """function(xp, *arrays), for a function whose results are all computed by xp.total.

    The arrays have one shape; all but the first may be tuples of arrays, or None. On a CPU they are
    read chunk by chunk: on its own, XLA stores all terms before it adds them, and allocating the
    memory for that takes longer than a step of MADGRAD. With several CPU devices the arrays may be
    sharded, and slicing would gather them. Other devices run elsewhere(*arrays), if given, which
    must compute the same.
    """
    whole = partial(function, TOTALS)
    size = arrays[0].size
    if may_be_sharded_on_cpu() or not 2 * CHUNK <= size < 2**31:  # an index is an int32
        if elsewhere is None:
            return whole(*arrays)
        return lax.platform_dependent(*arrays, cpu=whole, default=elsewhere)  # type: ignore[no-any-return]

    def by_chunks(*arrays: Any) -> Sums:
        flat = jax.tree.map(lambda array: array.ravel(), arrays)
        chunks = size // CHUNK
        rest = whole(*jax.tree.map(lambda array: array[chunks * CHUNK :], flat))

        def add(i: Array, so_far: Sums) -> Sums:
            chunk = jax.tree.map(lambda a: lax.dynamic_slice(a, (i * CHUNK,), (CHUNK,)), flat)
            return tuple(a + b for a, b in zip(so_far, function(TERMS, *chunk), strict=True))

        added = lax.fori_loop(0, chunks, add, tuple(jnp.zeros(CHUNK, r.dtype) for r in rest))
        return tuple(a + total(b) for a, b in zip(rest, added, strict=True))

    return lax.platform_dependent(*arrays, cpu=by_chunks, default=elsewhere or whole)  # type: ignore[no-any-return]


def compute_after(number: Array, new: Array, old: Array) -> Array:
    """`new`, which on a CPU is computed only after `number`.

    `number` depends on `old`, whose memory `new` may be written to. Without this, XLA copies `old`.
    """

    def wait(number: Array, new: Array, old: Array) -> Array:
        return jnp.where(number < -jnp.inf, old, new)  # never true, but XLA does not know that

    return lax.platform_dependent(number, new, old, cpu=wait, default=lambda _, new, __: new)  # type: ignore[no-any-return]
