"""A batch's loss and gradients as one CUDA graph, launched at once.

Without it a step launches a thousand kernels, each shorter than the launch of the next.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

WARM_UP = 3  # steps, in which cuDNN and Triton choose their kernels and cuFFT makes its plans

Loss = Callable[..., Tensor]  # (model, *tensors of a batch)


@cache
def compiled(loss: Loss) -> Loss:
    """Compiled once per process, for all models of one shape."""
    return torch.compile(loss, dynamic=False)


class GraphedStep:
    """`Task.step` on a GPU: replays a batch's loss and gradients, then steps the optimizer."""

    def __init__(self, model: nn.Module, loss: Loss, full: int, rest: Loss | None = None) -> None:
        self.loss = loss
        self.full = full  # the size of all batches but the last
        self.rest = rest or loss  # for the smaller last batch, not worth a second compilation
        self.graphs = Graphs(model)

    def __call__(self, optimizer: Optimizer, batch: Sequence[Tensor]) -> Tensor:
        count = len(batch[0])
        value = self.graphs.replay(count, self.loss if count == self.full else self.rest, batch)
        optimizer.step()
        return value


class Graphs:
    """The graphs of one model, by what tells their batches apart; made when first needed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.captured: dict[int, Captured] = {}

    def replay(self, key: int, loss: Loss, batch: Sequence[Tensor]) -> Tensor:
        if key not in self.captured:
            first = next(iter(self.captured.values()), None)
            self.captured[key] = Captured(self.model, loss, batch, first)
        return self.captured[key].replay(batch)


class Captured:
    """The graph for batches of one shape. A replay leaves the gradients in the parameters.

    It shares memory and gradients with `first`, an earlier graph of the model, if there is one, so
    the two must not replay at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Sequence[Tensor],
        first: "Captured | None" = None,
    ) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.batch = [tensor.clone() for tensor in batch]
        self.graph = torch.cuda.CUDAGraph()
        pool = first.graph.pool() if first else None
        # The same stream too, as the memory of a warm-up stays with its stream.
        stream: Any = first.stream if first else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream: Any = stream
        stream.wait_stream(torch.cuda.current_stream())
        benchmark = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            # Dropout then does not depend on when a graph is captured.
            with torch.cuda.stream(stream), torch.random.fork_rng([torch.cuda.current_device()]):
                self._warm_up(model, loss, 1 if first else WARM_UP)
            with torch.cuda.graph(self.graph, pool, stream):
                self.loss = loss(model, *self.batch)
                self.loss.backward()  # type: ignore[no-untyped-call]
                self.grads = [param.grad for param in self.params]
                if first:
                    torch._foreach_copy_(first.grads, self.grads)  # type: ignore[arg-type]
        finally:
            torch.backends.cudnn.benchmark = benchmark
        self.loss = self.loss.detach()
        if first:
            self.grads = first.grads  # so that the memory of its own is free for the next graph
        self._drop_gradients()
        torch.cuda.current_stream().wait_stream(stream)

    def _warm_up(self, model: nn.Module, loss: Loss, steps: int) -> None:
        """Run steps without lasting effect: buffers are restored, gradients dropped."""
        kept = [buffer.clone() for buffer in model.buffers()]
        for _ in range(steps):
            self._drop_gradients()
            loss(model, *self.batch).backward()  # type: ignore[no-untyped-call]
        self._drop_gradients()  # so that the graph writes gradients instead of adding to them
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)

    def _drop_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def replay(self, batch: Sequence[Tensor]) -> Tensor:
        for own, given in zip(self.batch, batch, strict=True):
            own.copy_(given)
        self.graph.replay()
        if self.params[0].grad is not self.grads[0]:  # the first replay, or after a plain step
            for param, grad in zip(self.params, self.grads, strict=True):
                param.grad = grad
        return self.loss.clone()
