"""The kernels of the Triton backend, in Triton's language. They restate rule.py and distance.py."""

import triton
import triton.language as tl

from cubegrad.backends.triton.rounding import place_of, rounded_at

# Parameter, two or three buffers, step count, elements; for parameters that are rounded at random,
# the first index, and the length of a row above the 32 bits of the spacing. 64 bytes.
ROW = tl.constexpr(8)
COUNT = tl.constexpr(4)  # the place of the step count in a row
# A block is summed up in pieces that one warp holds (of float32 state), so that no warp waits for
# another before the unit is done.
PIECES = tl.constexpr(8)


@triton.jit
def cbrt(x):
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
def square_root(x):
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def root_of(v, ROOT: tl.constexpr):
    """∛ν, or √ν."""
    return cbrt(v) if ROOT == 3 else square_root(v)


@triton.jit
def factors(lr, k, GROWTH_ROOT: tl.constexpr, SQUARES: tl.constexpr):
    """λ_k; what is left of ν where g is 0, unless it is a sum; and a_k, of a mean."""
    weight = lr
    if GROWTH_ROOT == 2:
        weight = lr * square_root(k + 1)
    if GROWTH_ROOT == 3:
        weight = lr * cbrt(k + 1)
    if SQUARES == "averaged":
        return weight, k / (k + 1.5), 1.5 / (k + 1.5)
    return weight, square_root(k / (k + 1)), k


@triton.jit
def add_square(v, weight, g, fade, newest, SQUARES: tl.constexpr):
    """ν_{k+1}"""
    if SQUARES == "weighted":
        return v + g * weight * g
    return v * fade + (g * newest if SQUARES == "averaged" else g) * g


@triton.jit
def is_held(momentum, ahead, g):
    """Whether x stays: z lies uphill by the newest gradient, or that is 0.

    Without momentum x is z.
    """
    down = tl.where(g > 0, ahead, tl.where(g < 0, -ahead, 0.0))
    return down <= tl.where(momentum != 0, 0.0, -float("inf"))


@triton.jit
def _over(s, root, eps):
    """s / (root + ε), 0 where the denominator cannot be inverted."""
    inverse = 1 / (root + eps)
    return s * tl.where(inverse == float("inf"), 0.0, inverse)


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
def _load(address, offsets, mask, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """A block and its addresses."""
    at = _at(address, offsets, dtype, ALIGNED)
    # Nothing is read twice, so the first-level cache is bypassed: 0.5 % of a step.
    return tl.load(at, mask, cache_modifier=".cg"), at


@triton.jit
def _update_pulled(
    p_at, g_at, s_at, v_at, x0_at, left, weight, fade, newest, momentum, shrink, eps, decay, sign,
    agreement, product, roots, place, first, length, spacing,
    ROOT: tl.constexpr, SQUARES: tl.constexpr, HAS_POINT: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    SUMS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """One block of a rule with a pull; HAS_POINT: x_0 is kept.

    WHOLE: all of the block lies inside the tensor, and on 16-byte boundaries. Returns the three
    sums with this block added, if SUMS. DECAYS: `decay` is not 0.
    """
    offsets = tl.arange(0, BLOCK)
    mask = None if WHOLE else offsets < left
    p, p_at = _load(p_at, offsets, mask, P, WHOLE)
    g, g_at = _load(g_at, offsets, mask, G, WHOLE)
    p, loss_g = p.to(S), g.to(S) * sign
    g = loss_g + p * decay
    old_s, s_at = _load(s_at, offsets, mask, S, WHOLE)
    old_v, v_at = _load(v_at, offsets, mask, S, WHOLE)
    x = p * shrink
    s = old_s * shrink + g * weight  # s_{k+1} = s_k + λ_k g_k
    v = add_square(old_v, weight, g, fade, newest, SQUARES)
    tl.store(s_at, s, mask)
    tl.store(v_at, v, mask)
    if HAS_POINT:
        x0, x0_at = _load(x0_at, offsets, mask, S, WHOLE)
        away = x0 - p
    else:
        away = _over(old_s, root_of(old_v, ROOT), eps)
    root = root_of(v, ROOT)
    u = _over(s, root, eps)  # s_{k+1} / (∛ν_{k+1} + ε)
    if SUMS:
        # A coordinate whose ν is no longer finite is left out.
        finite = root < float("inf") if WHOLE else mask & (root < float("inf"))
        if DECAYS:  # which counts only where it makes the product smaller
            loss_g = tl.where(p * away < 0, g, loss_g)
        agreement += _pieces(loss_g * weight * away, finite, BLOCK)  # λ_k g_k (x_0 - x_k)
        product += _pieces(s * u, finite, BLOCK)  # s_{k+1} (x_0 - z_{k+1})
        roots += _pieces(root, finite, BLOCK)  # ∛ν_{k+1}
    if HAS_POINT:
        x0 = x0 * shrink
        if shrink != 1:
            tl.store(x0_at, x0, mask)
        z = x0 - u  # z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε)
        x = x - (x - z) * (1 - momentum)  # x_{k+1} = (1-c) x_k + c z_{k+1}
    else:
        x = x - (u - away * shrink)  # x_{k+1} = z_{k+1}
    if place is not None:
        x = rounded_at(x, place, first, length, spacing, P, BLOCK)
    tl.store(p_at, x.to(P), mask)
    return agreement, product, roots


@triton.jit
def _update_moved(
    p_at, g_at, v_at, z_at, x0_at, left, weight, fade, newest, momentum, mean_share, shrink, eps,
    decay, sign, agreement, product, roots, place, first, length, spacing,
    ROOT: tl.constexpr, SQUARES: tl.constexpr, HOLDS: tl.constexpr, RELATIVE: tl.constexpr,
    AVERAGES: tl.constexpr, ANCHORED: tl.constexpr, HAS_POINT: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    SUMS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """One block of a rule without a pull; HAS_POINT: z is kept, if RELATIVE as z - x.

    AVERAGES: x is y, and takes in z_{k+1} with `mean_share`. ANCHORED: x_0 is kept. Returns the
    three sums with this block added, if SUMS.
    """
    offsets = tl.arange(0, BLOCK)
    mask = None if WHOLE else offsets < left
    p, p_at = _load(p_at, offsets, mask, P, WHOLE)
    g, g_at = _load(g_at, offsets, mask, G, WHOLE)
    p, loss_g = p.to(S), g.to(S) * sign
    g = loss_g + p * decay
    old_v, v_at = _load(v_at, offsets, mask, S, WHOLE)
    x = p if AVERAGES else p * shrink
    v = add_square(old_v, weight, g, fade, newest, SQUARES)
    root = root_of(v, ROOT)
    move = _over(g * weight, root, eps) + 0.0
    if AVERAGES:  # z alone decays, in proportion to y
        move += tl.where(shrink != 1, p * (1 - shrink), 0.0)
    tl.store(v_at, v, mask)
    if HAS_POINT:
        point, z_at = _load(z_at, offsets, mask, S, WHOLE)
        if AVERAGES:
            ahead = move * momentum - point  # β (x_k - z_{k+1})
        elif RELATIVE:
            ahead = move - point * shrink  # x_k - z_{k+1}
        else:
            z = point * shrink - move  # z_{k+1} = z_k - λ_k g_k / (∛ν_{k+1} + ε)
            tl.store(z_at, z, mask)
            ahead = x - z
        if AVERAGES:
            new = x - move * (1 - momentum) - ahead * mean_share
            x, ahead = new, ahead * (1 - mean_share)  # y_{k+1} - z_{k+1}
        else:
            share = 1 - momentum
            if HOLDS:
                share = tl.where(is_held(momentum, ahead, g), 0.0, share)
            new = x - ahead * share
    else:
        new = x - move
    if place is not None:
        new = rounded_at(new, place, first, length, spacing, P, BLOCK)
    tl.store(p_at, new.to(P), mask)
    if HAS_POINT and RELATIVE:
        offset = x - new.to(P).to(S) - ahead
        tl.store(z_at, offset, mask)
    if ANCHORED:
        x0, x0_at = _load(x0_at, offsets, mask, S, WHOLE)
        away, x0 = x0 - p, x0 * shrink
        if shrink != 1:
            tl.store(x0_at, x0, mask)
        if SUMS:
            new_away = x0 - new.to(P).to(S) - offset  # x_0 - z_{k+1}
            finite = root < float("inf") if WHOLE else mask & (root < float("inf"))
            if DECAYS:
                loss_g = tl.where(p * away < 0, g, loss_g)
            agreement += _pieces(loss_g * weight * away, finite, BLOCK)  # γ_k g_k (x_0 - x_k)
            product += _pieces((root + eps) * tl.abs(new_away), finite, BLOCK)
            roots += _pieces(root, finite, BLOCK)
    return agreement, product, roots


@triton.jit
def _update(
    p_at, g_at, a_at, b_at, c_at, left, weight, fade, newest, momentum, mean_share, shrink, eps,
    decay, sign, agreement, product, roots, place, first, length, spacing,
    ROOT: tl.constexpr, SQUARES: tl.constexpr, PULLS: tl.constexpr, HOLDS: tl.constexpr,
    RELATIVE: tl.constexpr, AVERAGES: tl.constexpr, ANCHORED: tl.constexpr,
    HAS_POINT: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, SUMS: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """One block; `weight`, `fade` and `newest` are what `factors` gives."""
    if PULLS:
        agreement, product, roots = _update_pulled(
            p_at, g_at, a_at, b_at, c_at, left, weight, fade, newest, momentum, shrink,
            eps, decay, sign, agreement, product, roots, place, first, length, spacing,
            ROOT, SQUARES, HAS_POINT, P, G, S, BLOCK, WHOLE, SUMS, DECAYS,
        )  # fmt: skip
    else:
        agreement, product, roots = _update_moved(
            p_at, g_at, a_at, b_at, c_at, left, weight, fade, newest, momentum, mean_share, shrink,
            eps, decay, sign, agreement, product, roots, place, first, length, spacing,
            ROOT, SQUARES, HOLDS, RELATIVE, AVERAGES, ANCHORED, HAS_POINT, P, G, S, BLOCK, WHOLE,
            SUMS, DECAYS,
        )  # fmt: skip
    return agreement, product, roots


@triton.jit
def _unit(rows, grads, units, length, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Where this program's unit starts in each tensor, k, and the elements from there on."""
    row = tl.load(units + 2 * tl.program_id(0))
    start = tl.load(units + 2 * tl.program_id(0) + 1).to(tl.int64) * length
    at = rows + row * ROW
    p_at = tl.load(at) + start * (P.primitive_bitwidth // 8)
    g_at = tl.load(grads + row) + start * (G.primitive_bitwidth // 8)
    a_at = tl.load(at + 1) + start * (S.primitive_bitwidth // 8)
    b_at = tl.load(at + 2) + start * (S.primitive_bitwidth // 8)
    c_at = tl.load(at + 3) + start * (S.primitive_bitwidth // 8)
    k = tl.load(tl.load(at + 4).to(tl.pointer_type(tl.float32))).to(S)
    return p_at, g_at, a_at, b_at, c_at, k, tl.load(at + 5) - start


@triton.jit
def store_sums(sums, agreement, product, roots):
    at, stride = sums + tl.program_id(0), tl.num_programs(0)
    tl.store(at, tl.sum(agreement.to(tl.float64), 0))
    tl.store(at + stride, tl.sum(product.to(tl.float64), 0))
    tl.store(at + 2 * stride, tl.sum(roots.to(tl.float64), 0))


@triton.jit
def increment_counts(
    rows, n_rows, ticket, BLOCK: tl.constexpr, ROW: tl.constexpr, COUNT: tl.constexpr
):
    """Add 1 to every step count, in the last program: before, another may not have read them."""
    tl.debug_barrier()
    if tl.atomic_add(ticket, 1) == tl.num_programs(0) - 1:
        for first in range(0, n_rows, BLOCK):
            index = first + tl.arange(0, BLOCK)
            real = index < n_rows
            counts = tl.load(rows + index * ROW + COUNT, real, 0).to(tl.pointer_type(tl.float32))
            tl.store(counts, tl.load(counts, real) + 1, real)
        tl.store(ticket, 0)


@triton.jit
def number(bits, S: tl.constexpr):
    """A double, passed as the integer of the same bits: Triton passes plain floats as float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(S)


@triton.jit(
    do_not_specialize=[
        *("n_rows", "length", "lr", "momentum", "shrink", "mean_share", "eps", "decay", "sign"),
    ]
)
def step_units(
    rows, grads, units, ticket, n_rows: "i32", length: "i32",
    lr: "i64", momentum: "i64", shrink: "i64", mean_share: "i64", eps: "i64", decay: "i64",
    sign: "i64", lr_at, momentum_at, shrink_at, mean_share_at, found_inf, grad_scale, sums,
    ROOT: tl.constexpr, GROWTH_ROOT: tl.constexpr, SQUARES: tl.constexpr, PULLS: tl.constexpr,
    HOLDS: tl.constexpr, RELATIVE: tl.constexpr, AVERAGES: tl.constexpr, ANCHORED: tl.constexpr,
    HAS_POINT: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    AT_RANDOM: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """One unit of `length` elements; the last program to finish increments the step counts.

    ROOT, GROWTH_ROOT, SQUARES, PULLS, HOLDS, RELATIVE, AVERAGES and ANCHORED are the rule's fields.

    `lr_at` and those that follow it point to these numbers if they are on the device.
    `sums` has three rows with one number for each unit. AT_RANDOM: parameters, of half precision,
    are rounded at random. DECAYS: the sums are wanted, and `decay` is not 0.
    """
    eps, decay, sign = number(eps, S), number(decay, S), number(sign, S)
    lr = number(lr, S) if lr_at is None else tl.load(lr_at).to(S)
    momentum = number(momentum, S) if momentum_at is None else tl.load(momentum_at).to(S)
    shrink = number(shrink, S) if shrink_at is None else tl.load(shrink_at).to(S)
    mean_share = number(mean_share, S) if mean_share_at is None else tl.load(mean_share_at).to(S)
    if grad_scale is not None:
        sign = sign / tl.load(grad_scale).to(S)
    finite = True if found_inf is None else tl.load(found_inf) == 0
    if finite:
        p_at, g_at, a_at, b_at, c_at, k, left = _unit(rows, grads, units, length, P, G, S)
        weight, fade, newest = factors(lr, k, GROWTH_ROOT, SQUARES)
        place, first, row_length, spacing = None, None, None, None
        if AT_RANDOM:
            place, first, row_length, spacing = place_of(rows, ROW, units, length, momentum)
        aligned = ((p_at | g_at | a_at | b_at | c_at) & 15) == 0
        zeros = tl.zeros((PIECES,), S)
        agreement, product, roots = zeros, zeros, zeros
        for _ in range(0, tl.minimum(left, length), BLOCK):
            if aligned & (left >= BLOCK):
                agreement, product, roots = _update(
                    p_at, g_at, a_at, b_at, c_at, left, weight, fade, newest, momentum,
                    mean_share, shrink, eps, decay, sign, agreement, product, roots,
                    place, first, row_length, spacing,
                    ROOT, SQUARES, PULLS, HOLDS, RELATIVE, AVERAGES, ANCHORED, HAS_POINT, P, G, S,
                    BLOCK, True, sums is not None, DECAYS,
                )  # fmt: skip
            else:
                agreement, product, roots = _update(
                    p_at, g_at, a_at, b_at, c_at, left, weight, fade, newest, momentum,
                    mean_share, shrink, eps, decay, sign, agreement, product, roots,
                    place, first, row_length, spacing,
                    ROOT, SQUARES, PULLS, HOLDS, RELATIVE, AVERAGES, ANCHORED, HAS_POINT, P, G, S,
                    BLOCK, False, sums is not None, DECAYS,
                )  # fmt: skip
            left -= BLOCK
            if AT_RANDOM:
                place += BLOCK
            p_at += BLOCK * (P.primitive_bitwidth // 8)
            g_at += BLOCK * (G.primitive_bitwidth // 8)
            a_at += BLOCK * (S.primitive_bitwidth // 8)
            b_at += BLOCK * (S.primitive_bitwidth // 8)
            c_at += BLOCK * (S.primitive_bitwidth // 8)
        if sums is not None:
            store_sums(sums, agreement, product, roots)
        increment_counts(rows, n_rows, ticket, BLOCK, ROW, COUNT)
