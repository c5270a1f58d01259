"""The state in few bits: what a code means, and a step from codes to codes.

The eager backend and the JAX twin run these functions; the Triton and C kernels restate them.

`xp` brings the functions that array libraries spell differently: `xp.bits(x)` are the int32 of the
same bits, `xp.from_bits(i)` the float32, `xp.float32(c)` and `xp.int32(c)` convert a code,
`xp.round(x)` rounds to the nearest integer, ties to even, `xp.largest(x)` is the largest number of
each block; the others are as usual, or as in rule.py and distance.py. Integers are int32 and wrap
around. The last axis of an array is a block, and a scale has an axis of one number there.

A code is rounded at random, up or down, so that its mean is the number: otherwise moves that are
smaller than a code would be lost for ever. The random bits are a function of the step and of the
coordinate's index in the whole parameter. So they are the same in a run that was resumed, on every
backend, and however the parameter is sharded, and no generator has a state to be kept.

A number that is not finite gets the code 0 and does not count for its block's scale.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from cubegrad import distance
from cubegrad.rule import Moved, Rule, shrunk, step_from_root

Array = Any
Scalar = Any
Hyper = Any
Namespace = Any

BLOCK = 256  # numbers that share a scale, at most; see `state.blocks`
# Below these a parameter keeps its sums: the scales would take more than a twentieth of the state,
# and the launch more time than the memory. Norms and biases, which a rounding error may hurt most,
# lie below them.
LEAST_SIZE = 4096
LEAST_ROW = 64
# A tensor of one dimension is one row. The longest norms and biases have less than 50,000 numbers;
# those that are longer are what a library has flattened.
LEAST_FLAT = 65536
DTYPES = frozenset({"float16", "bfloat16", "float32", "complex32", "complex64"})
LARGEST_OFFSET = 63  # int8 has another bit, which belongs to the root
LARGEST_INITIAL = 32767  # int16

ONE = 0x3F800000  # the bits of 1.0
EXPONENT = 0x7F800000
MANTISSA = 23
# A root keeps 3 bits of its exponent and 6 of its mantissa: what is cut off are 17 bits. The last
# one that is kept is the lowest bit of the offset's code; without momentum it is 0. With 4 bits of
# mantissa, fine-tuning lost 0.05 % of the loss. Rounding the offset and x_0 cost nothing that could
# be measured.
CUT = 17
BINADES = 7 << MANTISSA  # from the smallest root of a block to the largest
# Where the rounding error of z - x goes, by c = 1 - momentum: into x from this c on; see `share`.
LEAST_EXACT = 0.099


def row_length(shape: Sequence[int]) -> int:
    """A row is all that has one index in the first dimension; one dimension alone is one row."""
    return math.prod(shape[1:]) if len(shape) != 1 else shape[0]


def why_not_coded(dtype: str, shape: Sequence[int]) -> str | None:
    """What keeps a parameter's state from being in codes, for messages.

    A complex number counts as two: the shape then has a 2 at the end.
    """
    if dtype not in DTYPES:
        return dtype
    if len(shape) == 1 and shape[0] < LEAST_FLAT:
        return f"one dimension of less than {LEAST_FLAT:,}"
    if math.prod(shape) < LEAST_SIZE * (2 if dtype.startswith("complex") else 1):
        return f"less than {LEAST_SIZE:,} elements"
    length = row_length(shape)
    if length < LEAST_ROW:
        return f"rows of less than {LEAST_ROW}"
    if length >= 2**31 - BLOCK and length % BLOCK:  # a kernel counts them in int32
        return f"rows of 2^31 that are not a multiple of {BLOCK}"
    return None


def _shifted(x: Array, places: int) -> Array:
    """To the right, filled with zeros."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def mixed(x: Array) -> Array:
    """A hash of int32 to int32, one to one."""
    x = x * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * (0x846CA68B - 2**32)
    return x ^ _shifted(x, 16)


def random_bits(step: Array, index: Array) -> Array:
    """32 bits for each coordinate; `step` is k, `index` the coordinate's modulo 2^32."""
    return mixed(index + mixed(step))


# Odd, and such that in each part of the bits that rounds something, multiples of it lie evenly: all
# 256 of a block, and every 2nd, 3rd, 4th, 8th, 9th or 16th of them (tests/optim/test_compact_bits).
WEYL = 0x06099B33


def block_bits(step: Array, indices: Array) -> Array:
    """The same for coordinates with codes, whose indices are given in blocks.

    One hash a block: its coordinates get an arithmetic sequence from there, which spreads them more
    evenly than a hash for each would, at a fraction of the instructions.
    """
    first = indices[..., :1]
    return spread_bits(step, first, indices - first)


def spread_bits(step: Array, first: Array, place: Array) -> Array:
    """The same from the index of a block's first coordinate, and the places within the block."""
    return random_bits(step, first) + place * WEYL


def dither(xp: Namespace, bits: Array) -> Array:
    """The upper 13 bits as a number in (-1/2, 1/2), which rounds no integer to another one."""
    places = (_shifted(bits, 9) & 0x7FFC00) | 0x200
    return xp.from_bits(places | ONE) - 1.5


def encode_integers(
    xp: Namespace, values: Array, largest: int, dither: Array | float = 0.0
) -> tuple[Array, Array]:
    """Integers from -largest to largest, still as floats, and the scale."""
    values = xp.where(xp.isfinite(values), values, 0.0)
    # So much larger that rounding errors do not lead to a code beyond the largest.
    scale = xp.largest(abs(values)) * (1.000001 / largest)
    return xp.round(values * xp.quotient(1.0, scale) + dither), scale


def encode_roots(
    xp: Namespace,
    roots: Array,
    bits: Array | None,
    cleared: int = 0,
    least_scale: Array | float = 0.0,
) -> tuple[Array, Array]:
    """Codes of 9 bits, as int32, and the scale, a power of two.

    A code is a float without a sign: 3 bits of exponent, relative to the scale's, and 6 bits of
    mantissa, of which so many of the lowest are `cleared`. 0 means a root of 0. A root too small
    is clamped to the smallest nonzero code: it then moves in smaller steps, but is not taken for
    one that has had no gradient yet. Without `bits` roots are rounded to the nearest code. The
    scale is at least `least_scale`.
    """
    unit = 1 << (cleared + CUT)  # from one code to the next
    low = unit >> 1 if bits is None else bits & (unit - 1)
    roots = xp.where(xp.isfinite(roots), roots, 0.0)
    most = xp.bits(xp.largest(roots)) + (unit - 1)  # the largest may be rounded up
    scale = xp.from_bits(most & EXPONENT)
    scale = xp.where(scale > least_scale, scale, least_scale)
    codes = ((xp.bits(roots) + low - (xp.bits(scale) - BINADES)) & -unit) >> CUT
    return xp.where(roots > 0, xp.where(codes > 2, codes, 2), 0), scale


def decode_roots(xp: Namespace, codes: Array, scale: Array) -> Array:
    """`codes` as int32."""
    bits = (codes << CUT) + (xp.bits(scale) - BINADES)
    return xp.where(codes > 0, xp.from_bits(bits), 0.0)


def round_bfloat16(xp: Namespace, x: Array, bits: Array) -> Array:
    """x rounded at random to a number that bfloat16 has, still as float32."""
    low = _shifted(bits * (0x9E3779B1 - 2**32), 16)
    rounded = xp.from_bits((xp.bits(x) + low) & -0x10000)
    return xp.where(xp.isfinite(x), rounded, x)


def round_float16(xp: Namespace, x: Array, bits: Array) -> Array:
    """x rounded at random to a number that float16 has, still as float32."""
    bits = bits * (0x9E3779B1 - 2**32)
    normal = xp.from_bits((xp.bits(x) + _shifted(bits, 19)) & -0x2000)
    # Below 2^-14 the last place is 2^-24, whatever the exponent.
    fraction = xp.from_bits(ONE | (_shifted(bits, 9) & 0x7FF800) | 0x400) - 1.5
    subnormal = xp.round(x * 2.0**24 + fraction) * 2.0**-24
    rounded = xp.where(abs(x) < 2.0**-14, subnormal, normal)
    # Larger ones are rounded to nearest; a negative zero stays one.
    return xp.where((abs(x) < 65504.0) & (x != 0), rounded, x)


ROUND = {"bfloat16": round_bfloat16, "float16": round_float16}  # of a parameter, by its dtype


def round_param(
    xp: Namespace, dtype: str, x: Array, step: Array, index: Array, momentum: Scalar
) -> Array:
    """x of a parameter with sums, rounded at random as one with codes is, still as float32.

    Without momentum x is z, which the sums have: with the same bits at every step, x stays where it
    is while z does.
    """
    return ROUND[dtype](xp, x, random_bits(step * (momentum != 0), index))


class Codes(NamedTuple):
    """What is kept for a parameter; None where it is not."""

    offset: Array | None  # int8: z - x, needed for momentum only, and the root's lowest bit
    offset_scale: Array | None
    root: Array  # uint8: ∛ν, or √ν
    root_scale: Array
    initial: Array | None  # x_0 in int16, or in the dtype of half precision; if it is kept
    initial_scale: Array | None


class Values(NamedTuple):
    """What the codes stand for."""

    offset: Array | None
    root: Array
    initial: Array | None

    def away(self, xp: Namespace, param: Array) -> Array:
        """x_0 - x."""
        offset = 0.0 if self.offset is None else self.offset
        return xp.where(self.root == 0, offset, self.initial - param)


def unpacked(xp: Namespace, codes: Codes) -> tuple[Array | None, Array]:
    """The codes of the offset and of the root, as int32."""
    root = xp.int32(codes.root) << 1
    if codes.offset is None:
        return None, root
    both = xp.int32(codes.offset)
    return both >> 1, root + (both & 1)


def decode(xp: Namespace, codes: Codes) -> Values:
    offset, root = unpacked(xp, codes)
    if offset is not None:
        offset = xp.float32(offset) * codes.offset_scale
    initial = None if codes.initial is None else xp.float32(codes.initial) * codes.initial_scale
    return Values(offset, decode_roots(xp, root, codes.root_scale), initial)


def encode(
    xp: Namespace,
    rule: Rule,
    offset: tuple[Array | None, Array | None],
    root: Array,
    old: Codes,
    bits: Array | None = None,
    momentum: Scalar | None = None,
) -> Codes:
    """The new codes: the offset's with its scale, and those of the root.

    Without `bits` the root is rounded to nearest. x_0 stays as it is.
    """
    # An offset may still be held when momentum is 0, to be dropped after this step.
    is_number = isinstance(momentum, int | float)
    cleared = 1 if old.offset is None or (is_number and momentum == 0) else 0
    # Where roots never fall, a scale which falls could only be rounding.
    least = old.root_scale if rule.never_falls else 0.0
    root, root_scale = encode_roots(xp, root, bits, cleared, least)
    code, offset_scale = offset
    if code is not None:
        code = xp.int32(code) * 2 + (root & 1)
    root = root >> 1
    return old._replace(offset=code, offset_scale=offset_scale, root=root, root_scale=root_scale)


def share(xp: Namespace, rule: Rule, momentum: Scalar) -> Scalar:
    """The part of the rounding error of z - x that x takes in; z takes the rest.

    In x an error does not add up with others, but it fades only at the rate c = 1 - momentum, and
    its gradient drives z meanwhile. With a step size of a along a direction, errors of variance 1
    give x - z the variance (1 + share² a/c) / 2c. As a can be as large as 4/c, this part has to
    shrink faster than c^1.5: with all of it in x, a momentum of 0.995 made some runs diverge. In z
    errors add up, until the gradient takes them back.

    A mean of all z forgets nothing. With this part of the error in y, none of it is in the mean.
    """
    if rule.averages:
        return 1 - 1 / momentum
    part = ((1 - momentum) / LEAST_EXACT) ** 2
    if isinstance(momentum, int | float):
        return min(part, 1.0)
    return xp.where(part < 1, part, 1.0)


def _store(
    xp: Namespace,
    bits: Array,
    round_param: Callable[..., Array] | None,
    has_offset: bool,
    part: Scalar,
    moved: Moved,
) -> tuple[Array, tuple[Array | None, Array | None]]:
    """x as it is stored, and the code and scale of z - x.

    float32 has places enough to take in what rounding changes of the offset. Up to a momentum of
    0.9 it takes in all: x is what the coded offset leaves of z, so that z stays exact, and rounding
    errors do not add up in it. Half precision has no such places: there x is rounded first, and the
    offset is what z lies from that.
    """
    param = moved.param if round_param is None else round_param(xp, moved.param, bits)
    if not has_offset:
        return param, (None, None)
    offset = moved.offset() if round_param is None else moved.offset_from(param)
    code, scale = encode_integers(xp, offset, LARGEST_OFFSET, dither(xp, bits))
    if round_param is None:
        param = moved.towards(part)
        # Taking away -0 would make 0 of -0.
        param = xp.where(code == 0, param, param - code * (scale * part))
    return param, (code, scale)


def step(
    xp: Namespace,
    rule: Rule,
    h: Hyper,
    step: Scalar,
    bits: Array,
    param: Array,
    grad: Array,
    codes: Codes,
    dtype: str,
    with_sums: bool = False,
) -> tuple[Array, Codes, tuple[Scalar, ...] | None]:
    """One step from codes to codes, and the sums of distance.py if they are wanted.

    `param` and `grad` are float32, `dtype` is the one in which the parameter is stored.
    """
    has_offset = codes.offset is not None
    part = share(xp, rule, h.momentum) if has_offset else 0.0
    store = partial(_store, xp, bits, ROUND.get(dtype), has_offset, part)
    old, sums = decode(xp, codes), None
    new_param, offset, root, new_away = step_from_root(
        xp, rule, h, step, param, grad, old.offset, old.root, old.initial, store
    )
    if with_sums:
        away = old.away(xp, param)
        sums = distance.step_sums_from_root(xp, rule, h, step, param, grad, away, root, new_away)
    if codes.initial is not None:
        codes = codes._replace(initial_scale=shrunk(h, codes.initial_scale))
    return new_param, encode(xp, rule, offset, root, codes, bits, h.momentum), sums
