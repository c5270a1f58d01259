"""What a fused backend makes of a batch of tensors."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cubegrad.options import Hyper

ADDRESS = Tensor.data_ptr


def capturing() -> bool:
    """Whether a CUDA graph is being made: what is allocated now has its values in a replay only."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(started and torch.cuda.is_current_stream_capturing())


class Launch(Protocol):
    """What a fused backend makes of tensors of one device and dtype that lie densely."""

    alive: Any  # what must live as long as a graph may replay the launch

    def table(self, grads: bytes) -> tuple[Any, bool]:
        """The gradients' addresses where `run` wants them, and whether they will stay there."""

    def run(self, h: Hyper, table: Any) -> None: ...


def rows_of(
    params: list[Tensor], steps: list[Tensor], buffers: Sequence[list[Tensor]]
) -> list[tuple[int, ...]]:
    """What a kernel's table says of each tensor: parameter, three buffers, step count, elements."""
    columns = [list(map(ADDRESS, column)) for column in (params, *buffers)]
    columns += [[0] * len(params)] * (4 - len(columns))
    columns += [list(map(ADDRESS, steps)), [param.numel() for param in params]]
    return list(zip(*columns, strict=True))
