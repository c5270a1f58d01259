"""Half-precision parameters rounded at random, for eager and foreach, and to nearest."""

from typing import Any

import torch
from torch import Tensor

from cubegrad import codec
from cubegrad.backends.batch import Row
from cubegrad.functions import CodedFunctions
from cubegrad.state import blocks


def rounded(x: Tensor, row: Row, momentum: Any) -> Tensor:
    """The row's new parameter, in float32, rounded to numbers of the parameter's dtype."""
    param, step = row.param, row.step.to(torch.int32)
    if isinstance(momentum, Tensor):
        momentum = momentum.to(step.device)
    name = str(param.dtype).removeprefix("torch.")
    index = blocks.indices(param, row.first_index)
    new: Tensor = codec.round_param(CodedFunctions, name, x, step, index, momentum)
    return new


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a number of half precision, still in float32.

    The compiler leaves out a conversion to half precision and back, which would round.
    """
    if not torch.compiler.is_compiling() or x.requires_grad:
        return x.to(dtype).to(x.dtype)
    places = 16 if dtype == torch.bfloat16 else 13  # that float32 has more
    bits = x.view(torch.int32)
    up = (1 << (places - 1)) - 1 + ((bits >> places) & 1)  # ties to even
    rounded = ((bits + up) & -(1 << places)).view(torch.float32)
    if dtype == torch.float16:
        # Below 2^-14 the last place is 2^-24, whatever the exponent.
        rounded = torch.where(abs(x) < 2.0**-14, torch.round(x * 2.0**24) * 2.0**-24, rounded)
        rounded = torch.where(abs(rounded) > 65504.0, rounded * torch.inf, rounded)
    return torch.where(torch.isfinite(x), rounded, x)
