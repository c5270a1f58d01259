"""The elementary functions that the maths calls `xp`, for tensors and for numbers."""

import math

import torch
from torch import Tensor


class TorchFunctions:
    """Of tensors, with a usable derivative where the value is 0.

    At ν = 0 the derivative of a root is infinite and would meet a zero from g² as ∞·0 = NaN. Taken
    as 0 it leaves the true derivative of the step, λ/ε, when ε > 0.
    """

    @staticmethod
    def sqrt(x: Tensor) -> Tensor:
        zero = x == 0
        return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())

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

    smaller = staticmethod(torch.minimum)
    where = staticmethod(torch.where)
    sign = staticmethod(torch.sign)
    isfinite = staticmethod(torch.isfinite)
    round = staticmethod(torch.round)

    @staticmethod
    def larger(a: Tensor, b: Tensor | float) -> Tensor:
        """`b` where `a` is NaN. A number is not made a tensor: copying it would wait for a GPU."""
        return torch.fmax(a, b.to(a)) if isinstance(b, Tensor) else torch.where(a > b, a, b)

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


class CodedFunctions(TorchFunctions):
    """Of float32 tensors, for codes: the same last bit however the tensor is cut.

    torch's x ** (1 / 3) rounds the last elements of a tensor differently from those that it
    computes by vectors, and so depends on the shard and on the number of threads. Sums, products,
    quotients and square roots do not.
    """

    @staticmethod
    def sqrt(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def cbrt(x: Tensor) -> Tensor:
        """By Newton's method, for x >= 0; measured to be within 0.73 of the last place."""
        tiny = x < 2.0**-100  # whose exponent the first guess could not take from the bits
        scaled = torch.where(tiny, x * 2.0**96, x)
        thirds = torch.div(scaled.view(torch.int32), 3, rounding_mode="floor")
        y = (thirds + 709921077).view(torch.float32)  # within 4 %
        for _ in range(3):
            y = y - (y - scaled / (y * y)) * (1 / 3)
        y = torch.where(tiny, y * 2.0**-32, y)
        return torch.where((x > 0) & torch.isfinite(x), y, x)


class NumberFunctions:
    """Of Python's own numbers, which are faster than tensors of one number each."""

    quotient = staticmethod(lambda numerator, d: numerator / d if d > 0 else 0.0)
    where = staticmethod(lambda condition, a, b: a if condition else b)
    sqrt = staticmethod(math.sqrt)
    larger = staticmethod(max)  # max(a, nan) is a
