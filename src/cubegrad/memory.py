"""What a training run keeps in memory: weights, gradients and state, for several optimizers."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cubegrad import sharding
from cubegrad.codec import BLOCK
from cubegrad.rule import MADGRAD, MADGRADW, MADGRADW_AUTO, MIRROR_MADGRAD, Rule
from cubegrad.state import layout

__all__ = ["Estimate", "Kept", "estimate", "table"]


class Kept(NamedTuple):
    """Bytes that one GPU keeps from step to step."""

    optimizer: str
    weights: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state


class Estimate(NamedTuple):
    parameters: int  # of the whole model
    dtype: str
    gpus: int
    assumption: str  # empty if the shapes are known
    rows: list[Kept]


class _Part(NamedTuple):
    """A parameter and what one GPU has of it; or a buffer."""

    whole: Tensor
    shard: Tensor
    is_trained: bool

    @property
    def cuts_blocks(self) -> bool:
        """Whether FSDP2 would cut through blocks of codes of a parameter of one dimension."""
        count, own = self.whole.numel(), self.shard.numel()
        return self.whole.dim() == 1 and own < count and (own % BLOCK > 0 or count % own > 0)


DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}
STEP = 4  # bytes of torch's step count, one for each tensor
# Stands for a model of which only the size is known; the scales are those of whole blocks.
MATRIX = (2**20, 2**20)
ASSUMPTION = (
    "Assumed: all parameters are in matrices whose rows are a multiple of 256 long. Norms, biases "
    "and other small tensors keep float32 state under compact=True; to count those, pass the model "
    "to cubegrad.memory.estimate."
)
HALF = (
    "Like with like: Adam, AdamW, SGD and Prodigy keep their state in the weights' half precision "
    "and lose small moves there. Random rounding keeps these on average, so compare compact=True "
    "with AdamW's float32 master weights."
)
NOT_COUNTED = (
    "Not counted: activations, temporary buffers such as FSDP's gathered layers and buckets, "
    "fragmentation, the CUDA context, and the gradients not yet released under gradient release."
)


def _ours(rule: Rule, compact: bool, momentum: float = 0.9) -> Callable[[_Part], int]:
    def state(part: _Part) -> int:
        group = {"compact": compact and not part.cuts_blocks, "momentum": momentum}
        held = layout.needed(rule, group, part.whole)
        forms = held.forms(layout.as_real(part.shard))
        count = layout.counter(part.shard, on_device=False).nbytes
        return count + sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)

    return state


def _buffers(number: int, has_step: bool) -> Callable[[_Part], int]:
    """An optimizer with buffers in the dtype of the parameter."""
    return lambda part: number * part.shard.nbytes + STEP * has_step


def _adamw_with_master_weights(part: _Part) -> int:
    wide = layout.state_dtype(part.shard)
    copies = 2 if wide == part.shard.dtype else 3
    return copies * part.shard.numel() * wide.itemsize + STEP


class _Optimizer(NamedTuple):
    name: str
    state: Callable[[_Part], int]
    frees_gradients: bool = False


OPTIMIZERS = (
    _Optimizer("MADGRADW compact, gradient release", _ours(MADGRADW, True), frees_gradients=True),
    _Optimizer("MADGRADW compact", _ours(MADGRADW, True)),
    _Optimizer("MADGRADW compact, momentum 0", _ours(MADGRADW, True, momentum=0.0)),
    _Optimizer("MADGRADW, float32 state", _ours(MADGRADW, False)),
    _Optimizer("MADGRADW lr auto, compact", _ours(MADGRADW_AUTO, True)),
    _Optimizer("MADGRADW lr auto, float32 state", _ours(MADGRADW_AUTO, False)),
    _Optimizer("MADGRAD compact, gradient release", _ours(MADGRAD, True), frees_gradients=True),
    _Optimizer("MADGRAD compact", _ours(MADGRAD, True)),
    _Optimizer("MADGRAD compact, momentum 0", _ours(MADGRAD, True, momentum=0.0)),
    _Optimizer("MADGRAD, float32 state", _ours(MADGRAD, False)),
    _Optimizer("MirrorMADGRAD compact", _ours(MIRROR_MADGRAD, True)),
    _Optimizer("MirrorMADGRAD, float32 state", _ours(MIRROR_MADGRAD, False)),
    _Optimizer("Adam, AdamW (torch)", _buffers(2, has_step=True)),
    _Optimizer("AdamW, float32 master weights", _adamw_with_master_weights),
    _Optimizer("SGD with momentum (torch)", _buffers(1, has_step=False)),
    # s, p0, exp_avg and exp_avg_sq; prodigyopt 1.1.2 keeps no p0 for a parameter that is all zero.
    _Optimizer("Prodigy (prodigyopt)", _buffers(4, has_step=False)),
)


def estimate(
    model: nn.Module | float | Iterable[tuple[int, ...]],
    dtype: str | torch.dtype | None = None,
    gpus: int = 1,
) -> Estimate:
    """What a training run keeps on each GPU, for several optimizers.

    `model` is a module (also one on the meta device), the shapes of its parameters, or their
    number. A module is counted exactly: with its buffers, which every GPU has, and without
    gradients and state for parameters that need no gradient. `dtype` is float32 by default and that
    of the parameters if `model` is a module. `gpus` divides the rows of each parameter as FSDP2
    does; the bytes are those of the GPU that has the most.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus < 2**63:
        raise ValueError(
            f"gpus={gpus!r:.60} must be a whole number >= 1 and < 2^63; use 1 if nothing is sharded"
        )
    if isinstance(model, nn.Module):
        if dtype is not None:
            raise ValueError(
                f"dtype={dtype!r} is for shapes or a number of parameters, and a module has its "
                "own; leave it out, and use model.to(dtype) to change it"
            )
        return _counted(list(_parts_of_module(model, gpus)), gpus)
    given = _checked_dtype(dtype)
    if not isinstance(model, Iterable):
        return _scaled(_checked_number(model), given, gpus)
    wholes = [torch.empty(_checked_shape(shape), dtype=given, device="meta") for shape in model]
    return _counted([_Part(whole, _shard(whole, gpus), True) for whole in wholes], gpus)


def table(result: Estimate) -> str:
    """The estimate as text."""
    where = f"on each of {result.gpus} GPUs (FSDP)" if result.gpus > 1 else "on one GPU"
    names = ("weights", "gradients", "state", "total")
    lines = [["", *names]]
    per_parameter = result.gpus / result.parameters
    for row in result.rows:
        sizes = [getattr(row, name) for name in names]
        cells = [f"{_digits(size / 1e9)} ({_digits(size * per_parameter)})" for size in sizes]
        lines.append([row.optimizer, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        f"{result.parameters:,} parameters in {result.dtype}, {where}: "
        "GB (10^9 bytes), in brackets bytes a parameter",
        "",
    ]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]))
    half = HALF if "float16" in result.dtype else ""  # bfloat16 too
    return "\n".join([*text, "", *filter(None, [half, result.assumption]), NOT_COUNTED])


def _digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _parts_of_module(model: nn.Module, gpus: int) -> Iterator[_Part]:
    for name, param in model.named_parameters():
        sharded = sharding.is_sharded(param)
        if sharded and gpus != 1:
            raise ValueError(
                f"gpus={gpus} with a module whose {name} is sharded already; leave gpus out to "
                "count what this process has"
            )
        whole = param.detach()
        shard = sharding.local(whole) if sharded else _shard(whole, gpus)
        yield _Part(whole, shard, param.requires_grad)
    for buffer in model.buffers():
        yield _Part(torch.empty(0), sharding.local(buffer), False)


def _shard(whole: Tensor, gpus: int) -> Tensor:
    """The most rows that a GPU has."""
    return whole[: -(-len(whole) // gpus)] if whole.ndim else whole


def _counted(parts: list[_Part], gpus: int) -> Estimate:
    parameters = sum(part.whole.numel() for part in parts)
    if not parameters:
        raise ValueError("the model has 0 parameters and must have some; pass one with weights")
    dtypes = {part.whole.dtype: None for part in parts if part.whole.numel()}
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    trained = [part for part in parts if part.is_trained]
    weights = sum(part.shard.nbytes for part in parts)
    gradients = sum(part.shard.nbytes for part in trained)
    rows = [
        Kept(name, weights, 0 if frees_gradients else gradients, sum(map(state, trained)))
        for name, state, frees_gradients in OPTIMIZERS
    ]
    return Estimate(parameters, names, gpus, "", rows)


def _scaled(number: int, dtype: torch.dtype, gpus: int) -> Estimate:
    example = estimate([MATRIX], dtype)
    factor = number / example.parameters / gpus
    rows = [Kept(name, *(size * factor for size in sizes)) for name, *sizes in example.rows]
    return Estimate(number, example.dtype, gpus, ASSUMPTION, rows)


def _checked_number(number: Any) -> int:
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if is_number and 1 <= number <= sys.float_info.max:  # an int may be larger
        return int(number)
    raise ValueError(
        f"the number of parameters is {number!r:.60} and must be finite and >= 1; use 7e9, or pass "
        "a module or a list of shapes"
    )


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, tuple | list) and all(type(n) is int and n >= 0 for n in shape):
        return tuple(shape)
    value = "a tensor" if isinstance(shape, Tensor) else repr(shape)
    raise ValueError(
        f"a shape is {value}; it must be a tuple of whole numbers >= 0, such as (1024, 4096): pass "
        "those, or the module itself"
    )


def _checked_dtype(dtype: Any) -> torch.dtype:
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found is None:
        return torch.float32
    if isinstance(found, torch.dtype) and (found.is_floating_point or found.is_complex):
        return found
    raise ValueError(f"dtype={dtype!r} must be a floating-point type; use {', '.join(DTYPES)}")
