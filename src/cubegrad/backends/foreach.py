"""rule.py over lists of tensors, in slices that keep the temporaries small.

The rule makes a new list for every intermediate result. Running it slice by slice bounds what
is alive at once to one copy of the parameters, and on a CPU keeps it in the cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import distance as distances
from cubegrad import rule
from cubegrad.options import Hyper
from cubegrad.state.layout import dtype_of

# Lists of the state's dtype alive at the rule's peak, measured over all options: the two
# new sums, a displacement in the making, shrunk copies, and copies of half-precision input.
ALIVE_AT_PEAK = 10
# What malloc still serves from its heap: on 2 cores of a Xeon with 2 MiB of L2 each, 2^23 float32
# elements took 155 ms a step in slices of 2^15, 650 ms in slices of 2^16 or whole.
CPU_SLICE_BYTES = 2**17
# Below this many elements the temporaries do not matter.
SMALLEST_SLICE = 2**12

Row = tuple[Tensor, ...]  # param, grad, step, and the buffers of one parameter


class TensorList:
    """Operators over a list of tensors; the other operand is a TensorList or one number for all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __neg__(self) -> "TensorList":
        return TensorList(torch._foreach_neg(self.tensors))

    def __add__(self, other: Any) -> "TensorList":
        return TensorList(torch._foreach_add(self.tensors, _operand(other)))

    def __sub__(self, other: Any) -> "TensorList":
        return TensorList(torch._foreach_sub(self.tensors, _operand(other)))

    def __mul__(self, other: Any) -> "TensorList":
        return TensorList(torch._foreach_mul(self.tensors, _operand(other)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "TensorList":
        return TensorList(torch._foreach_div(self.tensors, _operand(other)))

    def __pow__(self, exponent: float) -> "TensorList":
        return TensorList(torch._foreach_pow(self.tensors, exponent))


def _operand(other: Any) -> Any:
    return other.tensors if isinstance(other, TensorList) else other


class ListFunctions:
    """The rule's elementary functions over a TensorList."""

    def __init__(self, eps: float) -> None:
        self.may_divide_by_zero = eps < 1e-30  # above, 1/(∛ν + ε) is finite in float32

    def cbrt(self, x: TensorList) -> TensorList:
        return x ** (1 / 3)

    def quotient(self, numerator: TensorList, denominator: TensorList) -> TensorList:
        inverses = torch._foreach_reciprocal(denominator.tensors)
        if self.may_divide_by_zero:
            for inverse in inverses:
                torch.nan_to_num_(inverse, nan=torch.nan, posinf=0.0)
        return numerator * TensorList(inverses)

    def where_finite(self, x: TensorList, value: TensorList) -> TensorList:
        pairs = zip(x.tensors, value.tensors, strict=True)
        return TensorList([torch.where(torch.isfinite(a), b, 0.0) for a, b in pairs])

    def total(self, x: TensorList) -> Tensor:
        return torch.stack([tensor.sum(dtype=torch.float64) for tensor in x.tensors]).sum()


def _alike(h: Hyper, rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows that one list operation may take: one device, one dtype, one k if k is a number."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        param, grad, step = row[:3]
        k = None if h.on_device else step.item()
        alike.setdefault((param.device, param.dtype, grad.dtype, k), []).append(row)
    yield from alike.values()


def _pieces(row: Row, size: int) -> Iterator[Row]:
    """Views of about `size` elements that cover the row's tensors."""
    param, _, step, *_ = row
    if param.numel() <= size:
        yield row
        return
    tensors = [tensor for tensor in row if tensor is not step]
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = [tensor.view(-1) for tensor in tensors]
    shape = tensors[0].shape
    dim = max(range(len(shape)), key=shape.__getitem__)
    length = max(1, size * shape[dim] // param.numel())
    for views in zip(*(torch.split(tensor, length, dim) for tensor in tensors), strict=True):
        yield (*views[:2], step, *views[2:])


def _slices(rows: list[Row]) -> Iterator[list[Row]]:
    """The rows cut and gathered into lists of a bounded number of elements."""
    param = rows[0][0]
    total = sum(row[0].numel() for row in rows)
    size = total * param.element_size() // (ALIVE_AT_PEAK * dtype_of(param).itemsize)
    if param.device.type == "cpu":
        size = min(size, CPU_SLICE_BYTES // dtype_of(param).itemsize)
    size = max(size, SMALLEST_SLICE)
    gathered: list[Row] = []
    elements = 0
    for row in rows:
        for piece in _pieces(row, size):
            if gathered and elements + piece[0].numel() > size:
                yield gathered
                gathered, elements = [], 0
            gathered.append(piece)
            elements += piece[0].numel()
    yield gathered


def _run(method: str, h: Hyper, rows: list[Row]) -> None:
    params, grads, steps, *state = map(list, zip(*rows, strict=True))
    dtype = dtype_of(params[0])
    k = TensorList([step.to(dtype) for step in steps]) if h.on_device else steps[0].item()
    old = [TensorList(tensors) for tensors in ([p.to(dtype) for p in params], *state)]
    grad = TensorList([g.to(dtype) for g in grads])
    xp = ListFunctions(h.eps)
    new = getattr(rule, method)(xp, h, k, old[0], grad, *old[1:])
    if h.sums is not None:
        totals = distances.step_sums(xp, h, k, old[0], grad, tuple(old[1:3]), new[1:3], *old[3:])
        h.sums.add_(torch.stack(totals).to(h.sums.device))
    for target, before, after in zip((params, *state), old, new, strict=True):
        if after is not before:
            torch._foreach_copy_(target, after.tensors)


def step(
    method: str,
    h: Hyper,
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    buffers: Sequence[list[Tensor]],
) -> None:
    for rows in _alike(h, zip(params, grads, steps, *buffers, strict=True)):
        for part in _slices(rows):
            _run(method, h, part)
    torch._foreach_add_(steps, 1)
