"""An LSTM encoder (the reader) and an LSTM decoder with attention (the writer).

The network that fairseq calls lstm_wiseman_iwslt_de_en: one layer each, the reader in one
direction; attention by dot products with a projected state; the attention output is part of the
next input and the only place with dropout; the writer's embeddings are also its output layer.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

INITIAL = 0.1  # weights start uniform in [-INITIAL, INITIAL]


class State(NamedTuple):
    """The writer's state between two steps."""

    hidden: Tensor
    cell: Tensor
    attended: Tensor  # the last attention output


class Memory(NamedTuple):
    """The reader's outputs."""

    values: Tensor  # (sentences, places, width)
    keys: Tensor  # (sentences, places, width)
    blocked: Tensor  # (sentences, places, 1): -inf at padding, else 0


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
        """Encode sentences, one per row, the longest first; `lengths` is on the CPU."""
        packed = pack_padded_sequence(self.read_embedding(source), lengths, batch_first=True)
        outputs, (hidden, cell) = self.reader(packed)
        values, _ = pad_packed_sequence(outputs, batch_first=True)
        # v · (Q h) = (Qᵀ v) · h: projecting the values once saves a product per step.
        keys = linear(values, self.query.weight.t())
        zeros = torch.zeros_like(source, dtype=values.dtype)
        blocked = zeros.masked_fill(source == self.pad, -torch.inf).unsqueeze(2)
        first = State(hidden[0], cell[0], torch.zeros_like(hidden[0]))
        return Memory(values, keys, blocked), first

    def step(self, embedded: Tensor, state: State, memory: Memory) -> State:
        """Advance all sentences by one token."""
        inputs = torch.cat((embedded, state.attended), 1)
        hidden, cell = self.writer(inputs, (state.hidden, state.cell))
        weights = torch.baddbmm(memory.blocked, memory.keys, hidden.unsqueeze(2)).softmax(1)
        context = torch.bmm(weights.transpose(1, 2), memory.values).squeeze(1)
        attended = torch.tanh(self.attend(torch.cat((context, hidden), 1)))
        return State(hidden, cell, dropout(attended, self.rate, self.training))

    def scores(self, attended: Tensor) -> Tensor:
        # The only large product: the small ones of the recurrence would not gain from bfloat16.
        with torch.autocast("cuda", torch.bfloat16, attended.is_cuda):
            out = linear(attended, self.write_embedding.weight)
        return out.float()

    def forward(self, source: Tensor, lengths: Tensor, given: Tensor) -> Tensor:
        """Scores for the token after each of `given`: (sentences, places, types)."""
        memory, state = self.read(source, lengths)
        attended = []
        for embedded in self.write_embedding(given).unbind(1):
            state = self.step(embedded, state, memory)
            attended.append(state.attended)
        return self.scores(torch.stack(attended, 1))

    @torch.no_grad()
    def translate(self, source: Tensor, lengths: Tensor, end: int, limit: int) -> Tensor:
        """Greedy decoding, until all sentences have ended or reached the limit."""
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
