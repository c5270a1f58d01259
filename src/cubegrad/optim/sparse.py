"""Row-sparse gradients: the rows that have one, cut out for a dense step and put back.

Without momentum a coordinate with no gradient does not move, so a step over the touched rows
is the whole step. Momentum moves every coordinate, and so does decay; decoupled decay is done with
the gradient made dense, coupled decay is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cubegrad.options import Hyper, name_of
from cubegrad.state.layout import keeps_initial_param, real


def refuse(method: str, groups: list[dict[str, Any]]) -> None:
    """Before anything changes: a sparse gradient whose step would not be sparse."""
    for group in groups:
        for index, param in enumerate(group["params"]):
            if param.grad is not None and param.grad.is_sparse:
                reason = _obstacle(method, group)
                if reason:
                    raise RuntimeError(
                        f"{name_of(group, index)} has a sparse gradient, and {reason}"
                    )


def _obstacle(method: str, group: dict[str, Any]) -> str | None:
    if method != "madgrad":
        return (
            "MirrorMADGRAD changes grad_sq_sum in every row at every step; use MADGRAD with "
            "momentum=0, or sparse=False in the embedding"
        )
    if group["auto_lr"]:
        return (
            "lr='auto' needs sums over all rows; use sparse=False in the embedding, or a number "
            "for lr"
        )
    momentum, decay = float(group["momentum"]), group["weight_decay"]
    if momentum != 0:
        return (
            f"momentum={momentum} moves every row at every step; put it in a group with "
            "momentum=0, or use sparse=False in the embedding"
        )
    if decay and not (group["decoupled_weight_decay"] or group["decoupled_lr"]):
        return (
            f"weight_decay={decay} gives every row one; put it in a group with weight_decay=0 or "
            "decoupled_weight_decay=True"
        )
    return None


def rows_suffice(
    h: Hyper, momentum: float | Tensor, param: Tensor, buffers: Sequence[Tensor]
) -> bool:
    """Whether rows without a gradient stay as they are.

    Not under decoupled decay, and not while x may still be on its way to z: with x_0 held although
    a momentum of 0 does not need it.
    """
    if h.shrink is not None or isinstance(momentum, Tensor):
        return False
    return len(buffers) == 2 or keeps_initial_param(momentum, param)


def step(
    dense_step: Callable[..., None],
    method: str,
    h: Hyper,
    param: Tensor,
    grad: Tensor,
    count: Tensor,
    buffers: Sequence[Tensor],
) -> None:
    """Run `dense_step` over the touched rows."""
    grad = grad.coalesce()
    rows = tuple(grad.indices())
    held = [param, *buffers]
    cut = [tensor[rows] for tensor in held]
    x, *state = map(real, cut)
    dense_step(method, h, [x], [real(grad.values())], [count], [[tensor] for tensor in state])
    for tensor, values in zip(held, cut, strict=True):
        tensor[rows] = values


def step_rows(
    dense_step: Callable[..., None],
    method: str,
    h: Hyper,
    momentum: float | Tensor,
    columns: Sequence[list[Tensor]],
) -> list[list[Tensor]]:
    """Step what only its rows are needed for; returns the other columns, with dense gradients."""
    rest = []
    for param, grad, count, *held in zip(*columns, strict=True):
        if grad.is_sparse and rows_suffice(h, momentum, param, held):
            step(dense_step, method, h, param, grad, count, held)
        else:
            # Coalesced first: a GPU adds half-precision duplicates otherwise in another order.
            dense = grad.coalesce().to_dense() if grad.is_sparse else grad
            rest.append((param, dense, count, *held))
    return [list(column) for column in zip(*rest, strict=True)] or [[] for _ in columns]
