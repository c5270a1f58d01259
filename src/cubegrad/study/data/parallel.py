"""German sentences with English translations, in the forms in which they are published.

A folder may hold
- `train`, `valid` (or `val`) and `test`, each as two files `.de` and `.en`, one sentence per line:
  IWSLT14 as fairseq's script prepares it, with or without subwords marked by `@@`;
- the same three as tab-separated `.de-en.tsv` or `.en-de.tsv`: Multi30k;
- `deu.txt`, English, tab, German: Tatoeba's pairs, as manythings.org publishes them;
- one pair of files `NAME.de` and `NAME.en`.
The last two are not divided into parts, and are split here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from cubegrad.study.problem import Split, StudyError

PARTS: dict[Split, tuple[str, ...]] = {  # file names, the preferred one first
    "train": ("train",),
    "valid": ("valid", "val"),
    "test": ("test", "test_2016_flickr"),
}
HUNDREDTHS = {"test": 2, "valid": 2}  # of the sentences, if we split
MARK = "@@"  # at the end of a subword that is not the last of its word


class Pair(NamedTuple):
    german: str
    english: str


@dataclass(frozen=True)
class Corpus:
    parts: dict[Split, list[Pair]]
    marked: bool  # words are already cut into subwords


def corpus(data: Path, folders: Sequence[str]) -> Corpus:
    """The pairs in the first of these folders that exists in `data`, or in `data` itself."""
    places = [data / folder for folder in folders if (data / folder).is_dir()] or [data]
    try:
        parts = _read(places[0])
    except OSError as error:
        raise StudyError(
            f"{places[0]} cannot be read ({error}): fix it or use another folder"
        ) from error
    if parts is None:
        raise StudyError(
            f"no German-English sentences in {places[0]}: put train, valid and test there as "
            ".de and .en files or as .de-en.tsv, or Tatoeba's deu.txt; name the folder with --data"
        )
    # Only after a subword: two sentences of Multi30k are just "@@".
    marked = re.compile(rf"\S{MARK} ")
    return Corpus(parts, any(marked.search(text) for pair in parts["train"] for text in pair))


def _read(folder: Path) -> dict[Split, list[Pair]] | None:
    if not folder.is_dir():
        return None
    names = {path.name for path in folder.iterdir()}
    if names & {"train.de", "train.en"}:
        return {part: _two_files(_named(folder, part, ".de")) for part in PARTS}
    for suffix in (".de-en.tsv", ".en-de.tsv"):
        if f"train{suffix}" in names:
            german = suffix.startswith(".en")  # as a number, the German column
            return {part: _tabbed(_named(folder, part, suffix), int(german)) for part in PARTS}
    if "deu.txt" in names:
        return split(_tabbed(folder / "deu.txt", german=1))
    stems = sorted({Path(name).stem for name in names if name.endswith((".de", ".en"))})
    if len(stems) > 1:
        raise StudyError(
            f"{folder} has several texts ({', '.join(stems)}): keep one of them, "
            "or name them train, valid and test"
        )
    return split(_two_files(folder / f"{stems[0]}.de")) if stems else None


def _named(folder: Path, part: Split, suffix: str) -> Path:
    paths = [folder / f"{name}{suffix}" for name in PARTS[part]]
    return next((path for path in paths if path.is_file()), paths[0])


def lines(path: Path) -> list[str]:
    """A file's lines, without spaces at their ends."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise StudyError(f"{path} is missing: put it there beside the others") from None
    except UnicodeDecodeError as error:
        raise StudyError(
            f"{path} is not UTF-8 at byte {error.start}: convert it, or download it again"
        ) from None
    if not text.strip():
        raise StudyError(f"{path} is empty: download it again")
    # Not splitlines, which also splits at characters that occur in sentences.
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def _two_files(german: Path) -> list[Pair]:
    english = german.with_suffix(".en")
    texts = lines(german), lines(english)
    if len(texts[0]) != len(texts[1]):
        raise StudyError(
            f"{german} has {len(texts[0]):,} lines and {english.name} {len(texts[1]):,}: "
            "line i of one must translate line i of the other; download both again"
        )
    return [Pair(*texts) for texts in zip(*texts, strict=True)]


def _tabbed(path: Path, german: int) -> list[Pair]:
    """One pair per line; columns after the second, such as Tatoeba's authors, are ignored."""
    pairs = []
    for number, line in enumerate(lines(path), 1):
        columns = [column.strip() for column in line.split("\t")[:2]]
        if len(columns) < 2 or not all(columns):
            raise StudyError(
                f"{path}, line {number}: {line[:40]!r} is not two sentences with a tab between; "
                "fix or delete the line"
            )
        pairs.append(Pair(columns[german], columns[1 - german]))
    return pairs


def split(pairs: Iterable[Pair]) -> dict[Split, list[Pair]]:
    """Parts that share no sentence, independent of the order of the pairs.

    Many sentences have several translations. Pairs connected by a shared sentence form a group,
    and a checksum of its alphabetically first German sentence decides its part.
    """
    pairs = list(pairs)
    groups = _groups(pairs)
    first: dict[int, str] = {}
    for pair, group in zip(pairs, groups, strict=True):
        first[group] = min(pair.german, first.get(group, pair.german))
    parts: dict[Split, list[Pair]] = {"train": [], "valid": [], "test": []}
    for pair, group in zip(pairs, groups, strict=True):
        hundredth = crc32(first[group].encode()) % 100
        if hundredth < HUNDREDTHS["test"]:
            parts["test"].append(pair)
        elif hundredth < HUNDREDTHS["test"] + HUNDREDTHS["valid"]:
            parts["valid"].append(pair)
        else:
            parts["train"].append(pair)
    for part, members in parts.items():
        if not members:
            raise StudyError(
                f"{len(pairs):,} pairs are too few to split, {part} would be empty: "
                "give more, or three parts of your own"
            )
    return parts


def _groups(pairs: Sequence[Pair]) -> list[int]:
    """The group number of each pair: pairs that share a sentence are in one group."""
    parent: list[int] = []  # union-find: each node's parent; a root is its own

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    number: dict[tuple[str, str], int] = {}
    nodes = []
    for pair in pairs:
        ends = []
        for sentence in zip(Pair._fields, pair, strict=True):  # English "Oh!" is not German "Oh!"
            if sentence not in number:
                number[sentence] = len(parent)
                parent.append(len(parent))
            ends.append(root(number[sentence]))
        parent[max(ends)] = min(ends)
        nodes.append(min(ends))
    return [root(node) for node in nodes]
