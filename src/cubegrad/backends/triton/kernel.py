"""The kernels of the Triton backend. They are Triton's language in Python's clothes."""

import triton
import triton.language as tl

ROW = tl.constexpr(8)  # parameter, two or three buffers, step count, elements; 64 bytes
# Blocks are summed up in pieces that one warp holds (of float32 state), so that no warp waits for
# another before the unit is done.
PIECES = tl.constexpr(8)


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
def _pieces(value, mask, BLOCK: tl.constexpr):
    """The sums of a block's pieces."""
    value = tl.where(mask, value, 0.0)
    return tl.sum(tl.reshape(value, (PIECES, BLOCK // PIECES)), 1)


@triton.jit
def _at(address, offsets, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    base = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + offsets


@triton.jit
def _update(
    p_at, g_at, a_at, b_at, c_at, left, weight, fade, momentum, shrink, eps, decay, sign,
    agreement, product, roots,
    METHOD: tl.constexpr, CENTRED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One block. WHOLE: all of it lies inside the tensor, and on 16-byte boundaries.

    Returns the three sums with this block added, if SUMS.
    """
    offsets = tl.arange(0, BLOCK)
    mask = None if WHOLE else offsets < left
    p_at = _at(p_at, offsets, P, WHOLE)
    g_at = _at(g_at, offsets, G, WHOLE)
    a_at = _at(a_at, offsets, S, WHOLE)
    b_at = _at(b_at, offsets, S, WHOLE)
    # Nothing is read twice, so the first-level cache is passed by: 0.5 % of a step.
    p = tl.load(p_at, mask, cache_modifier=".cg").to(S)
    loss_g = tl.load(g_at, mask, cache_modifier=".cg").to(S) * sign
    g = loss_g + p * decay
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
        root = _cbrt(v)
        u = _over(s, root, eps)  # s_{k+1} / (∛ν_{k+1} + ε)
        if SUMS:
            # A coordinate whose ν is no longer finite counts for nothing.
            finite = root < float("inf")
            if not WHOLE:
                finite &= mask
            agreement += _pieces(loss_g * weight * away, finite, BLOCK)  # λ_k g_k (x_0 - x_k)
            product += _pieces(s * u, finite, BLOCK)  # s_{k+1} (x_0 - z_{k+1})
            roots += _pieces(root, finite, BLOCK)  # ∛ν_{k+1}
        if CENTRED:
            x0 = x0 * shrink
            if shrink != 1:
                tl.store(c_at, x0, mask)
            z = x0 - u  # z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε)
            x = x - (x - z) * (1 - momentum)  # x_{k+1} = (1-c) x_k + c z_{k+1}
        else:
            x = x - (u - away * shrink)
    else:
        # a is ν, b is z; weight is γ (k+1)^{1/3}, fade √(k/(k+1)).
        v = a * fade + g * g  # ν_{k+1} = √(k/(k+1)) ν_k + g_k²
        move = _displacement(g * weight, v, eps)
        z = b * shrink - (move + 0.0)  # z_{k+1} = z_k - γ (k+1)^{1/3} g_k / (∛ν_{k+1} + ε)
        x = x - (x - z) * (1 - momentum)
        tl.store(a_at, v, mask)
        tl.store(b_at, z, mask)
    tl.store(p_at, x.to(P), mask)
    return agreement, product, roots


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
    lr_at, momentum_at, shrink_at, found_inf, grad_scale, sums,
    METHOD: tl.constexpr, CENTRED: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One unit of `length` elements; the last program to finish counts the steps.

    `lr_at`, `momentum_at` and `shrink_at` are where these numbers are, if they are on the device.
    `sums` has three rows, and in each a place for every unit.
    """
    eps, decay, sign = _number(eps, S), _number(decay, S), _number(sign, S)
    lr = _number(lr, S) if lr_at is None else tl.load(lr_at).to(S)
    momentum = _number(momentum, S) if momentum_at is None else tl.load(momentum_at).to(S)
    shrink = _number(shrink, S) if shrink_at is None else tl.load(shrink_at).to(S)
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
        agreement = tl.zeros((PIECES,), S)
        product = tl.zeros((PIECES,), S)
        roots = tl.zeros((PIECES,), S)
        for _ in range(0, tl.minimum(left, length), BLOCK):
            if aligned & (left >= BLOCK):
                agreement, product, roots = _update(
                    p_at, g_at, a_at, b_at, c_at, left, weight, fade, momentum, shrink,
                    eps, decay, sign, agreement, product, roots,
                    METHOD, CENTRED, P, G, S, BLOCK, True, sums is not None,
                )  # fmt: skip
            else:
                agreement, product, roots = _update(
                    p_at, g_at, a_at, b_at, c_at, left, weight, fade, momentum, shrink,
                    eps, decay, sign, agreement, product, roots,
                    METHOD, CENTRED, P, G, S, BLOCK, False, sums is not None,
                )  # fmt: skip
            left -= BLOCK
            p_at += BLOCK * (P.primitive_bitwidth // 8)
            g_at += BLOCK * (G.primitive_bitwidth // 8)
            a_at += BLOCK * (S.primitive_bitwidth // 8)
            b_at += BLOCK * (S.primitive_bitwidth // 8)
            c_at += BLOCK * (S.primitive_bitwidth // 8)
        if sums is not None:
            at, stride = sums + tl.program_id(0), tl.num_programs(0)
            tl.store(at, tl.sum(agreement.to(tl.float64), 0))
            tl.store(at + stride, tl.sum(product.to(tl.float64), 0))
            tl.store(at + 2 * stride, tl.sum(roots.to(tl.float64), 0))
        # Only when every program has read its count may the counts change.
        tl.debug_barrier()
        if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
            for first in range(0, n_rows, BLOCK):
                index = first + tl.arange(0, BLOCK)
                real = index < n_rows
                counts = tl.load(rows + index * ROW + 4, real, 0).to(tl.pointer_type(tl.float32))
                tl.store(counts, tl.load(counts, real) + 1, real)
            tl.store(ticket, 0)


@triton.jit(do_not_specialize=["n_groups"])
def advance_estimate(
    values, sums, rates, kept, counts, n_groups: "i32", found_inf,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The numbers of an estimated learning rate one step on, for all groups in one program.

    A row of `values` is D, the agreement, γ, Σλ and k, a row of `sums` what `step_units` added up
    for that group. `rates` are the groups' γ with their factors, `kept` what decoupled decay
    leaves. The sums are made ready for the next step.
    """
    group = tl.arange(0, GROUPS)
    real = group < n_groups
    row, told = values + 5 * group, sums + 3 * group
    newest = tl.load(told, real, 0.0)
    newest = tl.where(newest - newest == 0, newest, 0.0)  # one that is not finite is left out
    product = tl.sum(tl.load(told + 1, real, 0.0), 0)  # ⟨s_{k+1}, x_0 - z_{k+1}⟩
    roots = tl.load(told + 2, real, 0.0)
    norm = tl.sqrt(product) * tl.sqrt(tl.sum(roots, 0))  # ‖s‖ √tr A
    for column in tl.static_range(3):
        tl.store(told + column, tl.zeros((GROUPS,), tl.float64), real)
    finite = True
    if found_inf is not None:
        finite = tl.load(found_inf) == 0
    if finite:
        distance, lr, k = tl.load(values), tl.load(values + 2), tl.load(values + 4)
        agreement = tl.load(row + 1, real, 0.0)
        if kept is not None:
            agreement *= tl.load(kept + group, real, 1.0)
        agreement += newest  # Σ λ_i ⟨g_i, x_0 - x_i⟩
        weight = tl.load(rates + group, real, 0.0) * tl.sqrt(k + 1)
        weight_sum = tl.load(row + 3, real, 0.0) + weight  # Σ λ_i
        weighted = weight_sum > 0
        # Σ_i H_i^{2/3}, where H_i² is the mean of g_i² weighted by λ
        scales = tl.sum(
            tl.where(weighted, roots / _cbrt(tl.where(weighted, weight_sum, 1.0)), 0.0), 0
        )
        coordinates = tl.sum(tl.where(weighted, tl.load(counts + group, real, 0.0), 0.0), 0)
        bound = tl.where(norm > 0, tl.sum(agreement, 0) / norm, 0.0)
        distance = tl.where(bound > distance, bound, distance)
        scale = tl.where(scales > 0, scales / coordinates, 1.0)  # H^{2/3}
        root = tl.sqrt(scale)
        estimated = distance * tl.sqrt(distance) / (root * tl.sqrt(root))  # γ = D^{3/2} H^{-1/2}
        lr = tl.where(scales > 0, estimated, lr)
        every = tl.zeros((GROUPS,), tl.float64)
        tl.store(row, every + distance, real)
        tl.store(row + 1, agreement, real)
        tl.store(row + 2, every + lr, real)
        tl.store(row + 3, weight_sum, real)
        tl.store(row + 4, every + (k + 1), real)
