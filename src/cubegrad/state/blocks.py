"""Which parameters keep their state in codes, how those are cut into blocks, and how they start.

codec.py says what a code means. A block is up to 256 numbers that follow each other in one row of
the parameter, and a row is all that has one index in the first dimension. So the scales have a
first dimension too, and are sharded as their parameter is. A parameter of one dimension is one row.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cubegrad import codec, sharding
from cubegrad.codec import BLOCK, Codes, row_length
from cubegrad.functions import TorchFunctions

# Numbers that are computed at once where no kernel does it: it bounds the temporaries. On a CPU
# these take twice as long if they are larger than its caches.
PIECE = 2**20
CPU_PIECE = 2**17


def is_coded(param: Tensor) -> bool:
    """Whether the parameter is large enough, and of a dtype, to keep its state in codes."""
    return why_not_coded(param) is None


def why_not_coded(param: Tensor) -> str | None:
    """What keeps the parameter's state from being in codes, for messages."""
    reason = codec.why_not_coded(str(param.dtype).removeprefix("torch."), real_shape(param))
    if reason is None and not has_whole_blocks(param):
        return f"shards that cut through blocks of {BLOCK}"
    return reason


def has_whole_blocks(param: Tensor) -> bool:
    """Whether no block lies in two shards."""
    shape = real_shape(param)
    if len(shape) == 1:
        parts = sharding.cut_of_first_dimension(param)
        return parts == 1 or shape[0] % (parts * BLOCK) == 0
    columns = sharding.cut_of_second_dimension(param)
    if columns is None or columns == 1:
        return columns is not None
    return shape[1] % columns == 0 and row_length(shape) % (columns * BLOCK) == 0


def real_shape(param: Tensor) -> Sequence[int]:
    """Of the real numbers that the rule works on; see `layout.as_real`."""
    return (*param.shape, 2) if param.is_complex() else param.shape


def scale_shape(shape: Sequence[int]) -> torch.Size:
    """One scale for each block."""
    blocks = -(-row_length(shape) // BLOCK)
    return torch.Size((blocks,) if len(shape) == 1 else (shape[0], blocks))


def initial_dtype(param: Tensor) -> torch.dtype:
    """Of the codes of x_0: half precision is small enough as it is."""
    return param.dtype if param.dtype.itemsize == 2 else torch.int16


def encode_initial(param: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of x_0 for a real parameter."""
    dtype = initial_dtype(param)
    scale = torch.ones(scale_shape(param.shape), dtype=torch.float32, device=param.device)
    if dtype == param.dtype:  # exact; decoupled decay changes the scale
        return param.clone(memory_format=torch.contiguous_format), scale
    codes = torch.empty(param.shape, dtype=dtype, device=param.device)
    for x, code, own_scale in row_pieces(param, codes, scale):
        code_blocks, scales = codec.encode_integers(TorchFunctions, split(x), codec.LARGEST_INITIAL)
        code.copy_(joined(code_blocks, x.shape))
        own_scale.copy_(scales.reshape(own_scale.shape))
    return codes, scale


def as_bytes(code: Tensor, param: Tensor) -> Tensor:
    """The memory of x_0's int16 codes as uint8, two for each; codes of half precision as they are.

    Neither NCCL nor gloo sends int16, so this is what a state dict has.
    """
    return code if code.dtype != torch.int16 else _viewed(code, torch.uint8, param)


def from_bytes(code: Tensor, param: Tensor) -> Tensor:
    """The inverse of `as_bytes`; codes are returned as they are."""
    even = code.dtype == torch.uint8 and code.shape[-1] % 2 == 0
    return _viewed(code, torch.int16, param) if even else code


def _viewed(code: Tensor, dtype: torch.dtype, param: Tensor) -> Tensor:
    last = code.shape[-1] * code.element_size() // dtype.itemsize
    shard = sharding.local(code).contiguous().view(dtype)
    return sharding.like(shard, param, torch.Size((*code.shape[:-1], last)))


def indices(param: Tensor, first: int) -> Tensor:
    """The coordinates' indices in the whole parameter, modulo 2^32, in the shape of this part."""
    start = (first + 2**31) % 2**32 - 2**31
    numbers = torch.arange(param.numel(), dtype=torch.int32, device=param.device) + start
    return numbers.reshape(param.shape)


def row_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same rows of tensors with one first dimension, a bounded number at a time.

    Of one dimension, views of the same blocks: some tensors have a number for each block.
    """
    shape = tensors[0].shape
    most = min(PIECE, CPU_PIECE) if tensors[0].device.type == "cpu" else PIECE
    if len(shape) == 1:
        lengths = [most if len(tensor) == len(tensors[0]) else most // BLOCK for tensor in tensors]
    else:
        lengths = [max(1, most // max(1, row_length(shape)))] * len(tensors)
    pieces = map(torch.split, tensors, lengths)
    yield from zip(*pieces, strict=True)


def split(tensor: Tensor) -> Tensor:
    """(rows, blocks, numbers of a block); the last block of a row is filled up with zeros."""
    rows = tensor.reshape(-1, row_length(tensor.shape))
    width = min(BLOCK, rows.shape[1])
    lacking = -rows.shape[1] % width
    if lacking:
        rows = torch.nn.functional.pad(rows, (0, lacking))
    return rows.view(len(rows), rows.shape[1] // width, width)


def joined(blocks: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `split`."""
    rows, length = blocks.flatten(1), row_length(shape)
    if torch.compiler.is_compiling() and rows.shape[1] != length:
        # Fused with this slice, the loop that torch 2.13 compiles for a CPU ends after the last
        # whole block; as_strided keeps it from being fused.
        rows = rows.contiguous().as_strided((len(rows), length), (rows.shape[1], 1))
    return rows[:, :length].reshape(shape)


def codes_in_blocks(codes: Codes) -> Codes:
    """The codes of one parameter, cut as `split` cuts it."""
    coded = {name: getattr(codes, name) for name in ("offset", "root", "initial")}
    cut = {name: None if code is None else split(code) for name, code in coded.items()}
    scales = {name: getattr(codes, f"{name}_scale") for name in coded}
    lifted = {
        f"{name}_scale": None
        if scale is None
        else (scale if scale.dim() > 1 else scale[None]).unsqueeze(-1)
        for name, scale in scales.items()
    }
    return codes._replace(**cut, **lifted)
