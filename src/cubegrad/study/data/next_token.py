"""Text for causal models: documents one after another, cut into full blocks."""

import itertools
import sys
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from tqdm import tqdm

from cubegrad.study.data import tokens
from cubegrad.study.data.masking import Blocks, Masked
from cubegrad.study.data.plain_text import PARTS, Texts
from cubegrad.study.data.tokens import LARGEST, Tokens
from cubegrad.study.problem import Split

# A tokenizer needs some 150 bytes of memory for each character it is given (tokenizers 0.23).
PASSAGE = 100_000  # characters: a longer document is tokenized in passages that end with a line
AT_ONCE = 100  # passages


class WithEnd(NamedTuple):
    """A tokenizer of the library `tokenizers` that adds no special tokens."""

    tokenizer: Any
    end: int  # the id of the end-of-text token
    size: int  # all ids are below


class FullBlocks(Blocks):
    """Blocks without padding, of which each token is predicted from those before it."""

    def rows(self, numbers: Tensor, length: int) -> Tensor:
        starts = self.starts[numbers, None]
        return self.at(starts + torch.arange(length, device=starts.device))

    def to_predict(self, rows: Tensor, vocabulary: int, generator: Generator) -> Masked:  # noqa: ARG002
        places = torch.arange(rows.shape[1] - 1, device=rows.device).expand(len(rows), -1)
        return Masked(rows, places, rows[:, 1:])


def encoded(own: WithEnd, texts: Texts, length: int) -> dict[Split, Tokens]:
    """The documents of each part, each followed by the end-of-text token, in blocks."""
    numbers = {part: array("H" if own.size <= LARGEST else "i") for part in PARTS}
    for part, ids, ends in _encoded(own, texts):
        numbers[part].extend(ids)
        if ends:
            numbers[part].append(own.end)
    parts: dict[Split, Tokens] = {}
    for part in PARTS:
        tokens.check_enough(texts, part, len(numbers[part]), length)
        starts = np.arange(0, len(numbers[part]) + 1, length)  # the rest is left out
        parts[part] = Tokens(np.array(numbers[part])[: starts[-1]], starts)
    return parts


def passages(texts: Texts) -> Iterator[tuple[Split, str, bool]]:
    """The text of each document, in passages if it is long, and whether each is its last."""
    pieces = itertools.groupby(texts.verbatim(), key=lambda piece: piece[:2])
    for (part, _), sentences in pieces:
        held = ""
        for _, _, sentence in sentences:
            if len(held) >= PASSAGE and held.endswith("\n"):
                yield part, held, False
                held = ""
            held += sentence
        yield part, held.rstrip(), True


def _encoded(own: WithEnd, texts: Texts) -> Iterator[tuple[Split, list[int], bool]]:
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds; fewer lines in a log
    bar = tqdm(desc=f"tokens of {texts.place}", unit=" passages", mininterval=pace)
    waiting = passages(texts)
    with bar:
        while some := list(itertools.islice(waiting, AT_ONCE)):
            encodings = own.tokenizer.encode_batch_fast([text for _, text, _ in some])
            for (part, _, ends), encoding in zip(some, encodings, strict=True):
                yield part, encoding.ids, ends
            bar.update(len(some))
