"""The kernel of the Triton backend. It is Triton's language in Python's clothes."""

import triton
import triton.language as tl

ROW = tl.constexpr(8)  # parameter, two or three buffers, step count, elements; 64 bytes


@triton.jit
def _cbrt(x):
    """∛x for x ≥ 0 within about an ulp: a guess through the exponent, then Newton's rule."""
    if x.dtype == tl.float64:
        # Scaled, so that no power of the root overflows; the guess has 5 bits, each turn trebles.
        tiny, huge = x < 2.0**-900, x > 2.0**900
        y = tl.where(tiny, x * 2.0**540, tl.where(huge, x * 2.0**-540, x))
        root = (y.to(tl.int64, bitcast=True) // 3 + (715094163 << 32)).to(tl.float64, bitcast=True)
        for _ in tl.static_range(3):
            cube = root * root * root
            root -= root * ((cube - y) / (2 * cube + y))
        root *= tl.where(tiny, 2.0**-180, tl.where(huge, 2.0**180, 1.0)).to(tl.float64)
    else:
        # From p = 1/∛x to 17 bits or more, r = x p² and what r p lacks of 1.
        power = tl.exp2(tl.log2(x) * (-1 / 3))
        root = x * power * power
        root = tl.fma(root, tl.fma(-root, power, 1.0) * (2 / 3), root)
    return tl.where((x > 0) & (x < float("inf")), root, x)


@triton.jit
def _sqrt(x):
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def _over(s, root, eps):
    """s / (root + ε), 0 where the denominator cannot be inverted."""
    inverse = 1 / (root + eps)
    return s * tl.where(inverse == float("inf"), 0.0, inverse)


@triton.jit
def _displacement(s, v, eps):
    return _over(s, _cbrt(v), eps)  # s / (∛ν + ε)


@triton.jit
def _put(sums_at, stride, value, mask, WHOLE: tl.constexpr):
    """A block's sum, in the next row of the table."""
    if not WHOLE:
        value = tl.where(mask, value, 0.0)
    tl.store(sums_at, tl.sum(value).to(tl.float64))
    return sums_at + stride


@triton.jit
def _at(address, offsets, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    base = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + offsets


@triton.jit
def _update(
    p_at, g_at, a_at, b_at, c_at, left, weight, fade, momentum, shrink, eps, decay, sign,
    sums_at, stride,
    METHOD: tl.constexpr, CENTRED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One block. WHOLE: all of it lies inside the tensor, and on 16-byte boundaries."""
    offsets = tl.arange(0, BLOCK)
    mask = None if WHOLE else offsets < left
    p_at = _at(p_at, offsets, P, WHOLE)
    g_at = _at(g_at, offsets, G, WHOLE)
    a_at = _at(a_at, offsets, S, WHOLE)
    b_at = _at(b_at, offsets, S, WHOLE)
    # Nothing is read twice, so the first-level cache is passed by: 0.5 % of a step.
    p = tl.load(p_at, mask, cache_modifier=".cg").to(S)
    g = tl.load(g_at, mask, cache_modifier=".cg").to(S) * sign + p * decay
    a = tl.load(a_at, mask, cache_modifier=".cg")
    b = tl.load(b_at, mask, cache_modifier=".cg")
    x = p * shrink
    if METHOD == "madgrad":
        # a is s, b is ν, c is x_0; weight is λ_k.
        s = a * shrink + g * weight  # s_{k+1} = s_k + λ_k g_k
        v = b + g * weight * g  # ν_{k+1} = ν_k + λ_k g_k²
        tl.store(a_at, s, mask)
        tl.store(b_at, v, mask)
        if CENTRED:
            c_at = _at(c_at, offsets, S, WHOLE)
            x0 = tl.load(c_at, mask, cache_modifier=".cg")
            away = x0 - p
        else:
            away = _displacement(a, b, eps)
        if sums_at is not None:
            sums_at = _put(sums_at, stride, g * weight * away, mask, WHOLE)  # λ_k g_k (x_0 - x_k)
            sums_at = _put(sums_at, stride, tl.abs(s), mask, WHOLE)  # |s_{k+1}|
        root = _cbrt(v)
        if sums_at is not None:
            _put(sums_at, stride, root, mask, WHOLE)  # ∛ν_{k+1}
        if CENTRED:
            x0 = x0 * shrink
            if shrink != 1:
                tl.store(c_at, x0, mask)
            z = x0 - _over(s, root, eps)  # z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε)
            x = x - (x - z) * (1 - momentum)  # x_{k+1} = (1-c) x_k + c z_{k+1}
        else:
            x = x - (_over(s, root, eps) - away * shrink)
    else:
        # a is ν, b is z; weight is γ (k+1)^{1/3}, fade √(k/(k+1)).
        v = a * fade + g * g  # ν_{k+1} = √(k/(k+1)) ν_k + g_k²
        move = _displacement(g * weight, v, eps)
        z = b * shrink - (move + 0.0)  # z_{k+1} = z_k - γ (k+1)^{1/3} g_k / (∛ν_{k+1} + ε)
        x = x - (x - z) * (1 - momentum)
        tl.store(a_at, v, mask)
        tl.store(b_at, z, mask)
    tl.store(p_at, x.to(P), mask)


@triton.jit
def _number(bits, S: tl.constexpr):
    """A double that came as the integer of the same bits: Triton passes plain floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(S)


@triton.jit(
    do_not_specialize=["n_rows", "length", "lr", "momentum", "shrink", "eps", "decay", "sign"]
)
def step_units(
    rows, grads, units, ticket, n_rows: "i32", length: "i32",
    lr: "i64", momentum: "i64", shrink: "i64", eps: "i64", decay: "i64", sign: "i64",
    on_device, found_inf, grad_scale, sums,
    METHOD: tl.constexpr, CENTRED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One unit of `length` elements; the last program to finish counts the steps.

    `sums` has three rows, and in each a place for every block of every unit.
    """
    eps, decay, sign = _number(eps, S), _number(decay, S), _number(sign, S)
    if on_device is None:
        lr, momentum, shrink = _number(lr, S), _number(momentum, S), _number(shrink, S)
    else:
        lr = tl.load(on_device).to(S)
        momentum = tl.load(on_device + 1).to(S)
        shrink = tl.load(on_device + 2).to(S)
    if grad_scale is not None:
        sign = sign / tl.load(grad_scale).to(S)
    finite = True
    if found_inf is not None:
        finite = tl.load(found_inf) == 0
    if finite:
        row = tl.load(units + 2 * tl.program_id(0))
        start = tl.load(units + 2 * tl.program_id(0) + 1).to(tl.int64) * length
        at = rows + row * ROW
        p_at = tl.load(at) + start * (P.primitive_bitwidth // 8)
        g_at = tl.load(grads + row) + start * (G.primitive_bitwidth // 8)
        a_at = tl.load(at + 1) + start * (S.primitive_bitwidth // 8)
        b_at = tl.load(at + 2) + start * (S.primitive_bitwidth // 8)
        c_at = tl.load(at + 3) + start * (S.primitive_bitwidth // 8)
        k = tl.load(tl.load(at + 4).to(tl.pointer_type(tl.float32))).to(S)
        left = tl.load(at + 5) - start
        if METHOD == "madgrad":
            weight, fade = lr * _sqrt(k + 1), k
        else:
            weight, fade = lr * _cbrt(k + 1), _sqrt(k / (k + 1))
        aligned = ((p_at | g_at | a_at | b_at | c_at) & 15) == 0
        blocks = length // BLOCK
        stride = tl.num_programs(0) * blocks
        sums_at = None
        if sums is not None:
            sums_at = sums + tl.program_id(0) * blocks
        for _ in range(0, tl.minimum(left, length), BLOCK):
            if aligned & (left >= BLOCK):
                _update(
                    p_at, g_at, a_at, b_at, c_at, left, weight, fade, momentum, shrink,
                    eps, decay, sign, sums_at, stride, METHOD, CENTRED, P, G, S, BLOCK, True,
                )  # fmt: skip
            else:
                _update(
                    p_at, g_at, a_at, b_at, c_at, left, weight, fade, momentum, shrink,
                    eps, decay, sign, sums_at, stride, METHOD, CENTRED, P, G, S, BLOCK, False,
                )  # fmt: skip
            if sums is not None:
                sums_at += 1
            left -= BLOCK
            p_at += BLOCK * (P.primitive_bitwidth // 8)
            g_at += BLOCK * (G.primitive_bitwidth // 8)
            a_at += BLOCK * (S.primitive_bitwidth // 8)
            b_at += BLOCK * (S.primitive_bitwidth // 8)
            c_at += BLOCK * (S.primitive_bitwidth // 8)
        # Only when every program has read its count may the counts change.
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
            for first in range(0, n_rows, BLOCK):
                index = first + tl.arange(0, BLOCK)
                real = index < n_rows
                counts = tl.load(rows + index * ROW + 4, real, 0).to(tl.pointer_type(tl.float32))
                tl.store(counts, tl.load(counts, real) + 1, real)
            tl.store(ticket, 0)
