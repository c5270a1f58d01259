"""Where tensors lie in memory: densely or not, inside their storage or not, apart or not."""

from array import array
from collections.abc import Sequence
from itertools import chain

from torch import Tensor

Span = tuple[int, int]


def span(tensor: Tensor) -> Span:
    """The addresses from the first to past the last byte of a strided tensor."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


def of(tensors: Sequence[Tensor]) -> list[Span]:
    """The span of each."""
    return [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        if tensor.is_contiguous()
        else span(tensor)
        for tensor in tensors
    ]


def are_aligned(first: Tensor, *others: Tensor) -> bool:
    """Whether one offset in memory means one coordinate in all of them, with no gaps between."""
    if any(tensor.is_neg() or tensor.is_conj() for tensor in (first, *others)):
        return False
    if first.is_contiguous():
        return all(other.is_contiguous() for other in others)
    strides = [_strides(tensor) for tensor in (first, *others)]
    expected = 1
    for stride, size in sorted(strides[0]):
        if stride != expected:
            return False
        expected *= size
    return all(other == strides[0] for other in strides[1:])


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions with more than one element."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in pairs if size != 1]


def lies_in_storage(tensor: Tensor) -> bool:
    """Whether the storage holds every element; one that was resized may not."""
    start, end = span(tensor)
    if tensor.numel() == 0 or start == 0:
        return tensor.numel() == 0
    offset = tensor.storage_offset() * tensor.element_size()
    return offset + end - start <= tensor.untyped_storage().nbytes()


def overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def any_overlap(written: Sequence[Span], read: Sequence[Span]) -> bool:
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
    """Spans that do not overlap each other, in the form that `any_within` takes."""
    apart = sorted((start, end) for start, end in spans if start < end)
    return array("q", chain.from_iterable(apart)).tobytes()


def lengths(spans: Sequence[Span]) -> bytes:
    """Their lengths in bytes, in the form that `any_within` takes."""
    return array("q", (end - start for start, end in spans)).tobytes()
