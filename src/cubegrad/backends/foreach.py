"""rule.py over lists of tensors, in slices that keep the temporaries small.

The rule makes a new list for every intermediate result. Running it slice by slice bounds what
is alive at once to one copy of the parameters, and on a CPU keeps it in the cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import distance, rule
from cubegrad.backends import coded, rounding
from cubegrad.backends.batch import Batch, Row
from cubegrad.functions import CodedFunctions
from cubegrad.options import Hyper
from cubegrad.state.layout import state_dtype

NAME = "foreach"
FUSED = False

# Lists of the state's dtype that are alive at the rule's peak, measured over all options: the two
# new sums, parts of a displacement, shrunk copies, and copies of half-precision input.
ALIVE_AT_PEAK = 13
# Small enough for malloc to serve from its heap: on 2 cores of a Xeon with 2 MiB of L2 each, 2^23
# float32 elements took 155 ms a step in slices of 2^15, 650 ms in slices of 2^16 or whole.
CPU_SLICE_BYTES = 2**17
# Below this many elements the temporaries do not matter.
SMALLEST_SLICE = 2**12


class TensorList:
    """Operators over a list of tensors; the other operand is a TensorList or one number for all."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __neg__(self) -> "TensorList":
        return TensorList(torch._foreach_neg(self.tensors))

    def __abs__(self) -> "TensorList":
        return TensorList(torch._foreach_abs(self.tensors))

    def __add__(self, other: Any) -> "TensorList":
        return TensorList(torch._foreach_add(self.tensors, _operand(other)))

    def __sub__(self, other: Any) -> "TensorList":
        return TensorList(torch._foreach_sub(self.tensors, _operand(other)))

    def __rtruediv__(self, number: float) -> "TensorList":
        return TensorList([number / tensor for tensor in self.tensors])

    def __le__(self, number: Any) -> "TensorList":
        return TensorList([tensor <= number for tensor in self.tensors])

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

    def sqrt(self, x: TensorList) -> TensorList:
        return TensorList(torch._foreach_sqrt(x.tensors))

    def sign(self, x: TensorList) -> TensorList:
        return TensorList(torch._foreach_sign(x.tensors))

    def where(self, condition: TensorList, a: TensorList, b: Any) -> TensorList:
        pairs = zip(condition.tensors, a.tensors, strict=True)
        return TensorList([torch.where(where, tensor, b) for where, tensor in pairs])

    def quotient(self, numerator: TensorList, denominator: TensorList) -> TensorList:
        inverses = torch._foreach_reciprocal(denominator.tensors)
        if self.may_divide_by_zero:
            for inverse in inverses:
                torch.nan_to_num_(inverse, nan=torch.nan, posinf=0.0)
        return numerator * TensorList(inverses)

    def where_finite(self, x: TensorList, value: TensorList) -> TensorList:
        pairs = zip(x.tensors, value.tensors, strict=True)
        return TensorList([torch.where(torch.isfinite(a), b, 0.0) for a, b in pairs])

    def smaller(self, a: TensorList, b: TensorList) -> TensorList:
        return TensorList(torch._foreach_minimum(a.tensors, b.tensors))

    def total(self, x: TensorList) -> Tensor:
        return torch.stack([tensor.sum(dtype=torch.float64) for tensor in x.tensors]).sum()


class ExactListFunctions(ListFunctions):
    """The same last bit however the tensors are cut; see `CodedFunctions`."""

    def cbrt(self, x: TensorList) -> TensorList:
        return TensorList([CodedFunctions.cbrt(tensor) for tensor in x.tensors])


def checked(batch: Batch) -> Batch:
    return batch


def step(batch: Batch, h: Hyper) -> None:
    STEPS[batch.layout.form](batch, h)


def _step_sums(batch: Batch, h: Hyper) -> None:
    for rows in _by_step([row.with_dimensions() for row in batch.rows], h):
        for part in _slices(rows, by_rows=batch.rounds):
            _run(batch, part, h)
    torch._foreach_add_([row.step for row in batch.rows], 1)


def _by_step(rows: list[Row], h: Hyper) -> list[list[Row]]:
    """Rows with one k, where k is a number and not a tensor."""
    if h.on_device:
        return [rows]
    groups: dict[float, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.step.item(), []).append(row)
    return list(groups.values())


def _slices(rows: list[Row], by_rows: bool) -> Iterator[list[Row]]:
    """The rows cut and gathered into lists of a bounded number of elements."""
    param = rows[0].param
    itemsize = state_dtype(param).itemsize
    total = sum(row.param.numel() for row in rows)
    size = total * param.element_size() // (ALIVE_AT_PEAK * itemsize)
    if param.device.type == "cpu":
        size = min(size, CPU_SLICE_BYTES // itemsize)
    size = max(size, SMALLEST_SLICE)
    gathered: list[Row] = []
    elements = 0
    for row in rows:
        for piece in _pieces(row, size, by_rows):
            if gathered and elements + piece.param.numel() > size:
                yield gathered
                gathered, elements = [], 0
            gathered.append(piece)
            elements += piece.param.numel()
    yield gathered


def _pieces(row: Row, size: int, by_rows: bool) -> Iterator[Row]:
    """Views of about `size` elements that cover the row's tensors.

    With `by_rows` they are cut along the first dimension, so that their indices follow each other.
    """
    param, grad, step, buffers, first = row
    if param.numel() <= size:
        yield row
        return
    tensors = [param, grad, *buffers]
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = [tensor.view(-1) for tensor in tensors]
    shape = tensors[0].shape
    dim = 0 if by_rows else max(range(len(shape)), key=shape.__getitem__)
    length = max(1, size * shape[dim] // param.numel())
    for views in zip(*(torch.split(tensor, length, dim) for tensor in tensors), strict=True):
        yield Row(views[0], views[1], step, views[2:], first)
        first += views[0].numel()


def _run(batch: Batch, rows: list[Row], h: Hyper) -> None:
    params, grads, steps, buffers, _ = zip(*rows, strict=True)
    state = [list(column) for column in zip(*buffers, strict=True)]
    dtype = state_dtype(params[0])
    k = TensorList([step.to(dtype) for step in steps]) if h.on_device else steps[0].item()
    x = TensorList([param.to(dtype) for param in params])
    names = batch.layout.buffers
    old = dict(zip(names, map(TensorList, state), strict=True))
    grad = TensorList([grad.to(dtype) for grad in grads])
    rounds = batch.rounds
    xp = (ExactListFunctions if rounds else ListFunctions)(h.eps)
    new_x, new = rule.step(xp, batch.layout.rule, h, k, x, grad, old)
    if h.sums is not None:
        sums = distance.step_sums(xp, batch.layout.rule, h, k, x, grad, old, new_x, new)
        h.sums.add_(torch.stack(sums).to(h.sums.device))
    exact = new_x
    if rounds:
        pairs = zip(new_x.tensors, rows, strict=True)
        new_x = TensorList([rounding.rounded(y, row, h.momentum) for y, row in pairs])
    torch._foreach_copy_(params, new_x.tensors)
    if params[0].dtype != dtype:
        rule.take_rounding(new, exact, TensorList([param.to(dtype) for param in params]))
    for name, targets in zip(names, state, strict=True):
        if new[name] is not old[name]:
            torch._foreach_copy_(targets, new[name].tensors)


# Codes in pieces that are too large for lists to gain anything.
STEPS = {"sums": _step_sums, "codes": coded.step}
