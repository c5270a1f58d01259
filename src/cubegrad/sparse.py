"""Row-sparse gradients: the rows that have one, cut out for a dense step and put back.

Without momentum a coordinate with no gradient does not move, so a step over the touched rows
is the whole step. Momentum moves every coordinate, and so does coupled decay.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cubegrad.options import Hyper
from cubegrad.states import real


def refuse(name: str, method: str, momentum: float, weight_decay: float, decoupled: bool) -> None:
    """Say what stands in the way of a sparse gradient for the parameter `name`."""
    if method != "madgrad":
        raise RuntimeError(
            f"{name} has a sparse gradient, and MirrorMADGRAD changes grad_sq_sum in every row "
            "at every step; use MADGRAD with momentum=0, or sparse=False in the embedding"
        )
    if momentum != 0:
        raise RuntimeError(
            f"{name} has a sparse gradient, and momentum={momentum} moves every row at every "
            "step; put it in a group with momentum=0, or use sparse=False in the embedding"
        )
    if weight_decay and not decoupled:
        raise RuntimeError(
            f"{name} has a sparse gradient, and weight_decay={weight_decay} gives every row one; "
            "put it in a group with weight_decay=0 or decoupled_weight_decay=True"
        )


def step(
    dense_step: Callable[..., None],
    method: str,
    h: Hyper,
    param: Tensor,
    grad: Tensor,
    count: Tensor,
    buffers: Sequence[Tensor],
) -> None:
    """Run `dense_step` over the touched rows. Decoupled decay alone costs all rows."""
    grad = grad.coalesce()
    rows = tuple(grad.indices())
    if h.shrink is not None:
        grad_sum = buffers[0]
        # Rows without a gradient shrink as in a dense step: x and s, and with them x_0.
        untouched = torch.ones(param.shape[: len(rows)], dtype=torch.bool, device=param.device)
        untouched[rows] = False
        for tensor in (param, grad_sum):
            tensor[untouched] = tensor[untouched] * h.shrink
    held = [param, *buffers]
    cut = [tensor[rows] for tensor in held]
    x, *state = map(real, cut)
    dense_step(method, h, [x], [real(grad.values())], [count], [[tensor] for tensor in state])
    for tensor, values in zip(held, cut, strict=True):
        tensor[rows] = values
