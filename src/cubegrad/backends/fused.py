"""A fused step over any batch: checked, copied into dense memory where need be, launched.

A kernel trusts the addresses that it is given, so everything about them is checked here.
"""

from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cubegrad import codec
from cubegrad.backends import spans
from cubegrad.backends.batch import Batch, Launch, Row, Spans
from cubegrad.backends.native import tensors
from cubegrad.options import Hyper
from cubegrad.state.layout import Layout


def checked(batch: Batch) -> Batch:
    """The batch with the memory of its tensors; refuses what a kernel must not touch."""
    rows = [
        # Forward-mode differentiation makes zeros that have no memory.
        row._replace(grad=row.grad.clone()) if row.grad._is_zerotensor() else row
        for row in batch.rows
    ]
    return batch._replace(rows=rows, spans=[_checked_spans(batch.layout, row) for row in rows])


def step(make: Callable[[Batch], Launch], batch: Batch, h: Hyper) -> Launch | None:
    """Update the batch; returns the launch if it used every tensor where it lies."""
    if batch.spans is None:
        batch = checked(batch)
    rows, places = batch.rows, batch.spans or []
    written, read = [span for _, *own in places for span in own], [grad for grad, *_ in places]
    launch: Launch | None = None
    if spans.any_overlap(written, read):
        for row, (grad, *others) in zip(rows, places, strict=True):
            if any(spans.overlap(grad, other) for other in others):
                row = row._replace(grad=row.grad.clone())
            _launch(make, batch._replace(rows=[row]), h)
    else:
        launch = _launch(make, batch, h)
    if launch is not None:
        launch.written, launch.grad_lengths = spans.packed(written), spans.lengths(read)
    tensors.bump_versions([row.param for row in rows if not row.param.is_inference()])
    return launch


def _checked_spans(layout: Layout, row: Row) -> Spans:
    """Where the gradient, the parameter, the step count and the buffers lie."""
    param, grad, step, buffers, _ = row
    for tensor, (shape, dtype) in zip(buffers, layout.forms(param), strict=True):
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, param.device):
            raise _wrong_state(tensor, shape, dtype, param.device)
    if step.shape or step.dtype != torch.float32:
        raise _wrong_state(step, torch.Size(), torch.float32, param.device)
    touched = (grad, param, step, *buffers)
    places = spans.of(touched)
    for tensor, (start, end) in zip(touched, places, strict=True):
        storage = tensor.untyped_storage()
        offset = tensor.storage_offset() * tensor.element_size()
        if end > start and (start == 0 or offset + end - start > storage.nbytes()):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has a storage of {storage.nbytes()} "
                "bytes, which must hold all its elements; resize the storage back before the step"
            )
    return places


def _wrong_state(
    tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> ValueError:
    return ValueError(
        f"a state tensor is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, and "
        f"must be {dtype} of shape {tuple(shape)} on {device}; put states in with "
        "load_state_dict, which converts them"
    )


def _launch(make: Callable[[Batch], Launch], batch: Batch, h: Hyper) -> Launch | None:
    fits, rounds = FITS[batch.layout.form], batch.rounds
    dense = [_dense(row, fits(row, rounds)) for row in batch.rows]
    launch = make(batch._replace(rows=dense))
    table, _ = launch.table(array("q", (row.grad.data_ptr() for row in dense)).tobytes())
    launch.run(h, table)
    copied = False
    for row, used in zip(batch.rows, dense, strict=True):
        targets = (row.param, row.step, *row.buffers)
        for target, source in zip(targets, (used.param, used.step, *used.buffers), strict=True):
            if source is not target:
                target.copy_(source)
                copied = True
        copied = copied or used.grad is not row.grad
    return None if copied else launch


def without_grads(batch: Batch) -> list[Any]:
    """What a launch must keep alive to be repeated; the gradients are the user's to free."""
    return [(row.param, row.step, row.buffers) for row in batch.rows]


def addresses(batch: Batch) -> list[tuple[int, ...]]:
    """A kernel's table.

    Of each row the parameter, three buffers (0 for one that is not kept), the step count and the
    number of elements; if it is rounded at random, also the length of a row of the parameter, the
    first index and the spacing.
    """
    rows, rounds = [], batch.rounds
    for param, _, step, buffers, first in batch.rows:
        state = [buffer.data_ptr() for buffer in buffers] + [0] * (3 - len(buffers))
        numbers = (0, 0, 1)
        if rounds:
            numbers = (codec.row_length(param.shape), first, spacing(param))
        rows.append((param.data_ptr(), *state, step.data_ptr(), param.numel(), *numbers))
    return rows


def coded_addresses(batch: Batch) -> list[tuple[int, ...]]:
    """A kernel's table for states in codes.

    Of each row the parameter, the fields of `codec.Codes` (0 for None), the step count, the number
    of blocks, the length of a row of the parameter, the first index and the spacing. Where rows are
    whole blocks, each block is a row: so no length exceeds an int32.
    """
    rows = []
    for param, _, step, buffers, first in batch.rows:
        codes = batch.layout.codes(buffers)
        pointers = (0 if code is None else code.data_ptr() for code in codes)
        length, apart = codec.row_length(param.shape), spacing(param)
        if apart == 1 and length % codec.BLOCK == 0:
            length = codec.BLOCK
        numbers = (codes.root_scale.numel(), length, first, apart)
        rows.append((param.data_ptr(), *pointers, step.data_ptr(), *numbers))
    return rows


def spacing(param: Tensor) -> int:
    """How far apart in its row lie coordinates that are neighbours in memory: 1 if contiguous.

    With channels last, the channels are innermost. Coordinate j then lies at
    (j % spacing) * channels + j // spacing.
    """
    return 1 if param.is_contiguous() else param[0, 0].numel()


def _dense(row: Row, fits: bool) -> Row:
    """The row if its tensors lie as a kernel wants them, else with copies that do."""
    param, grad, step, buffers, _ = row
    step = step.to(param.device)
    if fits:
        return row._replace(step=step)
    param, grad, *dense = (t.resolve_neg().contiguous() for t in (param, grad, *buffers))
    return row._replace(param=param, grad=grad, step=step, buffers=tuple(dense))


PLAIN = (torch.contiguous_format,)
FORMATS = {  # by the number of dimensions
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}


def _lie_as(form: torch.memory_format, *tensors: Tensor) -> bool:
    return all(t.is_contiguous(memory_format=form) and not t.is_neg() for t in tensors)


def _sums_fit(row: Row, rounds: bool) -> bool:
    """On one device, densely and alike.

    A parameter that is rounded by its indices has to be contiguous or channels last.
    """
    param, grad, _, buffers, _ = row
    like_param = (buffer for buffer in buffers if buffer.shape == param.shape)
    if not spans.are_aligned(param, grad, *like_param):
        return False
    return not rounds or any(_lie_as(form, param) for form in FORMATS.get(param.dim(), PLAIN))


def _codes_fit(row: Row, rounds: bool) -> bool:
    """The blocks of codes follow the indices, so they have to be contiguous."""
    del rounds  # the parameter always is
    param, grad, _, buffers, _ = row
    forms = FORMATS.get(param.dim(), PLAIN)
    contiguous = all(buffer.is_contiguous() for buffer in buffers)
    return contiguous and any(_lie_as(form, param, grad) for form in forms)


# By the form of the state: the kernel's table, where a row of it has the size of its tensor, and
# whether a row's tensors lie as the kernel wants them.
TABLES = {"sums": addresses, "codes": coded_addresses}
SIZES = {"sums": 5, "codes": 8}
FITS = {"sums": _sums_fit, "codes": _codes_fit}
