"""Sentences as ids: a joint byte-pair encoding, and a vocabulary for each language."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from cubegrad.study.data.parallel import MARK
from cubegrad.study.problem import optional

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # as in fairseq; <s> is not used
PAD, END, UNKNOWN = 1, 2, 3
MULTIPLE = 8  # vocabulary sizes are rounded up to it, as in fairseq, for matrix units
BYTES = 256


class Subwords(Protocol):
    def cut(self, texts: Sequence[str]) -> list[list[str]]: ...

    def join(self, pieces: Iterable[str]) -> str: ...


class Marked:
    """Text that is already cut into subwords: `@@` ends each one except a word's last."""

    def cut(self, texts: Sequence[str]) -> list[list[str]]:
        return [text.split() for text in texts]

    def join(self, pieces: Iterable[str]) -> str:
        return " ".join(pieces).replace(f"{MARK} ", "").removesuffix(MARK)


class BytePairs:
    """Byte pairs merged by frequency within words. Joining a cut text restores it exactly."""

    def __init__(self, texts: Iterable[str], merges: int) -> None:
        tokenizers: Any = optional("tokenizers")
        self.bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        # With a space before it the first word is encoded like one in the middle of a sentence.
        self.bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        self.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=BYTES + merges,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        self.bpe.train_from_iterator(texts, trainer)

    def cut(self, texts: Sequence[str]) -> list[list[str]]:
        return [encoding.tokens for encoding in self.bpe.encode_batch(list(texts))]

    def join(self, pieces: Iterable[str]) -> str:
        text: str = self.decoder.decode(list(pieces))
        return text.removeprefix(" ")


class Vocabulary:
    """The types (distinct tokens) of one language's training text, by frequency, and their ids."""

    def __init__(self, sentences: Iterable[Sequence[str]]) -> None:
        counts = Counter(piece for pieces in sentences for piece in pieces)
        ordered = sorted(counts, key=lambda piece: (-counts[piece], piece))
        self.types = [*SPECIAL, *(piece for piece in ordered if piece not in SPECIAL)]
        self.numbers = {piece: number for number, piece in enumerate(self.types)}

    def __len__(self) -> int:
        return -(-len(self.types) // MULTIPLE) * MULTIPLE

    def encode(self, pieces: Iterable[str]) -> list[int]:
        """Ids, followed by END."""
        return [*(self.numbers.get(piece, UNKNOWN) for piece in pieces), END]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The types before END, if there is one."""
        pieces = []
        for number in numbers:
            if number == END:
                break
            # Ids beyond the types exist only to round the size up.
            pieces.append(self.types[number] if number < len(self.types) else SPECIAL[UNKNOWN])
        return pieces


class Sentences:
    """Many sentences as ids, concatenated in one tensor."""

    def __init__(self, sentences: Iterable[Sequence[int]]) -> None:
        sentences = list(sentences)
        self.lengths = torch.tensor([len(numbers) for numbers in sentences])
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.numbers = torch.tensor([number for numbers in sentences for number in numbers])

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, index: Tensor) -> Tensor:
        """These sentences as rows, padded on the right."""
        lengths = self.lengths[index, None]
        across = torch.arange(int(lengths.max()))
        places = (self.starts[index, None] + across).clamp_(max=len(self.numbers) - 1)
        return torch.where(across < lengths, self.numbers[places], PAD)
