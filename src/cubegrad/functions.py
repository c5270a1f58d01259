"""The elementary functions that the maths calls `xp`, for tensors and for numbers."""

import math

import torch
from torch import Tensor


class TorchFunctions:
    """Of tensors, with a usable derivative where the value is 0.

    At ν = 0 the derivative of ∛ν is infinite and would meet a zero from g² as ∞·0 = NaN. Taken
    as 0 it leaves the true derivative of the step, λ/ε, when ε > 0.
    """

    @staticmethod
    def cbrt(x: Tensor) -> Tensor:
        zero = x == 0
        return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** (1 / 3))

    @staticmethod
    def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
        infinite = torch.isinf(1 / denominator)
        inverse = torch.where(infinite, 0.0, 1 / torch.where(infinite, 1.0, denominator))
        return numerator * inverse

    @staticmethod
    def total(x: Tensor) -> Tensor:
        return x.sum(dtype=torch.float64)

    @staticmethod
    def where_finite(x: Tensor, value: Tensor) -> Tensor:
        return torch.where(torch.isfinite(x), value, 0.0)

    where = staticmethod(torch.where)
    sqrt = staticmethod(torch.sqrt)
    isfinite = staticmethod(torch.isfinite)
    round = staticmethod(torch.round)

    @staticmethod
    def larger(a: Tensor, b: Tensor | float) -> Tensor:
        return torch.fmax(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))

    @staticmethod
    def bits(x: Tensor) -> Tensor:
        return x.view(torch.int32)

    @staticmethod
    def from_bits(x: Tensor) -> Tensor:
        return x.view(torch.float32)

    @staticmethod
    def float32(codes: Tensor) -> Tensor:
        return codes.to(torch.float32)

    @staticmethod
    def int32(codes: Tensor) -> Tensor:
        return codes.to(torch.int32)

    @staticmethod
    def largest(x: Tensor) -> Tensor:
        """Of each block, which is the last axis."""
        return x.amax(dim=-1, keepdim=True)


class NumberFunctions:
    """Of Python's own numbers, which are faster than tensors of one number each."""

    @staticmethod
    def quotient(numerator: float, denominator: float) -> float:
        return numerator / denominator if denominator > 0 else 0.0

    @staticmethod
    def where(condition: bool, a: float, b: float) -> float:
        return a if condition else b

    sqrt = staticmethod(math.sqrt)
    larger = staticmethod(max)  # max(a, nan) is a
