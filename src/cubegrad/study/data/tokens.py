"""Text as token ids: a byte-level BPE of the training text, and blocks of whole sentences.

Both are computed once and cached in a file named by a checksum of the text and the sizes; a damaged
file is computed again. It is written beside the text or, if that is read-only, in the user's cache.
"""

import hashlib
import itertools
import json
import os
import sys
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from cubegrad.study.data.plain_text import PARTS, Texts
from cubegrad.study.problem import Split, StudyError, optional

# The ids of RoBERTa's special tokens, except <mask>, which RoBERTa has at the end.
BEGIN, PAD, END, UNKNOWN, MASK = range(5)
SPECIAL = 5
LARGEST = 2**16  # vocabulary: ids are stored in two bytes
FORM = 1  # version of the file's format, part of its checksum
AT_ONCE = 10_000  # sentences


@dataclass(frozen=True)
class Tokens:
    """One part. Block i is ids[starts[i] : starts[i + 1]], without its opening <s>."""

    ids: Any  # uint16; int32 for a causal model whose vocabulary does not fit
    starts: Any  # int64, followed by the end of the last block


@dataclass(frozen=True)
class Corpus:
    parts: dict[Split, Tokens]
    vocabulary: int  # number of tokens, special ones included
    tokenizer: str  # in the JSON of the library `tokenizers`


def corpus(texts: Texts, vocabulary: int, length: int) -> Corpus:
    """The text in blocks of up to `length` tokens, including the opening <s>."""
    name = f"cubegrad-tokens-{checksum(texts, vocabulary, length)[:20]}.npz"
    places = [texts.place if texts.place.is_dir() else texts.place.parent, cache_folder()]
    for place in places:
        cached = _load(place / name)
        if cached is not None:
            return cached
    made = tokenized(texts, vocabulary, length)
    errors = []
    for place in places:
        try:
            _save(place / name, made)
        except OSError as error:
            errors.append(f"{place} ({error.strerror or error})")
        else:
            return made
    raise StudyError(
        f"the tokens of {texts.place} can be kept neither in {' nor in '.join(errors)}: "
        "make one of them writable, or set XDG_CACHE_HOME"
    )


def checksum(texts: Texts, vocabulary: int, length: int) -> str:
    """Of everything that determines the tokens, except the version of the tokenizer library."""
    digest = hashlib.sha256(f"{FORM} {vocabulary} {length}".encode())
    for part, files in texts.files.items():
        for path in files:
            try:
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise StudyError(f"{path} cannot be read ({error}): fix it or remove it") from None
            digest.update(f"\n{part} {content}".encode())
    return digest.hexdigest()


def tokenized(texts: Texts, vocabulary: int, length: int) -> Corpus:
    if not SPECIAL + 256 <= vocabulary <= LARGEST:
        raise StudyError(
            f"a vocabulary of {vocabulary} must be {SPECIAL + 256} (special tokens and bytes) to "
            f"{LARGEST} tokens; use 8192"
        )
    tokenizer = train((text for part, _, text in texts.sentences() if part == "train"), vocabulary)
    parts = encoded(tokenizer, texts, length)
    return Corpus(parts, SPECIAL + tokenizer.get_vocab_size(), tokenizer.to_str())


def encoded(tokenizer: Any, texts: Texts, length: int) -> dict[Split, Tokens]:
    """The text in blocks, in the tokens of a tokenizer that may be another text's."""
    numbers = {part: array("H") for part in PARTS}
    sizes = {part: array("H") for part in PARTS}
    last = dict.fromkeys(PARTS, -1)
    for (part, document, _), ids in _encoded(tokenizer, texts):
        # Another END between documents, as fairseq has for a blank line.
        between = [END] if last[part] not in (-1, document) else []
        last[part] = document
        numbers[part].extend([*between, *(SPECIAL + number for number in ids), END])
        sizes[part].extend([*(len(between) * [1]), *_pieces(len(ids) + 1, length - 1)])
    parts: dict[Split, Tokens] = {}
    for part in PARTS:
        check_enough(texts, part, len(numbers[part]), length)
        parts[part] = Tokens(np.array(numbers[part]), packed(sizes[part], length - 1))
    return parts


def check_enough(texts: Texts, part: Split, count: int, length: int) -> None:
    if count < length:
        raise StudyError(
            f"{texts.place} has {count} tokens for {part!r} and one block takes {length}: "
            "add more text"
        )


def train(sentences: Iterable[str], vocabulary: int) -> Any:
    """Byte-level BPE as in GPT-2, without special tokens, so that no text is encoded as one."""
    library = optional("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary - SPECIAL,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def packed(sizes: Iterable[int], limit: int) -> Any:
    """The starts of blocks: a block takes whole sentences as long as they fit."""
    starts, size, end = array("q", [0]), 0, 0
    for one in sizes:
        if size and size + one > limit:
            starts.append(end)
            size = 0
        size += one
        end += one
    starts.append(end)
    return np.array(starts)


def joined(first: Tokens, second: Tokens) -> Tokens:
    starts = np.concatenate([first.starts[:-1], first.starts[-1] + second.starts])
    return Tokens(np.concatenate([first.ids, second.ids]), starts)


def _pieces(size: int, limit: int) -> Iterator[int]:
    """Cut a sentence that is longer than a block, which fairseq would refuse."""
    while size > limit:
        yield limit
        size -= limit
    yield size


def _encoded(tokenizer: Any, texts: Texts) -> Iterator[tuple[tuple[Split, int, str], list[int]]]:
    pace = 0.1 if sys.stderr.isatty() else 10  # seconds; fewer lines in a log
    bar = tqdm(desc=f"tokens of {texts.place}", unit=" sentences", mininterval=pace)
    sentences = texts.sentences()
    with bar:
        while some := list(itertools.islice(sentences, AT_ONCE)):
            encodings = tokenizer.encode_batch_fast([text for _, _, text in some])
            yield from zip(some, (encoding.ids for encoding in encodings), strict=True)
            bar.update(len(some))


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cubegrad"


def _save(path: Path, made: Corpus) -> None:
    """Atomic rename: processes that write the same file never see a partial one."""
    about = json.dumps({"vocabulary": made.vocabulary, "tokenizer": made.tokenizer}).encode()
    arrays: dict[str, Any] = {"about": np.frombuffer(about, np.uint8)}
    for part, tokens in made.parts.items():
        arrays |= {f"{part}_ids": tokens.ids, f"{part}_starts": tokens.starts}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _load(path: Path) -> Corpus | None:
    """None if the file is missing or damaged: a zip has a checksum for each member."""
    try:
        # Opened here: np.load leaves a file open that turns out not to be a zip.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes())
            parts = {
                part: Tokens(arrays[f"{part}_ids"], arrays[f"{part}_starts"]) for part in PARTS
            }
            return Corpus(parts, about["vocabulary"], about["tokenizer"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
