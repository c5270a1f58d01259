"""An LSTM that reads, and one that writes while it looks at what was read.

The network that fairseq calls lstm_wiseman_iwslt_de_en: one layer each way, the reader in one
direction; attention by dot products of a projected state; what attention gave is part of the next
input; the writer's embeddings are its output layer too. Dropout acts on what attention gives only.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

INITIAL = 0.1  # all weights are uniform between this and its negative


class State(NamedTuple):
    """What the writer goes on from."""

    hidden: Tensor
    cell: Tensor
    attended: Tensor  # of the step before


class Memory(NamedTuple):
    """What was read: (sentences, places, width) each, and -inf at the places past a sentence."""

    values: Tensor
    keys: Tensor
    blocked: Tensor  # (sentences, places, 1)


class Translator(nn.Module):
    def __init__(
        self, read_types: int, write_types: int, width: int, rate: float, pad: int
    ) -> None:
        super().__init__()
        self.rate = rate
        self.pad = pad
        self.read_embedding = nn.Embedding(read_types, width, padding_idx=pad)
        self.reader = nn.LSTM(width, width, batch_first=True)
        self.write_embedding = nn.Embedding(write_types, width, padding_idx=pad)
        self.writer = nn.LSTMCell(2 * width, width)
        self.query = nn.Linear(width, width, bias=False)
        self.attend = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-INITIAL, INITIAL)
            self.read_embedding.weight[pad] = 0
            self.write_embedding.weight[pad] = 0

    def read(self, source: Tensor, lengths: Tensor) -> tuple[Memory, State]:
        """Sentences as rows, the longest first; their lengths lie on the CPU."""
        packed = pack_padded_sequence(self.read_embedding(source), lengths, batch_first=True)
        outputs, (hidden, cell) = self.reader(packed)
        values, _ = pad_packed_sequence(outputs, batch_first=True)
        # v · (Q h) = (Qᵀ v) · h: projecting what was read, once, spares a product a step.
        keys = linear(values, self.query.weight.t())
        zeros = torch.zeros_like(source, dtype=values.dtype)
        blocked = zeros.masked_fill(source == self.pad, -torch.inf).unsqueeze(2)
        first = State(hidden[0], cell[0], torch.zeros_like(hidden[0]))
        return Memory(values, keys, blocked), first

    def step(self, embedded: Tensor, state: State, memory: Memory) -> State:
        """One token further, for all sentences."""
        inputs = torch.cat((embedded, state.attended), 1)
        hidden, cell = self.writer(inputs, (state.hidden, state.cell))
        weights = torch.baddbmm(memory.blocked, memory.keys, hidden.unsqueeze(2)).softmax(1)
        context = torch.bmm(weights.transpose(1, 2), memory.values).squeeze(1)
        attended = torch.tanh(self.attend(torch.cat((context, hidden), 1)))
        return State(hidden, cell, dropout(attended, self.rate, self.training))

    def scores(self, attended: Tensor) -> Tensor:
        # The one product that is large; the recurrence is many small ones, which would not gain.
        with torch.autocast("cuda", torch.bfloat16, attended.is_cuda):
            out = linear(attended, self.write_embedding.weight)
        return out.float()

    def forward(self, source: Tensor, lengths: Tensor, given: Tensor) -> Tensor:
        """Scores of the token after each of `given`: (sentences, places, types)."""
        memory, state = self.read(source, lengths)
        attended = []
        for embedded in self.write_embedding(given).unbind(1):
            state = self.step(embedded, state, memory)
            attended.append(state.attended)
        return self.scores(torch.stack(attended, 1))

    @torch.no_grad()
    def translate(self, source: Tensor, lengths: Tensor, end: int, limit: int) -> Tensor:
        """The likeliest token again and again, until all sentences have ended or met the limit."""
        memory, state = self.read(source, lengths)
        token = torch.full_like(source[:, 0], end)
        ended = torch.zeros_like(token, dtype=torch.bool)
        written: list[Tensor] = []
        while len(written) < limit and not ended.all():
            state = self.step(self.write_embedding(token), state, memory)
            token = self.scores(state.attended).argmax(1)
            written.append(token)
            ended |= token == end
        return torch.stack(written, 1)
