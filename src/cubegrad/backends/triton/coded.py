"""The kernel that steps states in codes. It restates codec.py and the rule from the root."""

import triton
import triton.language as tl

from cubegrad.backends.triton.codec import (
    SMALLEST,
    WEYL,
    decode_root,
    encode_offset,
    encode_root,
    integer,
    inverse,
    mixed,
    power,
    raised,
    root_of_any,
    rounded,
    share,
    short_root,
)
from cubegrad.backends.triton.kernel import (
    add_square,
    factors,
    increment_counts,
    is_held,
    number,
    store_sums,
)

ROW = tl.constexpr(16)  # what fused.coded_addresses gives, and four numbers more: 128 bytes
COUNT = tl.constexpr(7)  # the place of the step count in a row
BLOCK = tl.constexpr(256)
LANES = tl.constexpr(32)  # sums side by side: one for each thread of the warp


@triton.jit
def _load(address, offsets, mask, dtype: tl.constexpr, FORM: tl.constexpr):
    base = address.to(tl.pointer_type(dtype))
    if FORM != "any":
        base = tl.multiple_of(base, 16)
    at = base + offsets
    return tl.load(at) if FORM == "whole" else tl.load(at, mask, 0), at


@triton.jit
def _load_grad(address, offsets, mask, dtype: tl.constexpr, FORM: tl.constexpr):
    """Where gradients lie may change at every step, so that nothing is known about it before."""
    if FORM == "any":
        g, _ = _load(address, offsets, mask, dtype, FORM)
    elif address & 15 == 0:
        g, _ = _load(address, offsets, mask, dtype, FORM)
    else:
        g, _ = _load(address, offsets, mask, dtype, "any")
    return g


@triton.jit
def _scale(address):
    at = address.to(tl.pointer_type(tl.float32))
    return tl.load(at), at


@triton.jit
def _add(sums, terms, finite):
    """The sums with a block's terms added."""
    terms = tl.where(finite, terms, 0.0)
    return sums + tl.sum(tl.reshape(terms, (LANES, BLOCK // LANES)), 1)


@triton.jit
def _update(
    p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
    width, column, length, spacing, index,
    weight, fade, newest, momentum, mean_share, shrink, eps, decay, sign,
    agreement, product, roots,
    ROOT: tl.constexpr, SQUARES: tl.constexpr, PULLS: tl.constexpr, HOLDS: tl.constexpr,
    AVERAGES: tl.constexpr, ANCHORED: tl.constexpr, HAS_OFFSET: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, LOW_BIT: tl.constexpr, PLAIN: tl.constexpr, SHRINKS: tl.constexpr,
    NO_EPS: tl.constexpr, FORM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One block of `width` coordinates, the first at this column of its row of the parameter.

    `weight`, `fade` and `newest` are what `factors` gives. FORM "whole": it is full and lies on
    16-byte boundaries; "even": its width is a multiple of 16. Returns the three sums with this
    block added, if SUMS.
    """
    code = tl.arange(0, BLOCK)
    place = code
    part = share(momentum, AVERAGES)
    # For "even" in a form that tells the compiler that 16 neighbours are in or out together.
    mask = code // 16 < width // 16 if FORM == "even" else code < width
    if FORM == "whole":
        mask = None
    if FORM == "any":
        if spacing != 1:  # channels last
            within = column + code
            place += within % spacing * (length // spacing) + within // spacing - within
    p, p_at = _load(p_at, place, mask, P, FORM)
    g = _load_grad(g_at, place, mask if FORM == "even" else code < width, G, FORM)
    r_code, r_at = _load(r_at, code, mask, tl.uint8, FORM)
    r_scale, r_scale_at = _scale(r_scale_at)
    if HAS_OFFSET:
        m_code, m_at = _load(m_at, code, mask, tl.int8, FORM)
        m_code = m_code.to(tl.int32)
        m_scale, m_scale_at = _scale(m_scale_at)
    else:
        m_code = 0
    if PULLS or ANCHORED:
        x0, x0_at = _load(x0_at, code, mask, tl.int16 if P == tl.float32 else P, FORM)
        x0_scale, x0_scale_at = _scale(x0_scale_at)
    random = mixed(index.to(tl.uint32)) + code.to(tl.uint32) * WEYL

    p, loss_g = p.to(tl.float32), g.to(tl.float32)
    g, x = loss_g, p
    if not PLAIN:
        loss_g = loss_g * sign
        g = loss_g + p * decay
    if SHRINKS and not AVERAGES:
        x = p * shrink
    root = decode_root(r_code, m_code, r_scale, HAS_OFFSET)
    weighted = g * weight
    if HAS_OFFSET:
        m = integer(m_code >> 1)
        decayed_m = m * m_scale if AVERAGES else m * (m_scale * shrink)
    if SQUARES == "weighted":
        growth = weighted * g
        v = raised(root, growth, ROOT)
        new_root = short_root(v, ROOT, NO_EPS)
        # Not changed by rounding alone, nor by a growth that the logarithm would take for 0.
        new_root = tl.where(growth < SMALLEST, root, new_root)
    else:
        v = add_square(power(root, ROOT), weight, g, fade, newest, SQUARES)
        new_root = root_of_any(v, ROOT, NO_EPS)
    force = weighted
    if PULLS or ANCHORED:
        x0 = integer(x0) if P == tl.float32 else x0.to(tl.float32)
        away = x0 * (x0_scale * shrink) - x
        if HAS_OFFSET:
            away = away - decayed_m
        away = tl.where(r_code == 0, 0.0, away)  # d_k = x_0 - z_k
        if PULLS:
            force = tl.fma(-away, new_root - root, weighted)
        if SHRINKS:
            if shrink != 1:
                tl.store(x0_scale_at, x0_scale * shrink)
    # z_k - z_{k+1} = (λ_k g_k - d_k (r_{k+1} - r_k)) / (r_{k+1} + ε)
    move = force * inverse(new_root + eps, NO_EPS) + 0.0
    if AVERAGES and SHRINKS:  # z alone decays, in proportion to y
        move += p * (1 - shrink)
    if SUMS:
        finite = new_root < float("inf")
        start = m * m_scale if HAS_OFFSET else 0.0
        start = tl.where(r_code == 0, start, x0 * x0_scale - p)  # x_0 - x_k
        new_away = away + move
        if not PLAIN:  # decay counts only where it makes the product smaller
            loss_g = tl.where(p * start < 0, g, loss_g)
        agreement = _add(agreement, loss_g * weight * start, finite)  # λ_k g_k (x_0 - x_k)
        length = tl.abs(new_away) if ANCHORED else new_away * new_away
        product = _add(product, (new_root + eps) * length, finite)
        roots = _add(roots, new_root, finite)
    least_scale = r_scale if SQUARES == "weighted" else 0 * r_scale
    r_code, r_scale = encode_root(new_root, random, least_scale, LOW_BIT)
    tl.store(r_at, (r_code >> 1).to(tl.uint8), mask)
    tl.store(r_scale_at, r_scale)
    ones = tl.zeros_like(move) + 1
    if AVERAGES:
        x = tl.fma(move, ones * (momentum - 1), x)
        ahead = move * momentum - decayed_m  # β (x_k - z_{k+1})
        reach, kept = mean_share, 1 - mean_share
        reach_in_part = mean_share + part * kept
    else:
        ahead = move - decayed_m if HAS_OFFSET else move  # x_k - z_{k+1}
        if HOLDS:
            momentum = tl.where(is_held(momentum, ahead, g), 1.0, momentum)
        reach, kept = 1 - momentum, momentum
        reach_in_part = 1 - (1 - part) * momentum
    if HAS_OFFSET and P == tl.float32:
        m_code, m_scale, m = encode_offset(ahead * -kept, random)
        # x_{k+1} and its part of the way to z_{k+1}, from which the decoded offset leads back.
        reached = tl.fma(-ahead, ones * reach_in_part, x)
        if AVERAGES:  # factors below 0 would make 0 of -0
            reached = tl.where(ahead == 0, x, reached)
        new = reached - m * (m_scale * part)
        if AVERAGES:
            new = tl.where(m == 0, reached, new)
    else:
        new = tl.fma(-ahead, ones * reach, x)
        if AVERAGES:
            x, ahead = new, ahead * kept
        if P != tl.float32:
            new = rounded(new, random, P)
        if HAS_OFFSET:
            m_code, m_scale, _ = encode_offset((x - new) - ahead, random)
    if HAS_OFFSET:  # m_{k+1} = z_{k+1} - x_{k+1}
        tl.store(m_at, (m_code << 1 | r_code & LOW_BIT).to(tl.int8), mask)
        tl.store(m_scale_at, m_scale)
    tl.store(p_at, new.to(P), mask)
    return agreement, product, roots


@triton.jit
def _step_blocks(
    p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
    todo, column, length, spacing, index,
    weight, fade, newest, momentum, mean_share, shrink, eps, decay, sign,
    ROOT: tl.constexpr, SQUARES: tl.constexpr, PULLS: tl.constexpr, HOLDS: tl.constexpr,
    AVERAGES: tl.constexpr, ANCHORED: tl.constexpr, HAS_OFFSET: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, LOW_BIT: tl.constexpr, PLAIN: tl.constexpr, SHRINKS: tl.constexpr,
    NO_EPS: tl.constexpr, FORM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """As many blocks as there are to do; the addresses are those of the first."""
    zeros = tl.zeros((LANES,), tl.float32)
    agreement, product, roots = zeros, zeros, zeros
    for _ in range(0, todo):
        width = BLOCK if FORM == "whole" else tl.minimum(length - column, BLOCK)
        agreement, product, roots = _update(
            p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
            width, column, length, spacing, index, weight, fade, newest, momentum, mean_share,
            shrink, eps, decay, sign, agreement, product, roots,
            ROOT, SQUARES, PULLS, HOLDS, AVERAGES, ANCHORED, HAS_OFFSET, P, G, LOW_BIT, PLAIN,
            SHRINKS, NO_EPS, FORM, SUMS,
        )  # fmt: skip
        if FORM != "whole":
            column += width
            column = tl.where(column == length, 0, column)
        index += width
        p_at += width * (P.primitive_bitwidth // 8)
        g_at += width * (G.primitive_bitwidth // 8)
        m_at, r_at, x0_at = m_at + width, r_at + width, x0_at + 2 * width
        m_scale_at, r_scale_at, x0_scale_at = m_scale_at + 4, r_scale_at + 4, x0_scale_at + 4
    return agreement, product, roots


@triton.jit(
    do_not_specialize=[
        *("n_rows", "span", "lr", "momentum", "shrink", "mean_share", "eps", "decay", "sign"),
    ]
)
def step_coded_units(
    rows, grads, units, ticket, n_rows: "i32", span: "i32",
    lr: "i64", momentum: "i64", shrink: "i64", mean_share: "i64", eps: "i64", decay: "i64",
    sign: "i64", lr_at, momentum_at, shrink_at, mean_share_at, found_inf, grad_scale, sums,
    ROOT: tl.constexpr, GROWTH_ROOT: tl.constexpr, SQUARES: tl.constexpr, PULLS: tl.constexpr,
    HOLDS: tl.constexpr,
    RELATIVE: tl.constexpr,  # noqa: ARG001  of codes, the offset always is
    AVERAGES: tl.constexpr, ANCHORED: tl.constexpr, HAS_OFFSET: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, ALL_WHOLE: tl.constexpr, LOW_BIT: tl.constexpr, PLAIN: tl.constexpr,
    SHRINKS: tl.constexpr, NO_EPS: tl.constexpr,
):  # fmt: skip
    """One unit of `span` blocks; else as `step_units`.

    ALL_WHOLE: all blocks of all parameters are "whole", which spares a fifth of the registers.
    LOW_BIT: 1 if the offset's code has the lowest bit of the root's, 0 without momentum. PLAIN:
    without coupled decay, maximize or a GradScaler; SHRINKS: with decoupled decay. NO_EPS: ε may be
    0, or as good as 0.
    """
    S: tl.constexpr = tl.float32
    eps, decay, sign = number(eps, S), number(decay, S), number(sign, S)
    lr = number(lr, S) if lr_at is None else tl.load(lr_at).to(S)
    momentum = number(momentum, S) if momentum_at is None else tl.load(momentum_at).to(S)
    shrink = number(shrink, S) if shrink_at is None else tl.load(shrink_at).to(S)
    mean_share = number(mean_share, S) if mean_share_at is None else tl.load(mean_share_at).to(S)
    if grad_scale is not None:
        sign = sign / tl.load(grad_scale).to(S)
    finite = True if found_inf is None else tl.load(found_inf) == 0
    if finite:
        row = tl.load(units + 2 * tl.program_id(0))
        block = tl.load(units + 2 * tl.program_id(0) + 1) * span
        at = rows + row * ROW
        k = tl.load(tl.load(at + COUNT).to(tl.pointer_type(tl.float32)))
        weight, fade, newest = factors(lr, k, GROWTH_ROOT, SQUARES)
        blocks, length = tl.load(at + 8).to(tl.int32), tl.load(at + 9).to(tl.int32)
        spacing = tl.load(at + 11).to(tl.int32)
        in_row = (length + BLOCK - 1) // BLOCK
        column = block % in_row * BLOCK
        start = (block // in_row).to(tl.int64) * length + column
        seed = mixed(k.to(tl.int32).to(tl.uint32))
        index = (tl.load(at + 10) + start + seed).to(tl.int32)
        p_at = tl.load(at) + start * (P.primitive_bitwidth // 8)
        g_at = tl.load(grads + row) + start * (G.primitive_bitwidth // 8)
        m_at, m_scale_at = tl.load(at + 1) + start, tl.load(at + 2) + block * 4
        r_at, r_scale_at = tl.load(at + 3) + start, tl.load(at + 4) + block * 4
        x0_at, x0_scale_at = tl.load(at + 5) + 2 * start, tl.load(at + 6) + block * 4
        even = (((p_at | m_at | r_at | x0_at | length) & 15) == 0) & (spacing == 1)
        todo = tl.minimum(span, blocks - block)
        if ALL_WHOLE:
            agreement, product, roots = _step_blocks(
                p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
                todo, column, length, spacing, index, weight, fade, newest, momentum, mean_share,
                shrink, eps, decay, sign,
                ROOT, SQUARES, PULLS, HOLDS, AVERAGES, ANCHORED, HAS_OFFSET, P, G, LOW_BIT, PLAIN,
                SHRINKS, NO_EPS, "whole", sums is not None,
            )  # fmt: skip
        elif even & (length % BLOCK == 0):
            agreement, product, roots = _step_blocks(
                p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
                todo, column, length, spacing, index, weight, fade, newest, momentum, mean_share,
                shrink, eps, decay, sign,
                ROOT, SQUARES, PULLS, HOLDS, AVERAGES, ANCHORED, HAS_OFFSET, P, G, LOW_BIT, PLAIN,
                SHRINKS, NO_EPS, "whole", sums is not None,
            )  # fmt: skip
        elif even:
            agreement, product, roots = _step_blocks(
                p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
                todo, column, length, spacing, index, weight, fade, newest, momentum, mean_share,
                shrink, eps, decay, sign,
                ROOT, SQUARES, PULLS, HOLDS, AVERAGES, ANCHORED, HAS_OFFSET, P, G, LOW_BIT, PLAIN,
                SHRINKS, NO_EPS, "even", sums is not None,
            )  # fmt: skip
        else:
            agreement, product, roots = _step_blocks(
                p_at, g_at, m_at, m_scale_at, r_at, r_scale_at, x0_at, x0_scale_at,
                todo, column, length, spacing, index, weight, fade, newest, momentum, mean_share,
                shrink, eps, decay, sign,
                ROOT, SQUARES, PULLS, HOLDS, AVERAGES, ANCHORED, HAS_OFFSET, P, G, LOW_BIT, PLAIN,
                SHRINKS, NO_EPS, "any", sums is not None,
            )  # fmt: skip
        if sums is not None:
            store_sums(sums, agreement, product, roots)
        increment_counts(rows, n_rows, ticket, BLOCK, ROW, COUNT)
