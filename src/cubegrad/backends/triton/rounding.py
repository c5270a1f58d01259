"""Parameters of half precision rounded at random, in Triton's language."""

import triton
import triton.language as tl

from cubegrad.backends.triton.codec import mixed, rounded


@triton.jit
def place_of(rows, ROW: tl.constexpr, units, unit_length, momentum):
    """Where this program's unit starts in its tensor, and what else `rounded_at` needs."""
    at = rows + tl.load(units + 2 * tl.program_id(0)) * ROW
    start = tl.load(units + 2 * tl.program_id(0) + 1).to(tl.int64) * unit_length
    k = tl.load(tl.load(at + 4).to(tl.pointer_type(tl.float32))).to(tl.int32)
    k = tl.where(momentum == 0, 0, k).to(tl.uint32)
    first, shape = tl.load(at + 6).to(tl.uint32) + mixed(k), tl.load(at + 7)
    return start, first, shape >> 32, shape & 0xFFFFFFFF


@triton.jit
def rounded_at(x, place, first, length, spacing, P: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a parameter of dtype P rounded as codec.round_param does, still as float32.

    `place` is that of the block in its tensor's memory, `first` the index of the tensor's first
    element with the step's hash added.
    """
    index = place.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
    if spacing != 1:  # the inverse of what fused.spacing says
        start = place % length
        i = start.to(tl.uint32) + tl.arange(0, BLOCK).to(tl.uint32)
        row, j = i // length.to(tl.uint32), i % length.to(tl.uint32)
        channels = (length // spacing).to(tl.uint32)
        inside = j % channels * spacing.to(tl.uint32) + j // channels
        index = (place - start).to(tl.uint32) + row * length.to(tl.uint32) + inside
    return rounded(x, mixed(index + first), P)
