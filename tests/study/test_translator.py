"""The network against the equations, written again in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from cubegrad.study.models.lstm_attention import Translator

PAD, END = 1, 2
ROWS = [[4, 5, 6, 3, END], [7, 4, END], [5, END]]


def made(rate=0.0, width=6):
    torch.manual_seed(0)
    return Translator(9, 11, width, rate, PAD).double().eval()


def padded(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def counted(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameters_with_the_papers_vocabularies():
    """fairseq's preparation of IWSLT14 leaves 8,848 German types and 6,632 English ones."""
    width = 256
    reader = 4 * width * (2 * width) + 2 * 4 * width
    writer = 4 * width * (3 * width) + 2 * 4 * width
    attention = width * width + 2 * width * width
    expected = (8848 + 6632) * width + reader + writer + attention
    assert counted(Translator(8848, 6632, width, 0.3, PAD)) == expected == 5_474_304


def test_initial_weights():
    model = made(width=64)
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() <= 0.1
        assert abs(parameter.std().item() - 0.2 / 12**0.5) < 0.01, name  # of a uniform
    assert not model.read_embedding.weight[PAD].any()
    assert not model.write_embedding.weight[PAD].any()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, h, c, weights):
    """torch documents the order of the gates: input, forget, cell, output."""
    w_ih, w_hh, b_ih, b_hh = weights
    i, f, g, o = np.split(w_ih @ x + b_ih + w_hh @ h + b_hh, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def by_hand(model, sentence, given):
    """One sentence, token by token; fairseq's layer: scores are values · (W h)."""
    p = {name: value.detach().numpy() for name, value in model.named_parameters()}
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    reader = [p[f"reader.{name}_l0"] for name in names]
    writer = [p[f"writer.{name}"] for name in names]
    h = c = attended = np.zeros(p["query.weight"].shape[0])
    values = []
    for token in sentence:
        h, c = lstm(p["read_embedding.weight"][token], h, c, reader)
        values.append(h)
    values = np.array(values)
    scores = []
    for token in given:
        inputs = np.concatenate([p["write_embedding.weight"][token], attended])
        h, c = lstm(inputs, h, c, writer)
        energies = values @ (p["query.weight"] @ h)
        weights = np.exp(energies) / np.exp(energies).sum()
        attended = np.tanh(p["attend.weight"] @ np.concatenate([weights @ values, h]))
        scores.append(p["write_embedding.weight"] @ attended)
    return np.array(scores)


def test_scores_are_the_equations_and_padding_does_not_show():
    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from the linear middle of sigmoid and tanh
    given = torch.tensor([[END, 4, 7, 10], [END, 5, 5, 3], [END, 9, PAD, PAD]])
    lengths = torch.tensor([len(row) for row in ROWS])
    scores = model(padded(ROWS), lengths, given)
    assert scores.shape == (3, 4, 11)
    for row, sentence in enumerate(ROWS):
        expected = by_hand(model, sentence, given[row].tolist())
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(scores[row].detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_reach_all_and_are_numbers():
    model = made()
    given = torch.tensor([[END, 4], [END, 5], [END, 9]])
    loss = model(padded(ROWS), torch.tensor([5, 3, 2]), given).square().sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert not model.read_embedding.weight.grad[PAD].any()


def test_dropout_is_on_what_attention_gives_and_nowhere_else():
    model = made(rate=0.3, width=400)
    source, lengths = padded(ROWS), torch.tensor([5, 3, 2])
    memory, state = model.read(source, lengths)
    embedded = model.write_embedding(torch.tensor([4, 5, 6]))
    without = model.step(embedded, state, memory)
    model.train()
    again, start = model.read(source, lengths)
    assert torch.equal(again.values, memory.values)
    with_it = model.step(embedded, start, again)
    assert torch.equal(with_it.hidden, without.hidden)
    assert torch.equal(with_it.cell, without.cell)
    kept = with_it.attended != 0
    assert abs(kept.double().mean().item() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    torch.testing.assert_close(with_it.attended[kept], without.attended[kept] / 0.7)


def test_translations_are_the_likeliest_tokens_one_by_one():
    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    source, lengths = padded(ROWS), torch.tensor([5, 3, 2])
    written = model.translate(source, lengths, END, 7)
    assert 1 <= written.shape[1] <= 7
    given = torch.cat([torch.full((3, 1), END), written[:, :-1]], 1)
    assert torch.equal(model(source, lengths, given).argmax(2), written)


@pytest.mark.parametrize(("wanted", "length"), [(END, 1), (5, 4)])
def test_translations_end_with_the_end_or_at_the_limit(wanted, length):
    model = made()
    model.scores = lambda attended: nn.functional.one_hot(
        torch.full((len(attended),), wanted), 11
    ).double()
    written = model.translate(padded(ROWS), torch.tensor([5, 3, 2]), END, 4)
    assert written.tolist() == [[wanted] * length] * 3
