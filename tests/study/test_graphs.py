"""CUDA graphs of training steps: what several of one model share, and what they leave alone."""

import torch
from pretend_cuda import pretend_cuda
from small_runs import needs_gpu
from torch import nn

from cubegrad.study.graphs import Captured


def squares(model, inputs):
    return model(inputs).square().mean()


def test_graphs_of_one_model_leave_their_gradients_in_the_same_tensors(monkeypatch):
    model = nn.Linear(3, 2)
    pretend_cuda(monkeypatch, model)
    batches = [torch.randn(count, 3) for count in (4, 5, 6)]
    first = Captured(model, squares, batches[:1])
    graphs = [first, *(Captured(model, squares, [batch], first) for batch in batches[1:])]
    for graph, batch in [*zip(graphs, batches, strict=True)] * 2:
        loss = graph.replay([batch])
        expected = squares(model, batch)
        assert torch.equal(loss, expected)
        for param, grad in zip(model.parameters(), first.grads, strict=True):
            assert param.grad is grad
            (right,) = torch.autograd.grad(squares(model, batch), param)
            assert torch.equal(grad, right)


@needs_gpu
def test_a_capture_leaves_the_random_numbers_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).cuda()
    batch = [torch.randn(4, 8, device="cuda")]
    before = torch.cuda.get_rng_state()
    first = Captured(model, squares, batch)
    Captured(model, squares, batch, first)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    losses = {first.replay(batch).item() for _ in range(5)}
    assert len(losses) == 5  # each replay draws anew


@needs_gpu
def test_many_graphs_of_a_model_take_little_more_memory_than_one():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    batches = [torch.randn(count, 256, device="cuda") for count in range(20_000, 20_030)]
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved()
    first = Captured(model, squares, batches[:1])
    one = torch.cuda.memory_reserved() - start
    graphs = [Captured(model, squares, [batch], first) for batch in batches[1:]]
    # Each also keeps a copy of its batch.
    copies = sum(batch.numel() * batch.element_size() for batch in batches)
    assert torch.cuda.memory_reserved() - start < 3 * one + 2 * copies
    assert len(graphs) == 29
