"""A learning rate estimated from the distance to a solution: arrays in, numbers out.

A step adds three sums over all coordinates (`step_sums`). From their history follows a lower bound
on the distance D between x_0 and a solution. docs/algorithm.md derives all of it.

MADGRAD's rate follows from D and the typical size H of a gradient (`learning_rate`). Steps whose
gradients have all but vanished do not count (`share_counted`). A step of MADGRADW has no scale: its
rate is D itself.

`xp` brings the functions that array libraries spell differently, as in rule.py, and more:
`xp.total(v)` is the sum of all elements, `xp.where_finite(r, v)` is v, or 0 where r is not finite,
`xp.smaller(v, w)` has the smaller of each two elements; and of numbers, `xp.larger(a, b)` is the
larger one (a if b is NaN), `xp.sqrt(a)` the root, and `xp.where(c, a, b)` is a if c, else b.
"""

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

from cubegrad import rule as rules
from cubegrad.rule import MADGRAD, Rule, State

Array = Any
Scalar = Any
Hyper = Any
Namespace = Any

# What is kept of the estimate for a group of parameters.
FIELDS = ("distance", "agreement", "lr", "weight_sum", "step", "uncounted", "root_sum")
# What a step adds up: λ_k ⟨g_k, x_0 - x_k⟩, ⟨s_{k+1}, x_0 - z_{k+1}⟩ and Σ_i ∛ν_i; of MADGRADW the
# second is Σ_i √ν_i |x_0 - z_{k+1}|_i, the third Σ_i √ν_i.
SUMS = ("agreement", "product", "root_sum")


def step_sums(
    xp: Namespace,
    rule: Rule,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    before: State,
    new_param: Array,
    after: State,
) -> tuple[Scalar, Scalar, Scalar]:
    """What a step from one state to the next adds to the estimate.

    A coordinate whose ν is no longer finite is left out, or it would stop the estimate.
    """
    if "initial_param" in before:
        away = before["initial_param"] - param
    else:
        away = rules.displacement(xp, rule, h.eps, before)  # x_0 - x_k, where x is z
    root = rules.root(xp, rule, after["grad_sq_sum"])
    agreement = xp.where_finite(root, _agreements(xp, rule, h, step, param, grad, away))
    if rule.anchored:
        pushed: Any = after["initial_param"] - new_param - after["dual_offset"]  # x_0 - z_{k+1}
    else:
        pushed = after["grad_sum"]
    return xp.total(agreement), *_root_sums(xp, rule, h, pushed, root)


def step_sums_from_root(
    xp: Namespace,
    rule: Rule,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    away: Array,
    root: Array,
    new_away: Array,
) -> tuple[Scalar, Scalar, Scalar]:
    """`step_sums` for `rule.step_from_root`.

    `away` is x_0 - x before the step; `root` is ∛ν and `new_away` x_0 - z after it.
    """
    agreements = _agreements(xp, rule, h, step, param, grad, away)
    length = (root + h.eps) * (abs(new_away) if rule.anchored else new_away * new_away)
    terms = agreements, length, root
    agreement, product, root_sum = (xp.total(xp.where_finite(root, term)) for term in terms)
    return agreement, product, root_sum


def _agreements(
    xp: Namespace, rule: Rule, h: Hyper, step: Scalar, param: Array, grad: Array, away: Array
) -> Array:
    """λ_k g_k (x_0 - x_k) of each coordinate; `away` is x_0 - x_k.

    Coupled decay pulls towards 0 for ever, as if the solution were there. So it counts only where
    it makes the product smaller; if it never counted, D could exceed the distance.
    """
    weight = rules.step_weight(rule, h.lr, step)
    agreements = rules.loss_gradient(h, grad) * weight * away
    if not rules.has_coupled_decay(h):
        return agreements
    return xp.smaller(agreements, rules.effective_gradient(h, param, grad) * weight * away)


def idle_sums(
    xp: Namespace, rule: Rule, h: Hyper, pushed: Array, grad_sq_sum: Array
) -> tuple[Scalar, Scalar]:
    """The last two of `step_sums`, for a parameter without a gradient; its first one is 0.

    `pushed` is how far gradients have pushed it: s, or x_0 - z of MADGRADW.
    """
    return _root_sums(xp, rule, h, pushed, rules.root(xp, rule, grad_sq_sum))


def _root_sums(
    xp: Namespace, rule: Rule, h: Hyper, pushed: Array, root: Array
) -> tuple[Scalar, Scalar]:
    if rule.anchored:
        product = abs(pushed) * (root + h.eps)
    else:
        product = pushed * xp.quotient(pushed, root + h.eps)
    totals = xp.where_finite(root, product), xp.where_finite(root, root)
    return xp.total(totals[0]), xp.total(totals[1])


def first_distance(xp: Namespace, size: Scalar) -> Scalar:
    """D_0, where the estimate starts; `size` is the rms of the weights that have a gradient."""
    return xp.larger(size * 0.02, 1e-6)  # D_0 = rms(x_0) / 50, at least 1e-6


def first_scales(xp: Namespace, grad: Array) -> Array:
    """H_i^{2/3} of each coordinate, from the first gradient."""
    root = xp.cbrt(abs(grad))  # g² could overflow
    return root * root  # |g_{0,i}|^{2/3}


def agreement(xp: Namespace, h: Hyper, so_far: Scalar, newest: Scalar) -> Scalar:
    """Σ λ_i ⟨g_i, x_0 - x_i⟩ with the newest term added.

    Decoupled decay shrinks it as it shrinks s, or the quotient of the two would grow. A term that
    is not finite is left out: the next one may be finite again.
    """
    newest = xp.where(newest - newest == 0, newest, 0.0)
    return newest + (so_far if h.shrink is None else so_far * h.shrink)


def lower_bound(
    xp: Namespace, so_far: Scalar, agreement: Scalar, product: Scalar, root_sum: Scalar
) -> Scalar:
    """D: the largest lower bound so far on the distance to a solution, in root mean square.

    With A = diag(∛ν), the method measures s in the norm of A^{-1} and x_0 - x* in that of A.
    ‖s‖ is then √⟨s, x_0 - z⟩, and ‖x_0 - x*‖ over √tr A is a root mean square with weights ∛ν.
    """
    norm = xp.sqrt(product) * xp.sqrt(root_sum)  # ‖s‖ √tr A
    return xp.larger(so_far, xp.quotient(agreement, norm))  # Σ λ_i ⟨g_i, x_0 - x_i⟩ / ‖s‖ √tr A


def learning_rate(rule: Rule, distance: Scalar, mean_scale: Scalar) -> Scalar:
    """The γ whose first step has the root mean square D: γ^{2/3} |g|^{1/3}, or γ of MADGRADW."""
    if rule.anchored:
        return distance
    return distance**1.5 * mean_scale**-0.75  # γ = D^{3/2} H^{-1/2}, H^{2/3} the mean of H_i^{2/3}


def share_counted(
    xp: Namespace,
    step: Scalar,
    uncounted: Scalar,
    before: Scalar,
    without: Scalar,
    after: Scalar,
) -> tuple[Scalar, Scalar]:
    """w_k, how much of a step counts, from 0 to 1, and the share of the steps that does not.

    `uncounted` is that share before the step, and `before` is H^{2/3}. Adding λ_k to Σλ makes it
    `after`, and would make it `without` if the gradient were 0. It stays the same if g_k² is H².
    """
    steps = (step + 1) * (1 - uncounted)  # n_k
    square = xp.quotient(after - without, before - without)  # g_k²/H²
    share = xp.where(before > without, square * xp.sqrt(steps), 1.0)
    share = xp.where(share < 1, xp.larger(share, 0.0), 1.0)  # w_k = min(1, √n_k g_k²/H²)
    return share, 1 - (steps + share) / (step + 2)  # n_{k+1} = n_k + w_k


def advance(
    xp: Namespace,
    rule: Rule,
    rows: Sequence[Sequence[Scalar]],
    sums: Sequence[Sequence[Scalar]],
    factors: Sequence[Scalar],
    counts: Sequence[int],
    hypers: Sequence[Hyper],
) -> list[list[Scalar]]:
    """The estimate after a step: for each group a row as `FIELDS` names it.

    Distance, lr, step and uncounted are the same in all rows. Each group has its own sums from the
    step, its factor on lr and its count of coordinates.
    """
    if rule.anchored:
        return _advance_free_of_scale(xp, rows, sums, hypers)
    return _advance_with_scale(xp, rows, sums, factors, counts, hypers)


def _advance_free_of_scale(
    xp: Namespace,
    rows: Sequence[Sequence[Scalar]],
    sums: Sequence[Sequence[Scalar]],
    hypers: Sequence[Hyper],
) -> list[list[Scalar]]:
    """D is the largest Σ γ_i ⟨g_i, x_0 - x_i⟩ / Σ√ν_i over m, the mean of |x_0 - z| by √ν, so far.

    Divided by Σ√ν, gradients count by their direction, as in a step, whatever their size is now.
    It counts up to m: weights that are clipped after each step keep z near x_0 while the sum grows
    on. The sum of weights and the share of uncounted steps stay 0.
    """
    distance, _, _, unused, step, uncounted, _ = rows[0]
    newest, products, roots = zip(*sums, strict=True)
    old_agreements = [row[FIELDS.index("agreement")] for row in rows]
    by_size = [xp.quotient(one, sum(roots)) for one in newest]
    agreements = list(map(partial(agreement, xp), hypers, old_agreements, by_size))
    mean = xp.quotient(sum(products), sum(roots))
    bound = xp.quotient(sum(agreements), mean)
    distance = xp.larger(distance, xp.where(bound < mean, bound, mean))
    own = zip(agreements, roots, strict=True)
    return [[distance, mine, distance, unused, step + 1, uncounted, root] for mine, root in own]


def _advance_with_scale(
    xp: Namespace,
    rows: Sequence[Sequence[Scalar]],
    sums: Sequence[Sequence[Scalar]],
    factors: Sequence[Scalar],
    counts: Sequence[int],
    hypers: Sequence[Hyper],
) -> list[list[Scalar]]:
    """Of MADGRAD. A group whose factor has been 0 so far says nothing about gradients' size."""
    distance, _, lr, _, step, uncounted, _ = rows[0]
    newest, products, roots = zip(*sums, strict=True)
    _, old_agreements, _, old_weights, _, _, old_roots = zip(*rows, strict=True)
    weights = [rules.step_weight(MADGRAD, lr * factor, step) for factor in factors]
    weight_sums = list(map(operator.add, old_weights, weights))
    pairs = (old_roots, old_weights), (old_roots, weight_sums), (roots, weight_sums)
    share, uncounted = share_counted(xp, step, uncounted, *scales(xp, *pairs))
    weight_sums = [old + share * new for old, new in zip(old_weights, weights, strict=True)]
    agreements = list(map(partial(agreement, xp), hypers, old_agreements, newest))
    distance = lower_bound(xp, distance, sum(agreements), sum(products), sum(roots))
    (scale,) = scales(xp, (roots, weight_sums))
    coordinates = sum((mine > 0) * count for mine, count in zip(weight_sums, counts, strict=True))
    mean_scale = scale / (coordinates + (coordinates == 0)) + (scale == 0)
    estimated = learning_rate(MADGRAD, distance, mean_scale) * xp.sqrt(1 - uncounted)
    lr = xp.where(scale > 0, estimated, lr)
    own = zip(agreements, weight_sums, roots, strict=True)
    return [[distance, mine, lr, total, step + 1, uncounted, root] for mine, total, root in own]


def scales(xp: Namespace, *pairs: tuple[Sequence[Scalar], Sequence[Scalar]]) -> list[Scalar]:
    """Σ_i H_i^{2/3} of all groups, for each pair of their Σ_i ∛ν_i and their Σλ.

    H_i² is the mean of g_i² weighted by λ: ν_i = H_i² Σλ. A group without weights has none.
    """
    totals = []
    for roots, weights in pairs:
        total: Scalar = 0
        for root, weight in zip(roots, weights, strict=True):
            scale = root * (weight + (weight == 0)) ** (-1 / 3)
            total = total + xp.where(weight > 0, scale, 0.0)
        totals.append(total)
    return totals
