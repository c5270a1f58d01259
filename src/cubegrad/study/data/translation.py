"""Parallel text as ids, in batches of sentences of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cubegrad.study.data import parallel
from cubegrad.study.data.parallel import Corpus, Pair
from cubegrad.study.data.subwords import BytePairs, Marked, Sentences, Subwords, Vocabulary
from cubegrad.study.problem import Split, StudyError

MULTIPLE = 8  # of sentences in a batch, if possible


class Part(NamedTuple):
    source: Sentences
    target: Sentences
    references: list[str]


@dataclass(frozen=True)
class Text:
    """A corpus as ids."""

    subwords: Subwords
    german: Vocabulary
    english: Vocabulary
    parts: dict[Split, Part]
    tokenised: bool


class Batch(NamedTuple):
    source: Tensor  # one sentence per row, the longest first
    lengths: Tensor  # of the source, on the CPU
    target: Tensor


@dataclass(frozen=True)
class Limits:
    """How much of a corpus to use. 0 is no limit."""

    train: int = 0  # pairs
    test: int = 0  # pairs, also of valid
    words: int = 0  # per sentence

    def select(self, pairs: list[Pair], count: int) -> list[Pair]:
        """`count` of the short ones, evenly spaced, as some files are sorted."""
        words = [max(len(text.split()) for text in pair) for pair in pairs]
        short = [p for p, n in zip(pairs, words, strict=True) if n <= (self.words or n)]
        if not short or 10 * len(short) < min(count, len(pairs)):
            raise StudyError(
                f"{len(short)} of {len(pairs):,} pairs have at most {self.words} words, and this "
                f"preset takes {count:,} of those; use other data or another --preset"
            )
        count = min(count or len(short), len(short))
        return [short[place * len(short) // count] for place in range(count)]

    def of(self, corpus: Corpus) -> dict[Split, list[Pair]]:
        counts: dict[Split, int] = {"train": self.train, "valid": self.test, "test": self.test}
        return {part: self.select(corpus.parts[part], count) for part, count in counts.items()}


@lru_cache(maxsize=1)
def prepared(data: Path, folders: tuple[str, ...], merges: int, limits: Limits) -> Text:
    """The corpus as ids. Cached for the runs of one process: learning subwords takes seconds."""
    corpus = parallel.corpus(data, folders)
    pairs = limits.of(corpus)
    texts = [text for side in zip(*pairs["train"], strict=True) for text in side]
    subwords = Marked() if corpus.marked else BytePairs(texts, merges)
    german, english = (
        {part: subwords.cut([pair[side] for pair in some]) for part, some in pairs.items()}
        for side in (0, 1)
    )
    vocabularies = Vocabulary(german["train"]), Vocabulary(english["train"])
    parts = {
        part: Part(
            Sentences(map(vocabularies[0].encode, german[part])),
            Sentences(map(vocabularies[1].encode, english[part])),
            [] if part == "train" else [subwords.join(pieces) for pieces in english[part]],
        )
        for part in pairs
    }
    return Text(subwords, *vocabularies, parts, corpus.marked)


def by_length(part: Part, tokens: int, order: Tensor) -> list[list[int]]:
    """Indices of sentences in batches of at most `tokens` tokens per side, padding included.

    As in fairseq: sentences in the given order are sorted by source length, then target length;
    a full batch has a multiple of 8 of them.
    """
    order = order[part.target.lengths[order].argsort(stable=True)]
    order = order[part.source.lengths[order].argsort(stable=True)]
    lengths = torch.maximum(part.source.lengths, part.target.lengths)[order].tolist()
    if lengths and max(lengths) > tokens:
        raise StudyError(
            f"a sentence has {max(lengths)} tokens and a batch {tokens}; use --batch {max(lengths)}"
        )
    batches = []
    start, longest = 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        while (place + 1 - start) * longest > tokens:
            count = place - start
            count = count // MULTIPLE * MULTIPLE or count
            batches.append(order[start : start + count].tolist())
            start += count
            longest = max(lengths[start : place + 1])
    batches.append(order[start:].tolist())
    return batches


def batch_of(part: Part, members: Sequence[int], device: torch.device) -> Batch:
    index = torch.tensor(members).flip(0)  # they come with the shortest source first
    target = part.target.padded(index).to(device)
    return Batch(part.source.padded(index).to(device), part.source.lengths[index], target)
