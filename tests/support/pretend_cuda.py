"""CUDA graphs imitated on a CPU, for steps that are captured in one."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from cubegrad.study import graphs


class PretendGraph:
    """Replays by doing the captured work again, into the same tensors."""

    def replay(self):
        self.again()

    def pool(self):
        return id(self), 0


def pretend_cuda(monkeypatch, model):
    """Replace CUDA's graphs by PretendGraphs; returns the list of those captured from now on."""
    captures = []
    begin, fork_rng = graphs.Captured.__init__, torch.random.fork_rng

    def capture(self, model, loss, batch, first=None):
        begin(self, model, loss, batch, first)

        def again():
            value = loss(model, *self.batch)
            grads = torch.autograd.grad(value, self.params)
            for static, new in zip([self.loss, *self.grads], [value, *grads], strict=True):
                static.copy_(new.detach())

        self.graph.again = again

    @contextmanager
    def graph(made, pool, stream):
        assert stream is not None
        assert (pool is None) == (not captures)
        # Each replay would add to gradients that were there before.
        assert all(param.grad is None for param in model.parameters())
        kept = [buffer.clone() for buffer in model.buffers()]
        yield
        for buffer, value in zip(model.buffers(), kept, strict=True):
            buffer.copy_(value)  # a capture records kernels and runs none
        captures.append(made)

    def stream():
        return SimpleNamespace(wait_stream=lambda _: None)

    monkeypatch.setattr(graphs.Captured, "__init__", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendGraph)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: fork_rng([]))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return captures
