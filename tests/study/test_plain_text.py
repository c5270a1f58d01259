"""Plain text: its documents, sentences and parts, and every way in which a file can be wrong."""

import itertools
import lzma

import pytest
from small_text import write_texts

from cubegrad.study import StudyError
from cubegrad.study.cli import main
from cubegrad.study.data import plain_text
from cubegrad.study.data.plain_text import find, on_one_line, read, split


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("It rained. We went. ", ["It rained.", "We went."]),
        ('"Why?" She left. "I see!" 3 came.', ['"Why?"', "She left.", '"I see!"', "3 came."]),
        ("Stop! he said. ‘No’ (Never.) Élan.", ["Stop! he said.", "‘No’ (Never.)", "Élan."]),
        ("a . The b", ["a .", "The b"]),
        ("no end", ["no end"]),
        ("", []),
    ],
)
def test_sentences_of_a_paragraph(paragraph, sentences):
    found = list(split(paragraph))
    assert [on_one_line(one) for one in found] == sentences
    assert "".join(found) == paragraph


def test_documents_lines_and_wrapped_lines(tmp_path):
    text = (
        "<|First_1900|>\n\ufeffTITLE\r\n\r\n"
        "One line that was\r\nwrapped here. And a\r\nsecond one.\r\n"
        "lower after an end\r\n\r\nafter a blank\n<|Empty|>\n<|Second|>\nIts text.\n"
    )
    write_texts(tmp_path, a=text, b="Another file.\n")
    files = find(tmp_path, "novels").files["train"]
    assert [(document, on_one_line(one)) for document, one in read(files)] == [
        (0, "TITLE"),
        (0, "One line that was wrapped here."),
        (0, "And a second one."),
        (0, "lower after an end"),
        (0, "after a blank"),
        (1, "Its text."),
        (2, "Another file."),
    ]
    plain = text.replace("\ufeff", "").replace("\r", "")
    first = plain.removeprefix("<|First_1900|>\n").partition("<|Empty|>")[0]
    assert "".join(one for document, one in read(files) if document == 0) == first


def test_whole_documents_go_to_each_part(tmp_path):
    text = "".join(f"<|n{i}|>\nFirst of {i}.\nSecond of {i}.\n" for i in range(45))
    write_texts(tmp_path / "novels", all=text)
    texts = find(tmp_path, "novels")
    assert not texts.has_parts
    parts = {}
    for part, document, sentence in texts.sentences():
        assert sentence in (f"First of {document}.", f"Second of {document}.")
        parts.setdefault(part, set()).add(document)
    assert parts["test"] == {19, 39}
    assert parts["valid"] == {9, 29}
    assert parts["train"] == set(range(45)) - {9, 19, 29, 39}


def test_one_long_document_is_divided_into_stretches(tmp_path):
    write_texts(tmp_path, mine="".join(f"Line {i}.\n" for i in range(2000)))
    found = {part: [] for part in plain_text.PARTS}
    for part, document, sentence in find(tmp_path / "mine.txt", "novels").sentences():
        assert document == 0
        found[part].append(int(sentence[5:-1]))
    assert found["valid"] == [*range(450, 500), *range(1450, 1500)]
    assert found["test"] == [*range(950, 1000), *range(1950, 2000)]
    assert sorted(itertools.chain(*found.values())) == list(range(2000))


def test_given_parts_are_used_and_packed_files_read(tmp_path):
    folder = write_texts(
        tmp_path / "wikitext-2", valid="Chosen by.\n", test="Judged by.\n", other="No.\n"
    )
    (folder / "train.txt.xz").write_bytes(lzma.compress(b"Learnt from.\n"))
    texts = find(tmp_path, "wikitext-2")
    assert texts.has_parts
    assert list(texts.sentences()) == [
        ("train", 0, "Learnt from."),
        ("valid", 0, "Chosen by."),
        ("test", 0, "Judged by."),
    ]
    (folder / "test.txt").unlink()
    with pytest.raises(StudyError, match=r"wikitext-2 has parts and test\.txt is not among them"):
        find(tmp_path, "wikitext-2")


LONG = "A sentence of several words stands here.\n" * 800
XZ = lzma.compress(LONG.encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "there is no text in"),
        ("novel.pdf", b"%PDF", "there is no text in"),
        ("novel.txt", b"", "has 0 tokens for 'train' and one block takes 32: add more text"),
        ("novel.txt", b"Short.\n", "tokens for 'train' and one block takes 32: add more text"),
        ("novel.txt", LONG.encode()[:30_000], "has 0 tokens for 'test'"),
        ("novel.txt", b"Good.\nCaf\xe9s.\n", r"novel.txt is not UTF-8 (line 2: invalid"),
        ("novel.txt.xz", XZ[:-20], "novel.txt.xz cannot be unpacked after line"),
        ("novel.txt.xz", b"plain", "novel.txt.xz cannot be unpacked after line 0"),
        ("train.txt", b"Alone.\n", "valid.txt is not among them"),
    ],
)
def test_an_unusable_text_is_reported_in_one_line(tmp_path, capsys, name, content, message):
    folder = tmp_path / "texts"
    folder.mkdir()
    if name:
        (folder / name).write_bytes(content)
    runs = tmp_path / "runs"
    words = ["train", "bookwiki", "--preset", "cpu", "--data", str(folder), "--out", str(runs)]
    assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("cubegrad: error: ")
    assert message in last
    assert str(folder) in last
    assert not runs.exists()


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    write_texts(tmp_path, mine="Text.\n")
    texts = find(tmp_path, "novels")
    (tmp_path / "mine.txt").unlink()
    with pytest.raises(StudyError, match=r"mine\.txt cannot be read .*: fix it or remove it"):
        list(read(texts.files["train"]))
