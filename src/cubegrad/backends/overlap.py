"""Tensors that share memory, which a kernel that updates all of them at once must not meet."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from cubegrad.backends.native import tensors as look

Span = tuple[int, int]


def span(tensor: Tensor) -> Span:
    """The addresses from the first to past the last byte of a strided tensor."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


def meet(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def any_meet(written: Sequence[Span], read: Sequence[Span]) -> bool:
    """Whether a tensor that is written to shares memory with any other one."""
    spans = [(start, end, True) for start, end in written]
    spans += [(start, end, False) for start, end in read]
    written_end = read_end = 0
    for start, end, is_written in sorted(spans):
        if start == end:
            continue
        if start < written_end or (is_written and start < read_end):
            return True
        if is_written:
            written_end = max(written_end, end)
        else:
            read_end = max(read_end, end)
    return False


def packed(spans: Sequence[Span]) -> bytes:
    """Spans of tensors that share no memory with each other, for `meets`."""
    apart = sorted((start, end) for start, end in spans if start < end)
    return array("q", chain.from_iterable(apart)).tobytes()


def lengths(tensors: Sequence[Tensor]) -> bytes:
    """In bytes, for `meets`."""
    return array("q", (end - start for start, end in map(span, tensors))).tobytes()


def plain_meets(spans: bytes, lengths: bytes, addresses: bytes) -> bool:
    """Whether any tensor at these addresses, of these lengths, shares memory with the spans."""
    bounds = array("q", spans)
    starts, ends = bounds[::2], bounds[1::2]
    for start, length in zip(array("q", addresses), array("q", lengths), strict=True):
        nearest = bisect_right(ends, start)  # the first span that ends behind its start
        if nearest < len(starts) and length and starts[nearest] < start + length:
            return True
    return False


meets = plain_meets if look.native is None else look.native.meets
