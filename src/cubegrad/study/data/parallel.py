"""German sentences with their English translations, in the forms they are published in.

A folder may hold
- `train`, `valid` (or `val`) and `test`, each as two files `.de` and `.en` with a sentence a line:
  IWSLT14 as fairseq's script prepares it, with or without subwords marked by `@@`;
- the same three as tab-separated `.de-en.tsv` or `.en-de.tsv`: Multi30k;
- `deu.txt`, English, tab, German: Tatoeba's pairs, as manythings.org publishes them;
- one pair of files `NAME.de` and `NAME.en`.
The last two have no parts of their own and are split here.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from cubegrad.study.problem import Split, StudyError

PARTS: dict[Split, tuple[str, ...]] = {  # the names they go by, the preferred first
    "train": ("train",),
    "valid": ("valid", "val"),
    "test": ("test", "test_2016_flickr"),
}
HUNDREDTHS = {"test": 2, "valid": 2}  # of the sentences, where we split
MARK = "@@"  # at the end of a subword that its word goes on after


class Pair(NamedTuple):
    german: str
    english: str


@dataclass(frozen=True)
class Corpus:
    parts: dict[Split, list[Pair]]
    marked: bool  # words are cut into subwords already


def corpus(data: Path, folders: Sequence[str]) -> Corpus:
    """The pairs of the first of these folders of `data` that is there, or of `data` itself."""
    places = [data / folder for folder in folders if (data / folder).is_dir()] or [data]
    try:
        parts = _read(places[0])
    except OSError as error:
        raise StudyError(
            f"{places[0]} cannot be read ({error}): mend it or use another folder"
        ) from error
    if parts is None:
        raise StudyError(
            f"no German-English sentences in {places[0]}: put train, valid and test there as "
            ".de and .en files or as .de-en.tsv, or Tatoeba's deu.txt; name the folder with --data"
        )
    # A subword stands before the mark: Multi30k has "@@" in place of two sentences.
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
            german = suffix.startswith(".en")  # the number of the German column
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
            f"{path} is not UTF-8 at byte {error.start}: convert it, or take it anew"
        ) from None
    if not text.strip():
        raise StudyError(f"{path} is empty: take it anew from where you have it")
    # Not splitlines: it also cuts at characters that stand inside sentences.
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def _two_files(german: Path) -> list[Pair]:
    english = german.with_suffix(".en")
    texts = lines(german), lines(english)
    if len(texts[0]) != len(texts[1]):
        raise StudyError(
            f"{german} has {len(texts[0]):,} lines and {english.name} {len(texts[1]):,}: "
            "line i of one must translate line i of the other; take both anew"
        )
    return [Pair(*texts) for texts in zip(*texts, strict=True)]


def _tabbed(path: Path, german: int) -> list[Pair]:
    """A pair a line; columns after the second, such as Tatoeba's authors, are left out."""
    pairs = []
    for number, line in enumerate(lines(path), 1):
        columns = [column.strip() for column in line.split("\t")[:2]]
        if len(columns) < 2 or not all(columns):
            raise StudyError(
                f"{path}, line {number}: {line[:40]!r} is not two sentences with a tab between; "
                "mend or delete the line"
            )
        pairs.append(Pair(columns[german], columns[1 - german]))
    return pairs


def split(pairs: Iterable[Pair]) -> dict[Split, list[Pair]]:
    """Parts that share no sentence, whatever the order of the pairs.

    Many sentences have several translations. All that hang together through them go to the part
    that a checksum of their first German sentence, in the order of the alphabet, says.
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
    """For each pair the number of its group: those that share a sentence have one number."""
    above: list[int] = []  # a tree for each group; a root is above itself

    def root(node: int) -> int:
        while above[node] != node:
            above[node] = above[above[node]]
            node = above[node]
        return node

    number: dict[tuple[str, str], int] = {}
    nodes = []
    for pair in pairs:
        ends = []
        for sentence in zip(Pair._fields, pair, strict=True):  # English "Oh!" is not German "Oh!"
            if sentence not in number:
                number[sentence] = len(above)
                above.append(len(above))
            ends.append(root(number[sentence]))
        above[max(ends)] = min(ends)
        nodes.append(min(ends))
    return [root(node) for node in nodes]
