"""The estimate of lr="auto" advanced by one step, in one launch."""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from cubegrad.backends.triton import on_device
from cubegrad.backends.triton.kernel import cbrt
from cubegrad.distance import FIELDS, SUMS
from cubegrad.rule import Rule

COLUMNS, TERMS = tl.constexpr(len(FIELDS)), tl.constexpr(len(SUMS))
DISTANCE = tl.constexpr(FIELDS.index("distance"))
AGREEMENT = tl.constexpr(FIELDS.index("agreement"))
LR = tl.constexpr(FIELDS.index("lr"))
WEIGHT_SUM = tl.constexpr(FIELDS.index("weight_sum"))
STEP = tl.constexpr(FIELDS.index("step"))
UNCOUNTED = tl.constexpr(FIELDS.index("uncounted"))
ROOT_SUM = tl.constexpr(FIELDS.index("root_sum"))

COMPILED: dict[tuple[Any, ...], Callable[..., None]] = {}  # kernels by their variants


def advance(
    rule: Rule,
    values: Tensor,
    sums: Tensor,
    rates: Tensor,
    shrinks: Tensor | None,
    counts: Tensor,
    found_inf: Tensor | None,
) -> None:
    """See `advance_estimate` for the arguments."""
    if found_inf is not None:
        found_inf = found_inf.to(values.device, float32, non_blocking=True)
    groups = len(values)
    block = triton.next_power_of_2(groups)
    anchored = rule.anchored
    arguments = (values, sums, rates, shrinks, counts, groups, found_inf, block, anchored)
    variant = (values.device, shrinks is None, found_inf is None, block, anchored)
    with on_device(values.device):
        if variant in COMPILED:
            COMPILED[variant](*arguments)
            return
        compiled = advance_estimate[(1,)](*arguments, num_warps=1)
        if compiled is not None:
            COMPILED[variant] = compiled[(1, 1, 1)]


@triton.jit(do_not_specialize=["n_groups"])
def advance_estimate(
    values, sums, rates, shrinks, counts, n_groups: "i32", found_inf,
    GROUPS: tl.constexpr, ANCHORED: tl.constexpr,
):  # fmt: skip
    """distance.advance, for all groups in one program; ANCHORED as the rule.

    A row of `values` is as distance.FIELDS names it, a row of `sums` the step sums of that group.
    `rates` are the groups' γ with their factors, `shrinks` what decoupled decay multiplies by. The
    sums are set to 0 for the next step.
    """
    group = tl.arange(0, GROUPS)
    real = group < n_groups
    row, own = values + COLUMNS * group, sums + TERMS * group
    newest = tl.load(own, real, 0.0)
    newest = tl.where(newest - newest == 0, newest, 0.0)  # one that is not finite is left out
    product = tl.sum(tl.load(own + 1, real, 0.0), 0)  # ⟨s_{k+1}, x_0 - z_{k+1}⟩
    roots = tl.load(own + 2, real, 0.0)
    total = tl.sum(roots, 0)
    norm = tl.sqrt(product) * tl.sqrt(total)  # ‖s‖ √tr A
    if ANCHORED:
        norm = product / tl.where(total > 0, total, 1.0)  # the mean of |x_0 - z_{k+1}|
        newest = tl.where(total > 0, newest / tl.where(total > 0, total, 1.0), 0.0)
    for column in tl.static_range(TERMS):
        tl.store(own + column, tl.zeros((GROUPS,), tl.float64), real)
    finite = True
    if found_inf is not None:
        finite = tl.load(found_inf) == 0
    if finite:
        distance, k = tl.load(values + DISTANCE), tl.load(values + STEP)
        agreement = tl.load(row + AGREEMENT, real, 0.0)
        if shrinks is not None:
            agreement *= tl.load(shrinks + group, real, 1.0)
        agreement += newest  # Σ λ_i ⟨g_i, x_0 - x_i⟩
        bound = tl.where(norm > 0, tl.sum(agreement, 0) / norm, 0.0)
        if ANCHORED:
            bound = tl.where(bound < norm, bound, norm)
        distance = tl.where(bound > distance, bound, distance)
        lr = distance
        if not ANCHORED:
            lr = rate_with_scale(values, row, rates, counts, group, real, roots, k, distance)
        every = tl.zeros((GROUPS,), tl.float64)
        tl.store(row + DISTANCE, every + distance, real)
        tl.store(row + AGREEMENT, agreement, real)
        tl.store(row + LR, every + lr, real)
        tl.store(row + STEP, every + (k + 1), real)
        tl.store(row + ROOT_SUM, roots, real)


@triton.jit
def rate_with_scale(values, row, rates, counts, group, real, roots, k, distance):
    """MADGRAD's rate from D and the size of gradients; stores what that is found from."""
    uncounted = tl.load(values + UNCOUNTED)
    weight = tl.load(rates + group, real, 0.0) * tl.sqrt(k + 1)
    count = tl.load(counts + group, real, 0.0)
    weight_sum = tl.load(row + WEIGHT_SUM, real, 0.0)  # Σ w_i λ_i
    old_roots = tl.load(row + ROOT_SUM, real, 0.0)
    before = tl.sum(group_scales(old_roots, weight_sum), 0)
    after = tl.sum(group_scales(roots, weight_sum + weight), 0)
    without = tl.sum(group_scales(old_roots, weight_sum + weight), 0)
    steps = (k + 1) * (1 - uncounted)
    share = tl.sqrt(steps) * (after - without) / tl.where(before > without, before - without, 1.0)
    share = tl.where(share > 0, share, 0.0)
    share = tl.where((before > without) & (share < 1), share, 1.0)  # w_k = min(1, √n_k g_k²/H²)
    uncounted = 1 - (steps + share) / (k + 2)
    weight_sum += share * weight
    scales = tl.sum(group_scales(roots, weight_sum), 0)
    coordinates = tl.sum(tl.where(weight_sum > 0, count, 0.0), 0)
    root = tl.sqrt(tl.where(scales > 0, scales / coordinates, 1.0))  # √H^{2/3}
    estimated = distance * tl.sqrt(distance) / (root * tl.sqrt(root))  # γ = D^{3/2} H^{-1/2}
    tl.store(row + WEIGHT_SUM, weight_sum, real)
    tl.store(row + UNCOUNTED, weight_sum * 0 + uncounted, real)
    return tl.where(scales > 0, estimated * tl.sqrt(1 - uncounted), tl.load(values + LR))


@triton.jit
def group_scales(roots, weight_sum):
    """Σ_i H_i^{2/3} of each group, where H_i² is the mean of g_i² weighted by λ."""
    weighted = weight_sum > 0
    return tl.where(weighted, roots / cbrt(tl.where(weighted, weight_sum, 1.0)), 0.0)
