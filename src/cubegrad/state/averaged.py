"""Schedule-free runs: x, the mean of all z, in the place of y, where gradients are taken; and back.

z stays where it is, so what is kept beside the parameter becomes z - x, and z - y again.
"""

from typing import Any

import torch
from torch import Tensor

from cubegrad import codec, sharding
from cubegrad.functions import CodedFunctions
from cubegrad.state import blocks, layout
from cubegrad.state.layout import Layout


@torch.no_grad()
def exchange(
    param: Tensor, held: Layout, entries: dict[str, Any], before: float, after: float
) -> None:
    """Move a parameter from (1-β) z + β x to that with another β; at 1 it is x.

    What is kept is β (z - x). In place, since a captured CUDA graph may hold the tensors.
    """
    part = 1 - after / before
    value = layout.as_real(sharding.local(param.detach()))
    buffers = [layout.as_real(sharding.local(entries[name])) for name in held.buffers]
    if not value.dim():
        value, *buffers = value[None], *(buffer[None] for buffer in buffers)
    for piece, *own in blocks.row_pieces(value, *buffers):
        if held.is_coded:
            codes = held.codes(own)
            offset = codec.decode(CodedFunctions, blocks.codes_in_blocks(codes)).offset
            assert offset is not None
            assert codes.offset_scale is not None
            piece.copy_(piece + blocks.joined(offset, piece.shape) * part)
            codes.offset_scale.mul_(1 - part)
        else:
            offset = own[held.buffers.index("dual_offset")]
            old = piece.to(offset.dtype, copy=True)
            piece.copy_(old + offset * part)
            offset += old - piece
