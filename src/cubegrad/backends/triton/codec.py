"""What a code means, in Triton's language. It restates codec.py."""

import torch
import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: numbers beside it are integers
MAGIC_BITS = tl.constexpr(0x4B400000)
BINADES = tl.constexpr(7 << 23)
WEYL = tl.constexpr(0x06099B33)
SMALLEST = tl.constexpr(2.0**-126)  # normal number
# Triton's own logarithm and quotient are exact to the last bit, and take a third of the kernel's
# instructions. NVIDIA's compiler knows the short ones.
APPROXIMATE = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def mixed(x):
    x = x * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def integer(code):
    """The number that a small integer is, without the slow conversion."""
    return _float(code.to(tl.int32) + MAGIC_BITS) - MAGIC


@triton.jit
def _special(x, INSTRUCTION: tl.constexpr):
    """One instruction of the special-function unit, two ulps off at most."""
    return tl.inline_asm_elementwise(
        INSTRUCTION + ".approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def inverse(x, MAY_BE_ZERO: tl.constexpr):
    """1/x, 0 where that is infinite."""
    inverse = _special(x, "rcp") if APPROXIMATE else 1 / x
    return tl.where(inverse == float("inf"), 0.0, inverse) if MAY_BE_ZERO else inverse


@triton.jit
def short_root(x, ROOT: tl.constexpr, NO_EPS: tl.constexpr):
    """The root within about an ulp: of x ≥ 0 if it is a square root, of a normal number if a cube
    root, which is NaN for inf.

    The short square root of a subnormal number is 0, which matters beside no usual ε.
    """
    if ROOT == 2:
        if APPROXIMATE and not NO_EPS:
            return _special(x, "sqrt")
        return tl.sqrt_rn(x)
    logarithm = _special(x, "lg2") if APPROXIMATE else tl.log2(x)
    power = logarithm * (-1 / 3)  # of two; p = 1/∛x
    power = _special(power, "ex2") if APPROXIMATE else tl.exp2(power)
    root = x * power * power
    return tl.fma(root, tl.fma(-root, power, 1.0) * (2 / 3), root)  # what r p lacks of 1


@triton.jit
def root_of_any(v, ROOT: tl.constexpr, NO_EPS: tl.constexpr):
    """`short_root` of any v ≥ 0; 0 where the logarithm would take v for 0."""
    root = short_root(v, ROOT, NO_EPS)
    if ROOT == 3:
        root = tl.where(v < SMALLEST, 0.0, root)
        root = tl.where(v < float("inf"), root, v)
    return root


@triton.jit
def power(root, ROOT: tl.constexpr):
    """ν, whose root this is."""
    return root * root * root if ROOT == 3 else root * root


@triton.jit
def raised(root, growth, ROOT: tl.constexpr):
    """`power` and what ν grows by, rounded once."""
    return tl.fma(root * root, root, growth) if ROOT == 3 else tl.fma(root, root, growth)


@triton.jit
def rounded(x, random, P: tl.constexpr):
    """x rounded at random to a number of half precision, still as float32."""
    random = random * 0x9E3779B1
    if P == tl.bfloat16:
        rounded = _float((_bits(x) + (random >> 16).to(tl.int32)) & -0x10000)
        return tl.where(tl.abs(x) < float("inf"), rounded, x)
    normal = _float((_bits(x) + (random >> 19).to(tl.int32)) & -0x2000)
    fraction = _float(((random >> 9) & 0x7FF800 | 0x3F800400).to(tl.int32)) - 1.5
    subnormal = (x * 16777216.0 + fraction + MAGIC - MAGIC) * (1 / 16777216)
    rounded = tl.where(tl.abs(x) < 0.00006103515625, subnormal, normal)
    return tl.where((tl.abs(x) < 65504.0) & (x != 0), rounded, x)


@triton.jit
def encode_offset(offset, random):
    """Codes in the lowest 7 bits, their scale, and the integers that they are.

    Those are 0 for offsets that are not finite.
    """
    offset = tl.where(tl.abs(offset) < float("inf"), offset, 0.0)
    scale = tl.max(tl.abs(offset), 0) * (1.000001 / 63)
    inverse = tl.div_rn(1.0, scale)
    inverse = tl.where(inverse < float("inf"), inverse, 0.0)
    dither = _float(((random >> 9) & 0x7FFC00 | 0x3F800200).to(tl.int32)) - 1.5
    scaled = tl.fma(offset, tl.zeros_like(offset) + inverse, dither)
    magic = scaled + MAGIC
    return _bits(magic), scale, magic - MAGIC


@triton.jit
def share(momentum, AVERAGES: tl.constexpr):
    """The part of an offset's rounding error that x takes in; z takes the rest."""
    if AVERAGES:
        return 1 - 1 / momentum
    part = (1 - momentum) / 0.099
    return tl.minimum(part * part, 1.0)


@triton.jit
def encode_root(root, random, least_scale, LOW_BIT: tl.constexpr):
    """Codes as int32, and their scale, a power of two.

    Their lowest bit counts only if LOW_BIT is 1.
    """
    PLACES: tl.constexpr = (2 - LOW_BIT) * 0x20000 - 1  # that are rounded away
    bits = _bits(root)
    real = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF  # above 0 and finite
    bits = tl.where(real, bits, 0)
    scale = (tl.max(bits, 0) + PLACES) & 0x7F800000
    scale = tl.maximum(scale, _bits(least_scale))
    low = (random & PLACES).to(tl.int32)
    codes = tl.maximum((bits + low - (scale - BINADES)) >> 17, 2)
    return tl.where(real, codes, 0), _float(scale)


@triton.jit
def decode_root(code, offset_code, scale, PACKED: tl.constexpr):
    """PACKED: the root's lowest bit is that of the offset's code."""
    bits = (code.to(tl.int32) << 18) + (_bits(scale) - BINADES)
    if PACKED:
        bits += (offset_code & 1) << 17
    return tl.where(code == 0, 0.0, _float(bits))
