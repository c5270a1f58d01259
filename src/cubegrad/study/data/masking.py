"""Blocks of tokens on a device: which an update takes, and what is masked in them.

Both are functions of (seed, update) alone.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from cubegrad.study.data.tokens import BEGIN, MASK, PAD, SPECIAL, Tokens

MASKED = 0.15  # of a block's tokens; the special ones stay
SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1  # of those; the rest is shown as it is
UNASKED = -100  # a label that does not count


class Blocks(NamedTuple):
    """A part of the text on a device."""

    ids: Tensor  # the bits of uint16 as int16, which every device can index
    starts: Tensor

    @classmethod
    def of(cls, some: Tokens, device: torch.device) -> "Blocks":
        ids = torch.from_numpy(some.ids.view("int16"))
        return cls(ids.to(device), torch.from_numpy(some.starts).to(device))

    @property
    def number(self) -> int:
        return len(self.starts) - 1

    def rows(self, numbers: Tensor, length: int) -> Tensor:
        """These blocks, each opened by <s> and padded to `length`."""
        starts, ends = self.starts[numbers, None], self.starts[numbers + 1, None]
        places = starts + torch.arange(length - 1, device=starts.device)
        inside = places < ends
        ids = self.ids[torch.where(inside, places, starts)].long() & 0xFFFF
        return pad(torch.where(inside, ids, PAD), (1, 0), value=BEGIN)


class Masked(NamedTuple):
    """Blocks as the model sees them, and what it is asked: which token stood at which place."""

    inputs: Tensor  # [blocks, length]
    places: Tensor  # [blocks, questions]
    labels: Tensor  # [blocks, questions], UNASKED where a block has fewer

    def split(self, at_once: int) -> Iterator["Masked"]:
        pieces = zip(*(torch.split(tensor, at_once) for tensor in self), strict=True)
        return (Masked(*piece) for piece in pieces)


def masked(rows: Tensor, vocabulary: int, generator: Generator | None) -> Masked:
    """15 % of each block's tokens; the fraction that is left over is one more with that chance.

    The most that a block can be asked is known before, so no shape depends on what is drawn and
    the host need not wait to learn it.
    """
    blocks, length = rows.shape
    most = int(MASKED * length) + 1
    draw: dict[str, Any] = {"generator": generator, "device": rows.device}
    may = rows >= SPECIAL
    places = torch.rand(rows.shape, **draw).masked_fill(~may, 2.0).topk(most, largest=False).indices
    counts = (MASKED * may.sum(1) + torch.rand(blocks, **draw)).floor()
    asked = torch.arange(most, device=rows.device) < counts[:, None]
    there = rows.gather(1, places)
    fate = torch.rand(places.shape, **draw)
    other = torch.randint(SPECIAL, vocabulary, places.shape, **draw)
    shown = torch.where(fate < SHOWN_AS_MASK + SHOWN_AS_ANOTHER, other, there)
    shown = torch.where(fate < SHOWN_AS_MASK, MASK, shown)
    inputs = rows.scatter(1, places, torch.where(asked, shown, there))
    return Masked(inputs, places, torch.where(asked, there, UNASKED))


@lru_cache(maxsize=2)
def shuffled(seed: int, turn: int, count: int, device: torch.device) -> Tensor:
    """The order in which a turn through the text takes its blocks."""
    generator = Generator().manual_seed(mixed(seed, turn))
    return torch.randperm(count, generator=generator).to(device)


def numbers_of(seed: int, update: int, batch: int, count: int, device: torch.device) -> Tensor:
    """The blocks of an update. Turns follow one another without a gap, so all updates are full."""
    first, end = update * batch, (update + 1) * batch
    pieces = []
    while first < end:
        turn, place = divmod(first, count)
        pieces.append(shuffled(seed, turn, count, device)[place : place + end - first])
        first += len(pieces[-1])
    return torch.cat(pieces)


def mixed(seed: int, number: int) -> int:
    return (1_000_003 * seed + number) % 2**63
