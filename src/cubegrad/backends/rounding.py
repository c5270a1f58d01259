"""Half-precision parameters rounded at random, for eager and foreach."""

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
