"""The paper's bounds, step sizes and minimisers as functions.

`distance` is ‖x_0 - x_*‖₂, `grad_bound` the G of ‖∇f(x,ξ)‖_∞ ≤ G, `dimension` the number D of
coordinates, `lr` the constant γ. All are about `family.TheoreticalMADGRAD` unless they say
otherwise. Where a formula in the paper has a slip, the function follows the proof;
docs/algorithm.md lists the slips.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from cubegrad.family.checks import GRAD_BOUND_REMEDY

__all__ = [
    "adagrad_bound",
    "adagrad_lr",
    "adaptive_bound",
    "amsgrad_bound",
    "anytime_bound",
    "convergence_bound",
    "cube_root_minimiser",
    "effective_regulariser",
    "optimal_lr",
    "pull",
    "sharp_adaptive_bound",
    "square_root_minimiser",
    "support_function",
    "time_varying_bound",
    "time_varying_lr",
]


def convergence_bound(k: int, distance: float, grad_bound: float, dimension: int) -> float:
    """E[f(x_k) - f(x_*)] ≤ 6 ‖x_0-x_*‖ G √D / √k with `optimal_lr`: the convergence theorem."""
    _check_step(k, 1)
    _check_positive(distance=distance, grad_bound=grad_bound, dimension=dimension)
    return 6 * distance * grad_bound * math.sqrt(dimension / k)


def optimal_lr(k: int, distance: float, grad_bound: float, dimension: int) -> float:
    """γ = ‖x_0-x_*‖^{3/2} / (k^{3/4} D^{3/4} G^{1/2}), the theorem's learning rate for k steps."""
    _check_step(k, 1)
    _check_positive(distance=distance, grad_bound=grad_bound, dimension=dimension)
    return math.pow(distance, 1.5) / (math.pow(k * dimension, 0.75) * math.sqrt(grad_bound))


def anytime_bound(k: int, lr: float, distance: float, grad_bound: float, dimension: int) -> float:
    """E[f(x_k) - f(x_*)] ≤ 3 γ^{2/3} G^{4/3} D + 3 γ^{-2/3} G^{2/3} ‖x_0-x_*‖² / (k+1).

    The line of the theorem's proof before γ is chosen: it holds for every γ and every k ≥ 0.
    `optimal_lr(k + 1, …)` minimises it.
    """
    _check_step(k, 0)
    _check_positive(lr=lr, distance=distance, grad_bound=grad_bound, dimension=dimension)
    scaled = math.cbrt(lr * lr * grad_bound)  # γ^{2/3} G^{1/3}
    return 3 * grad_bound * (scaled * dimension + distance**2 / (scaled * (k + 1)))


def adaptive_bound(
    k: int, lr: float, offset: Tensor, grad_sq_sum: Tensor, grad_bound: float | Tensor
) -> Tensor:
    """The bound that depends on the gradients seen; its mean over runs bounds E[f(x_k) - f(x_*)].

    3/(γ (k+1)^{3/2}) ∑_d [ λ_k ν_d^{2/3} + (x_0-x_*)_d² (λ_{k+1} G² + ν_d)^{1/3} ]

    `offset` is x_0 - x_*, `grad_sq_sum` is ν = ν_{k+1} = ∑_{i≤k} λ_i g_i², which includes the
    gradient at x_k. The sum is over the last dimension.
    """
    noise, distance = _adaptive_terms(k, lr, offset, grad_sq_sum, grad_bound)
    return (noise + distance) * (3 / (lr * math.pow(k + 1, 1.5)))


def sharp_adaptive_bound(
    k: int, lr: float, offset: Tensor, grad_sq_sum: Tensor, grad_bound: float | Tensor
) -> Tensor:
    """`adaptive_bound` before the proof rounds its constants up.

    (3/2)/(γ (k+3/2) √(k+1)) ∑_d [ 3/4 λ_k ν_d^{2/3} + 1/2 (x_0-x_*)_d² (λ_{k+1} G² + ν_d)^{1/3} ]
    """
    noise, distance = _adaptive_terms(k, lr, offset, grad_sq_sum, grad_bound)
    return (0.75 * noise + 0.5 * distance) * (1.5 / (lr * (k + 1.5) * math.sqrt(k + 1)))


def _adaptive_terms(
    k: int, lr: float, offset: Tensor, grad_sq_sum: Tensor, grad_bound: float | Tensor
) -> tuple[Tensor, Tensor]:
    """∑_d λ_k ν_d^{2/3} and ∑_d (x_0-x_*)_d² (λ_{k+1} G² + ν_d)^{1/3}."""
    _check_step(k, 0)
    _check_positive(lr=lr)
    weight, next_weight = (lr * math.sqrt(i + 1) for i in (k, k + 1))  # λ_k, λ_{k+1}
    denominator = (next_weight * grad_bound**2 + grad_sq_sum) ** (1 / 3)  # a_{k+1}
    noise = (weight * grad_sq_sum ** (2 / 3)).sum(-1)
    return noise, (offset**2 * denominator).sum(-1)


def time_varying_bound(distance: float, dimension: int, grad_bounds: Sequence[float]) -> float:
    """E[f(x_k) - f(x_*)] ≤ 6 ‖x_0-x_*‖ √D (∑_{i=0}^{k+1} √(i+1) G_i²)^{1/2} / (k+1)^{5/4}.

    With `time_varying_lr`; `grad_bounds` is G_0 … G_{k+1}, one bound a step. The proof needs
    a_k ≤ a_{k+1}, which holds if √(i+1) G_i² never falls.
    """
    k, total = _weighted_square_sum(distance, dimension, grad_bounds)
    return 6 * distance * math.sqrt(dimension * total) / math.pow(k + 1, 1.25)


def time_varying_lr(distance: float, dimension: int, grad_bounds: Sequence[float]) -> float:
    """γ^{4/3} = ‖x_0-x_*‖² / (√(k+1) D (∑_{i=0}^{k+1} √(i+1) G_i²)^{1/3})."""
    k, total = _weighted_square_sum(distance, dimension, grad_bounds)
    return math.pow(distance**2 / (math.sqrt(k + 1) * dimension * math.cbrt(total)), 0.75)


def _weighted_square_sum(
    distance: float, dimension: int, grad_bounds: Sequence[float]
) -> tuple[int, float]:
    """k and ∑_{i=0}^{k+1} √(i+1) G_i²."""
    _check_positive(distance=distance, dimension=dimension)
    _check_grad_bounds(grad_bounds)
    total = sum(math.sqrt(i + 1) * bound**2 for i, bound in enumerate(grad_bounds))
    return len(grad_bounds) - 2, total


def adagrad_bound(distance: float, dimension: int, grad_bounds: Sequence[float]) -> float:
    """E[f(x_k) - f(x_*)] ≤ 6 ‖x_0-x_*‖ √D (∑_{i=0}^{k+1} G_i²)^{1/2} / (k+1), for AdaGrad-DA.

    With `adagrad_lr`, the averaging c_k = 1/(k+1) and the denominator √(γ G² + ∑ γ g_i²).
    """
    _check_positive(distance=distance, dimension=dimension)
    _check_grad_bounds(grad_bounds)
    total = sum(bound**2 for bound in grad_bounds)
    return 6 * distance * math.sqrt(dimension * total) / (len(grad_bounds) - 1)


def adagrad_lr(distance: float, dimension: int) -> float:
    """γ = ‖x_0-x_*‖² / D, the learning rate of `adagrad_bound`. (The paper prints γ² for γ.)"""
    _check_positive(distance=distance, dimension=dimension)
    return distance**2 / dimension


def amsgrad_bound(
    k: int,
    alpha: float,
    beta1: float,
    beta2: float,
    decay: float,
    diameter: float,
    grad_bound: float,
    v_max: Tensor,
    grad_sq_sum: Tensor,
) -> float:
    """AMSGrad's bound on E ∑_{i=1}^k f(x_i) - f(x_*), as the paper quotes it from Reddi et al.

    For momentum β_1 λ^{i-1}, where λ is `decay`, and step sizes α/√i, on a domain whose diameter
    in ‖·‖_∞ is √R. `v_max` is v̂_k and `grad_sq_sum` is ∑ g_i², both per coordinate.
    """
    _check_step(k, 1)
    _check_positive(alpha=alpha, diameter=diameter, grad_bound=grad_bound)
    for name, value in {"beta1": beta1, "beta2": beta2, "decay": decay}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must be in [0, 1); use 0.9, 0.999 and 0.99")
    if not beta1**2 < beta2:
        raise ValueError(f"beta1²={beta1**2} must be < beta2={beta2}; use 0.9 and 0.999")
    ratio = beta1 / math.sqrt(beta2)  # the paper's γ
    diameter_sq = diameter**2  # R
    first = beta1 * diameter_sq * grad_bound / ((1 - beta1) ** 2 * (1 - decay) ** 2)
    second = diameter_sq * math.sqrt(k) / (alpha * (1 - beta1)) * v_max.sqrt().sum()
    third = alpha * math.sqrt(1 + math.log(k)) * grad_sq_sum.sqrt().sum()
    third = third / ((1 - beta1) ** 2 * (1 - ratio) * math.sqrt(1 - beta2))
    return float(first + second + third)


def cube_root_minimiser(grad_sq_sum: Tensor, budget: float) -> Tensor:
    """argmin_s ∑_d (∑_i g_id²)/s_d subject to ‖s‖₂² ≤ c: s_d ∝ ∛(∑_i g_id²); `budget` is c."""
    _check_positive(budget=budget)
    root = grad_sq_sum ** (1 / 3)
    return root * (budget / root.square().sum()) ** 0.5


def square_root_minimiser(grad_sq_sum: Tensor, budget: float) -> Tensor:
    """argmin_s ∑_d (∑_i g_id²)/s_d subject to ⟨1,s⟩ ≤ c: s_d ∝ √(∑_i g_id²), AdaGrad's."""
    _check_positive(budget=budget)
    root = grad_sq_sum.sqrt()
    return root * (budget / root.sum())


def support_function(grad_sum: Tensor, denominator: Tensor) -> Tensor:
    """V_A(-s) = max_x { -⟨s, x-x_0⟩ - ‖x-x_0‖_A²/2 } = ∑_d s_d²/(2 a_d), with A = diag(a)."""
    return (grad_sum.square() / (2 * denominator)).sum(-1)


def pull(k: int) -> float:
    """√(k+1) - √k: how strongly dual averaging pulls to x_0.

    With γ = 1 it is SGD with the gradient g_k + pull(k) (x_k - x_0) and the step size 1/√(k+1).
    """
    _check_step(k, 0)
    return math.sqrt(k + 1) - math.sqrt(k)


def effective_regulariser(k: int, x: Tensor, x0: Tensor) -> Tensor:
    """‖x-x_0‖² / (4√k). Its gradient is about pull(k) (x - x_0), since pull(k) ≈ 1/(2√k)."""
    _check_step(k, 1)
    return (x - x0).square().sum() / (4 * math.sqrt(k))


REMEDY = {
    "lr": "pass the constant γ, such as optimal_lr returns",
    "distance": "pass ‖x_0 - x_*‖₂",
    "grad_bound": GRAD_BOUND_REMEDY,
    "dimension": "pass the number of coordinates",
    "alpha": "pass the α of the step sizes α/√i",
    "diameter": "pass the largest distance between two points of the domain in one coordinate",
    "budget": "pass the c of the constraint",
}


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be finite and > 0; {REMEDY[name]}")


def _check_step(k: int, smallest: int) -> None:
    if not smallest <= k < math.inf:
        raise ValueError(
            f"k={k} must be finite and >= {smallest}; pass the index of the iterate x_k"
        )


def _check_grad_bounds(grad_bounds: Sequence[float]) -> None:
    if len(grad_bounds) < 2:
        raise ValueError(
            f"grad_bounds={list(grad_bounds)} must be two or more numbers; pass G_0 … G_{{k+1}}"
        )
    for bound in grad_bounds:
        _check_positive(grad_bound=bound)
