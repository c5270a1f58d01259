"""One update of masked language modelling: its loss, its gradient, and its CUDA graph."""

import itertools
import math

import pytest
import torch
from pretend_cuda import pretend_cuda
from small_text import task_of
from torch import nn

import cubegrad
from cubegrad.study.data.masking import IGNORED, Blocks, Masked, masked
from cubegrad.study.data.tokens import MASK, PAD
from cubegrad.study.problems import bookwiki

pytest.importorskip("transformers")


class Sure(nn.Module):
    """Gives each input token three times the probability of any other."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.tensor(math.log(3.0)))

    def roberta(self, inputs, attention_mask):
        assert attention_mask.shape == (len(inputs), 1, 1, inputs.shape[1])
        assert torch.equal(attention_mask[:, 0, 0], inputs != PAD)
        hidden = nn.functional.one_hot(inputs, self.vocabulary).float() * self.weight
        return type("Output", (), {"last_hidden_state": hidden})

    def lm_head(self, hidden):
        return hidden


def questions():
    """Three tokens to predict in two blocks: one is shown, two are masked."""
    inputs = torch.tensor([[0, 5, MASK, 2], [0, MASK, 2, PAD]])
    places = torch.tensor([[1, 2], [1, 3]])
    return Masked(inputs, places, torch.tensor([[5, 6], [7, IGNORED]]))


def test_the_loss_is_in_bits():
    model = Sure(8)
    nats = math.log(10 / 3) + 2 * math.log(10)  # of 8 tokens one has weight 3, the others 1
    assert bookwiki.total_loss(model, questions()).item() == pytest.approx(nats)
    judged = bookwiki.metrics(model, questions())
    assert judged["loss"] == pytest.approx(nats / 3 / math.log(2))
    assert judged["perplexity"] == pytest.approx((1000 / 3) ** (1 / 3))


@pytest.mark.parametrize("clip", [1e9, 0.01])
def test_an_update_is_the_mean_over_its_questions_clipped(clip):
    """The gradient by hand: the probability of the input token, less 1 where it is the answer."""
    model = Sure(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()
    loss = bookwiki.make_step(model, 1, clip)(optimizer, questions())
    gradient = ((0.3 - 1) + 0.3 + 0.3) / 3
    step = math.copysign(min(abs(gradient), clip), gradient)
    assert model.weight.item() == pytest.approx(before - step, rel=1e-4)
    assert loss.item() == pytest.approx((math.log(10 / 3) + 2 * math.log(10)) / 3 / math.log(2))
    assert not loss.requires_grad


def test_the_parts_of_an_update_add_up(small_bookwiki):
    gradients = []
    for at_once in (8, 3):
        task = task_of(small_bookwiki, at_once=at_once, dropout=0.0)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.0)
        task.step(optimizer, next(iter(task.batches(0))))
        gradients.append(torch.cat([param.grad.flatten() for param in task.model.parameters()]))
    assert gradients[0].norm().item() == pytest.approx(0.5, rel=1e-3)  # clipped
    assert torch.allclose(*gradients, atol=1e-6)


def test_a_graphed_update_is_a_plain_one(small_bookwiki, monkeypatch):
    """A graph overwrites its gradients at each replay, and they are clipped in place."""
    losses, weights, captures = [], [], []
    for graphed in (None, bookwiki.mean_loss):
        task = task_of(small_bookwiki, dropout=0.0)
        if graphed:
            captures = pretend_cuda(monkeypatch, task.model)
        step = bookwiki.make_step(task.model, 8, 0.5, graphed)
        optimizer = cubegrad.MADGRAD(task.model.parameters(), lr=0.01)
        updates = itertools.islice(task.batches(0), 3)
        losses.append([step(optimizer, update).item() for update in updates])
        weights.append(torch.cat([param.detach().flatten() for param in task.model.parameters()]))
    assert len(captures) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert torch.allclose(*weights, atol=1e-6)


def test_an_update_neither_waits_for_values_nor_leaves_its_device():
    """Meta tensors have no values to wait for, and cannot be mixed with other devices."""
    preset = bookwiki.problem().presets["gpu"]
    batch, length = preset.batch, preset.options["length"]
    with torch.device("meta"):
        ids, starts = torch.zeros(9000, dtype=torch.int16), torch.zeros(601, dtype=torch.long)
        rows = Blocks(ids, starts).rows(torch.zeros(batch, dtype=torch.long), length)
        model = bookwiki.network(dict(preset.options), 8192)
    update = masked(rows, 8192, None)  # no generator exists for the device meta
    assert update.places.shape == update.labels.shape == (batch, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = bookwiki.make_step(model, 100, 0.5)(optimizer, update)
    assert loss.is_meta
    assert all(param.grad.is_meta for param in model.parameters())


def test_the_loss_is_that_of_transformers(small_bookwiki):
    task = task_of(small_bookwiki)
    task.model.eval()
    update = next(iter(task.batches(0)))
    labels = torch.full_like(update.inputs, IGNORED)
    asked = update.labels != IGNORED
    rows = torch.arange(len(labels))[:, None].expand_as(update.places)
    labels[rows[asked], update.places[asked]] = update.labels[asked]
    with torch.no_grad():
        out = task.model(update.inputs, attention_mask=update.inputs != PAD, labels=labels)
        assert task.loss(task.model, update).item() == pytest.approx(out.loss.item(), rel=1e-5)
