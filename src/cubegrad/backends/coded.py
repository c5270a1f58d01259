"""A step on codes, parameter by parameter and piece by piece, for eager and foreach.

Every intermediate result is a tensor, so a large parameter is stepped a few rows at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cubegrad import codec
from cubegrad.backends.batch import Batch, Row
from cubegrad.functions import CodedFunctions
from cubegrad.options import Hyper
from cubegrad.state import blocks
from cubegrad.state.layout import Layout


def step(batch: Batch, h: Hyper) -> None:
    for row in batch.rows:
        finite = None if h.found_inf is None else h.found_inf.to(row.param.device).reshape(()) == 0
        for piece in _pieces(row):
            _step(batch.layout, piece, h, finite)
        row.step.add_(1 if finite is None else finite.to(row.step))


def _pieces(row: Row) -> Iterator[Row]:
    """Rows of the parameter with all that belongs to them."""
    if torch.compiler.is_compiling():  # the compiler makes few intermediate results
        yield row
        return
    first = row.first_index
    for param, grad, *buffers in blocks.row_pieces(row.param, row.grad, *row.buffers):
        yield Row(param, grad, row.step, tuple(buffers), first)
        first += param.numel()


def _step(layout: Layout, row: Row, h: Hyper, finite: Tensor | None) -> None:
    param, grad, step, buffers, first = row
    k = step.to(torch.float32) if h.on_device else step.item()
    x, g = (blocks.split(tensor.to(torch.float32)) for tensor in (param, grad))
    if h.grad_scale is not None:
        g = g / h.grad_scale.to(g).reshape(())
    old = layout.codes(buffers)
    new_x, new, sums = codec.step(
        CodedFunctions,
        layout.rule,
        h,
        k,
        codec.block_bits(step.to(torch.int32), blocks.split(blocks.indices(param, first))),
        x,
        g,
        blocks.codes_in_blocks(old),
        str(param.dtype).removeprefix("torch."),
        with_sums=h.sums is not None,
    )
    if sums is not None:
        h.sums.add_(torch.stack(sums).to(h.sums.device))
    for target, value in ((param, new_x), *zip(old, new, strict=True)):
        if target is not None:
            stored = blocks.joined(value, target.shape).to(target.dtype)
            target.copy_(stored if finite is None else torch.where(finite, stored, target))
