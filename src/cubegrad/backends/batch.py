"""What a backend updates: a batch of parameters, each with its gradient and state."""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cubegrad.options import Hyper
from cubegrad.sharding import ShardedOver
from cubegrad.state.layout import Layout

# Classes whose tensors are what they seem; others may lack list operations, or have no address.
PLAIN_CLASSES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
Spans = list[tuple[int, int]]  # memory, as spans.span gives it


class Row(NamedTuple):
    """One parameter: real strided tensors, what this process holds of them."""

    param: Tensor
    grad: Tensor
    step: Tensor
    buffers: tuple[Tensor, ...]  # as the batch's layout names them
    first_index: int = 0  # of the parameter's first element in the whole, if that is needed

    def with_dimensions(self) -> "Row":
        """Views of one element instead of tensors without dimensions.

        Those would become float64 by a product with a learning rate in float64.
        """
        if self.param.dim():
            return self
        buffers = tuple(buffer[None] for buffer in self.buffers)
        return self._replace(param=self.param[None], grad=self.grad[None], buffers=buffers)


class Member(NamedTuple):
    """A row, and the optimizer's parameter that it belongs to: of a sharded one it has a shard."""

    owner: Tensor
    layout: Layout
    row: Row
    drops: tuple[str, ...] = ()  # buffers that are held and used, but not needed after this step


class Batch(NamedTuple):
    """Parameters that are updated together: of one layout, device, dtype and gradient dtype."""

    layout: Layout
    rows: list[Row]
    sharded_over: ShardedOver = None  # set only where lr="auto" adds up sums
    spans: list[Spans] | None = None  # the memory of each row, once a fused backend has checked it
    rounds_at_random: bool = False  # parameters of half precision; those with codes always are

    @property
    def params(self) -> list[Tensor]:
        return [row.param for row in self.rows]

    @property
    def rounds(self) -> bool:
        """Whether the parameters are rounded at random after the step."""
        return self.rounds_at_random and self.layout.rounds_param(self.rows[0].param)


class Launch(Protocol):
    """A fused kernel bound to the tensors of a batch, which can run again and again."""

    alive: Any  # the tensors whose addresses the kernel holds
    written: bytes  # the memory it writes to, as spans.packed gives it
    grad_lengths: bytes  # of the gradients, as spans.lengths gives them

    def table(self, grads: bytes) -> tuple[Any, bool]:
        """The gradients' addresses where `run` wants them, and whether the table can be reused."""

    def run(self, h: Hyper, table: Any) -> None:
        """Update the batch, with the gradients that the table lists."""


class Backend(Protocol):
    """How a batch is updated. A module with these names is a backend."""

    NAME: str
    # Whether one kernel updates the whole batch. It then keeps the step counts on the device, takes
    # a GradScaler's scale and verdict, and what it launches can be repeated.
    FUSED: bool

    def checked(self, batch: Batch) -> Batch:
        """Refuse tensors that cannot be updated."""

    def step(self, batch: Batch, h: Hyper) -> Launch | None:
        """Update parameters, buffers and step counts in place, and nothing else.

        Returns the launch, if it can be repeated while the tensors stay where they are.
        """


def capturing() -> bool:
    """Whether a CUDA graph is being made: what is allocated now has its values in a replay only."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(started and torch.cuda.is_current_stream_capturing())
