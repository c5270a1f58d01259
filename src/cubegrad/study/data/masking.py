"""Blocks of tokens on a device: which blocks an update takes, and which tokens are masked.

Both depend on (seed, update) alone.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from cubegrad.study.data.tokens import BEGIN, MASK, PAD, SPECIAL, Tokens

MASKED = 0.15  # of a block's tokens, special ones excluded, are predicted
SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1  # of those; the rest is shown unchanged
IGNORED = -100  # a label that does not count


class Blocks(NamedTuple):
    """A part of the text on a device."""

    ids: Tensor  # int32, or the bits of uint16 as int16, which every device can index
    starts: Tensor

    @classmethod
    def of(cls, some: Tokens, device: torch.device) -> "Blocks":
        two_bytes = some.ids.dtype == "uint16"
        ids = torch.from_numpy(some.ids.view("int16") if two_bytes else some.ids)
        return cls(ids.to(device), torch.from_numpy(some.starts).to(device))

    @property
    def number(self) -> int:
        return len(self.starts) - 1

    def rows(self, numbers: Tensor, length: int) -> Tensor:
        """These blocks, each opened by <s> and padded to `length`."""
        starts, ends = self.starts[numbers, None], self.starts[numbers + 1, None]
        places = starts + torch.arange(length - 1, device=starts.device)
        inside = places < ends
        ids = self.at(torch.where(inside, places, starts))
        return pad(torch.where(inside, ids, PAD), (1, 0), value=BEGIN)

    def at(self, places: Tensor) -> Tensor:
        ids = self.ids[places].long()
        return ids & 0xFFFF if self.ids.dtype == torch.int16 else ids

    def to_predict(self, rows: Tensor, vocabulary: int, generator: Generator) -> "Masked":
        """What a model is given of these rows, and asked for."""
        return masked(rows, vocabulary, generator)

    def evenly_spaced(self, most: int, length: int) -> Tensor:
        """At most `most` blocks, from all over the text."""
        count = min(most, self.number)
        numbers = torch.arange(count, device=self.starts.device) * self.number // count
        return self.rows(numbers, length)


class Masked(NamedTuple):
    """Blocks as the model sees them, and the tokens it has to predict."""

    inputs: Tensor  # [blocks, length]
    places: Tensor  # [blocks, predictions]
    labels: Tensor  # [blocks, predictions], IGNORED if a block has fewer

    def split(self, at_once: int) -> Iterator["Masked"]:
        pieces = zip(*(torch.split(tensor, at_once) for tensor in self), strict=True)
        return (Masked(*piece) for piece in pieces)


def masked(rows: Tensor, vocabulary: int, generator: Generator | None) -> Masked:
    """Mask 15 % of each block's tokens, rounded up or down at random so that the mean is exact.

    Every block has as many places as the largest count needs, so no shape depends on what is drawn
    and the host need not wait for the device.
    """
    blocks, length = rows.shape
    most = int(MASKED * length) + 1
    draw: dict[str, Any] = {"generator": generator, "device": rows.device}
    normal = rows >= SPECIAL
    order = torch.rand(rows.shape, **draw).masked_fill(~normal, 2.0)
    places = order.topk(most, largest=False).indices
    counts = (MASKED * normal.sum(1) + torch.rand(blocks, **draw)).floor()
    predicted = torch.arange(most, device=rows.device) < counts[:, None]
    original = rows.gather(1, places)
    uniform = torch.rand(places.shape, **draw)
    other = torch.randint(SPECIAL, vocabulary, places.shape, **draw)
    shown = torch.where(uniform < SHOWN_AS_MASK + SHOWN_AS_ANOTHER, other, original)
    shown = torch.where(uniform < SHOWN_AS_MASK, MASK, shown)
    inputs = rows.scatter(1, places, torch.where(predicted, shown, original))
    return Masked(inputs, places, torch.where(predicted, original, IGNORED))


@lru_cache(maxsize=2)
def shuffled(seed: int, epoch: int, count: int, device: torch.device) -> Tensor:
    """The order of the blocks in a pass over the text."""
    generator = Generator().manual_seed(combined_seed(seed, epoch))
    return torch.randperm(count, generator=generator).to(device)


def block_indices(seed: int, update: int, batch: int, count: int, device: torch.device) -> Tensor:
    """The blocks of an update. An update may span two passes over the text, so all are full."""
    first, end = update * batch, (update + 1) * batch
    pieces = []
    while first < end:
        epoch, place = divmod(first, count)
        pieces.append(shuffled(seed, epoch, count, device)[place : place + end - first])
        first += len(pieces[-1])
    return torch.cat(pieces)


def combined_seed(seed: int, number: int) -> int:
    return (1_000_003 * seed + number) % 2**63
