"""Plain text in .txt or .txt.xz files: documents, sentences, and their split into parts.

A line `<|name|>` starts a document, and so does a file. A folder either has its parts as train.txt,
valid.txt and test.txt, or its documents are split: of every twenty the tenth is for validation and
the last for the test.
"""

import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cubegrad.study.problem import Split, StudyError

PARTS: tuple[Split, ...] = ("train", "valid", "test")
SUFFIXES = (".txt", ".txt.xz")
PERIOD = 20  # of this many documents one is for validation and one for the test
STRETCH = 50  # sentences that are split like a document if there are too few documents

MARK = re.compile(r"<\|.*\|>")
END = re.compile(r"[.!?][\"'’”)\]]*$")
# White space after an end mark and before a character that can start a sentence.
BETWEEN = re.compile(r"(?<=[.!?])[\"'’”)\]]*(\s+)(?=[\"'‘“(\[]*[^\W_a-z])")


@dataclass(frozen=True)
class Texts:
    """The files of a corpus, by part if the folder has parts, else all under "train"."""

    place: Path
    files: dict[Split, tuple[Path, ...]]

    @property
    def has_parts(self) -> bool:
        return len(self.files) > 1

    def sentences(self) -> Iterator[tuple[Split, int, str]]:
        """All sentences in order, each with its part and the number of its document."""
        for part, document, text in self.verbatim():
            yield part, document, on_one_line(text)

    def verbatim(self) -> Iterator[tuple[Split, int, str]]:
        """The same with all white space, so that joined sentences are the text."""
        if self.has_parts:
            for part in PARTS:
                for document, sentence in read(self.files[part]):
                    yield part, document, sentence
            return
        files = self.files["train"]
        few = documents(files) < PERIOD
        for number, (document, sentence) in enumerate(read(files)):
            yield part_of(number // STRETCH if few else document), document, sentence


def part_of(number: int) -> Split:
    """The part of a document or stretch, by its number."""
    place = number % PERIOD
    if place == PERIOD - 1:
        return "test"
    return "valid" if place == PERIOD // 2 - 1 else "train"


def find(data: Path, name: str) -> Texts:
    """The texts in the folder `name` of `data`, or in `data` itself, which may be a file."""
    place = data / name if (data / name).is_dir() else data
    try:
        files = [data] if data.is_file() else sorted(place.iterdir())
    except OSError:
        files = []
    texts = [file for file in files if file.name.endswith(SUFFIXES) and file.is_file()]
    if not texts:
        raise StudyError(
            f"there is no text in {data / name} or {data}: put .txt or .txt.xz files there, "
            "in UTF-8, or name their folder with --data (docs/problems/bookwiki.md)"
        )
    by_stem = {file.name.partition(".txt")[0]: file for file in texts}
    if not any(part in by_stem for part in PARTS):
        return Texts(place, {"train": tuple(texts)})
    for part in PARTS:
        if part not in by_stem:
            raise StudyError(
                f"{place} has parts and {part}.txt is not among them: add it, or rename the files "
                "to have their documents split"
            )
    return Texts(place, {part: (by_stem[part],) for part in PARTS})


def read(files: tuple[Path, ...]) -> Iterator[tuple[int, str]]:
    """Sentences, each with the white space after it and the number of its document, from 0.

    A line ends a sentence, unless it lacks an end mark and the next starts with a lower-case
    letter: then the text was wrapped there.
    """
    document = -1
    for path in files:
        opens = True
        for paragraph in _paragraphs(path):
            if _is_mark(paragraph):
                opens = True
                continue
            for sentence in split(paragraph):
                document += opens
                opens = False
                yield document, sentence


def _paragraphs(path: Path) -> Iterator[str]:
    """Lines, each with its line end, the wrapped lines that continue it and blank lines."""
    held = ""
    for line in _lines(path):
        text = line.strip()
        ended = held.endswith("\n\n") or _is_mark(held) or END.search(held.rstrip())
        wrapped = text[:1].islower() and held.strip() and not ended
        if not wrapped and text:
            yield held
            held = ""
        held += f"{line}\n" if text else "\n"
    yield held


def split(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph. "Mr. Smith" is cut in two, which does no harm here."""
    start = 0
    for gap in BETWEEN.finditer(paragraph):
        yield paragraph[start : gap.end(1)]
        start = gap.end(1)
    if paragraph[start:].strip():
        yield paragraph[start:]


def on_one_line(sentence: str) -> str:
    return " ".join(line.strip() for line in sentence.strip().split("\n"))


def documents(files: tuple[Path, ...]) -> int:
    """The number of documents, by their marks, including empty ones."""
    return sum(max(sum(map(_is_mark, _lines(path))), 1) for path in files)


def _is_mark(line: str) -> bool:
    return MARK.fullmatch(line.strip()) is not None


def _lines(path: Path) -> Iterator[str]:
    """Lines without their ends and without byte-order marks."""
    number = 0
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):  # noqa: B007
                yield raw.decode("utf-8").replace("\ufeff", "").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise StudyError(
            f"{path} is not UTF-8 (line {number}: {error.reason}): convert it, "
            "as with iconv -f latin1 -t utf-8"
        ) from None
    except (EOFError, lzma.LZMAError) as error:
        raise StudyError(
            f"{path} cannot be unpacked after line {number} ({error}): fetch it again"
        ) from None
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error}): fix it or remove it") from None
