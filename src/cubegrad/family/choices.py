"""The three choices of a method: λ_k, d_{k+1} and c_k, as functions of a group's options."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Group = dict[str, Any]

# λ_k for k = 0, 1, …
WEIGHTS: dict[str, Callable[[Group, int], float]] = {
    "one": lambda _, __: 1.0,  # 1
    "lr": lambda group, _: float(group["lr"]),  # γ_k
    "power": lambda group, k: float(group["lr"]) * (k + 1) ** float(group["power"]),  # γ_k (k+1)^p
}


def _mean_weight(_: Group, k: int) -> float:
    """Γ(k+3/2) / (Γ(3/2) k!), which is nearly √(k+1): 1, 3/2, 15/8, …"""
    return math.exp(math.lgamma(k + 1.5) - math.lgamma(1.5) - math.lgamma(k + 1))


# The weights of the squares by denominator, where they are not λ.
SQUARE_WEIGHTS: dict[str, Callable[[Group, int], float]] = {
    "unweighted": WEIGHTS["lr"],
    "mean": _mean_weight,
}

# c_k for k = 1, 2, …
AVERAGING: dict[str, Callable[[Group, int], float]] = {
    "none": lambda _, __: 1.0,  # x_k = z_k
    "constant": lambda group, _: 1 - float(group["momentum"]),  # c
    "uniform": lambda _, k: 1 / k,  # x_k is the mean of z_1 … z_k
    "theory": lambda _, k: 1.5 / (k + 1.5),  # (3/2)/(k+3/2)
    "polynomial": lambda group, k: (group["r"] + 1) / (k + group["j"] + group["r"]),
}


class Sums(NamedTuple):
    """The sums after step k, which a denominator is computed from."""

    k: int
    grad_sq_sum: Tensor  # ν_{k+1} = ∑ λ_i g_i², or with the weights of SQUARE_WEIGHTS
    weight_sum: float  # Λ_{k+1}: these weights added up


def _weighted_numerator(_: Group, sums: Sums) -> Tensor:
    scale = (sums.k + 1) / sums.weight_sum if sums.weight_sum else 0.0  # if Λ is 0, so is ν
    return (sums.grad_sq_sum * scale).sqrt()


def _theory(group: Group, sums: Sums) -> Tensor:
    """∛(λ_{k+1} G² + ν_{k+1}). The theory has a constant γ; under a schedule λ_{k+1} uses γ_k."""
    next_weight = WEIGHTS[group["weights"]](group, sums.k + 1)
    grad_bound = torch.as_tensor(group["grad_bound"]).to(sums.grad_sq_sum)
    return (next_weight * grad_bound**2 + sums.grad_sq_sum) ** (1 / 3)


# d_{k+1}
DENOMINATORS: dict[str, Callable[[Group, Sums], Tensor]] = {
    "one": lambda _, sums: torch.ones_like(sums.grad_sq_sum),  # 1
    "sqrt_step": lambda _, sums: torch.full_like(sums.grad_sq_sum, (sums.k + 1) ** 0.5),  # √(k+1)
    "unweighted": lambda _, sums: sums.grad_sq_sum.sqrt(),  # √(∑ γ_i g_i²)
    "weighted": lambda _, sums: sums.grad_sq_sum.sqrt(),  # √(∑ λ_i g_i²)
    "weighted_numerator": _weighted_numerator,  # √(k+1) √(∑ λ_i g_i² / ∑ λ_i)
    "mean": lambda _, sums: (sums.grad_sq_sum / sums.weight_sum).sqrt(),  # √(∑ w_i g_i² / ∑ w_i)
    "cube_root": lambda _, sums: sums.grad_sq_sum ** (1 / 3),  # ∛(∑ λ_i g_i²)
    "theory": _theory,  # ∛(λ_{k+1} G² + ∑ λ_i g_i²)
}

CHOICES = {
    "weights": tuple(WEIGHTS),
    "denominator": tuple(DENOMINATORS),
    "averaging": tuple(AVERAGING),
    "centre": ("x0", "origin"),
}
