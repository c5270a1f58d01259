"""A fused step over any tensors, once: the way of the first step and of all that do not repeat."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad.backends import overlap
from cubegrad.backends.launching import ADDRESS, Launch
from cubegrad.backends.native import tensors as look
from cubegrad.options import Hyper
from cubegrad.state.layout import dtype_of, lie_alike, lies_in_storage

Row = tuple[Tensor, ...]  # a parameter, its gradient, its step count and its buffers


def step_once(
    make: Callable[..., Launch],
    method: str,
    h: Hyper,
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    buffers: Sequence[list[Tensor]],
) -> None:
    """Any tensors, once: with tables for the occasion, and copies of what does not lie densely."""
    # Forward-mode differentiation makes zeros that have no memory.
    grads = [grad.clone() if grad._is_zerotensor() else grad for grad in grads]
    rows = list(zip(params, grads, steps, *buffers, strict=True))
    for row in rows:
        _check(*row)
    for together in _batches(rows):
        flat = [_flattened(row) for row in together]
        columns = [list(column) for column in zip(*flat, strict=True)]
        launch = make(method, columns[0], columns[1][0].dtype, columns[2], columns[3:])
        launch.alive = columns
        table, _ = launch.table(array("q", map(ADDRESS, columns[1])).tobytes())
        launch.run(h, table)
        for row, copy in zip(together, flat, strict=True):
            for target, source in zip(row, copy, strict=True):
                if source is not target and target is not row[1]:
                    target.copy_(source)
    look.bump_versions([param for param in params if not param.is_inference()])


def _batches(rows: list[Row]) -> list[list[Row]]:
    """Rows that one launch may take: of one device and dtype; one by one if they share memory."""
    written = [overlap.span(tensor) for param, _, *state in rows for tensor in (param, *state)]
    if overlap.any_meet(written, [overlap.span(row[1]) for row in rows]):
        return [[_apart(row)] for row in rows]
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        alike.setdefault((row[0].device, row[0].dtype, row[1].dtype), []).append(row)
    return list(alike.values())


def _apart(row: Row) -> Row:
    """The row with a gradient that shares no memory with what is written to."""
    param, grad, *state = row
    if any(overlap.meet(overlap.span(grad), overlap.span(t)) for t in (param, *state)):
        grad = grad.clone()
    return (param, grad, *state)


def _check(param: Tensor, grad: Tensor, count: Tensor, *state: Tensor) -> None:
    """A kernel trusts its addresses, so what somebody put into the state is looked at first."""
    expected = (param.shape, dtype_of(param), param.device)
    found = [(tensor.shape, tensor.dtype, tensor.device) for tensor in state]
    found += [(count.shape, count.dtype, param.device)]
    wanted = [expected] * len(state) + [(torch.Size(), torch.float32, param.device)]
    for have, want in zip(found, wanted, strict=True):
        if have != want:
            shape, dtype, device = have
            raise ValueError(
                f"a state tensor is {dtype} of shape {tuple(shape)} on {device}, and must be "
                f"{want[1]} of shape {tuple(want[0])} on {want[2]}; put states in with "
                "load_state_dict, which converts them"
            )
    for tensor in (param, grad, count, *state):
        if not lies_in_storage(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has a storage of "
                f"{tensor.untyped_storage().nbytes()} bytes, which must hold all its elements; "
                "resize the storage back before the step"
            )


def _flattened(row: Row) -> Row:
    """The row if its tensors lie densely and alike on one device, else copies that do."""
    param, grad, count, *state = row
    count = count.to(param.device)
    if lie_alike(param, grad, *state):
        return (param, grad, count, *state)
    return (param.contiguous(), grad.contiguous(), count, *(t.contiguous() for t in state))
