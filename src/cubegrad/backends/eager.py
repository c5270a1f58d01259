"""rule.py, tensor by tensor: the reference every other backend is judged by."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cubegrad import distance as distances
from cubegrad import rule
from cubegrad.options import Hyper
from cubegrad.state.layout import dtype_of


class TorchFunctions:
    """The rule's elementary functions, with a usable derivative where the value is 0.

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

    @staticmethod
    def larger(a: Tensor, b: Tensor | float) -> Tensor:
        return torch.fmax(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))


def step(
    method: str,
    h: Hyper,
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    buffers: Sequence[list[Tensor]],
) -> None:
    update = getattr(rule, method)
    for param, grad, count, *state in zip(params, grads, steps, *buffers, strict=True):
        dtype = dtype_of(param)
        k = count.to(dtype) if h.on_device else count.item()
        x, *rest = param, *state
        if h.differentiable:  # autograd saves what the rule reads, so it must not be written over
            x, *rest = (tensor.clone() for tensor in (param, *state))
        x, grad = x.to(dtype), grad.to(dtype)
        if h.grad_scale is not None:
            grad = grad / h.grad_scale.to(grad).reshape(())
        values = update(TorchFunctions, h, k, x, grad, *rest)
        if h.sums is not None:
            with torch.no_grad():
                totals = distances.step_sums(
                    TorchFunctions, h, k, x, grad, tuple(rest[:2]), values[1:3], *rest[2:]
                )
                h.sums.add_(torch.stack(totals).to(h.sums.device))
        passed = None if h.found_inf is None else h.found_inf.to(param.device).reshape(()) == 0
        for target, value in zip((param, *state), values, strict=True):
            if value is not target:
                target.copy_(value if passed is None else torch.where(passed, value, target))
        count += 1 if passed is None else passed.to(count)
