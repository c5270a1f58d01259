"""Tokens and blocks: round trips, whole sentences, and a cache that is remade when damaged."""

import itertools
import lzma
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_text import novels, write_texts

from cubegrad.study import StudyError
from cubegrad.study.data import tokens
from cubegrad.study.data.plain_text import find
from cubegrad.study.data.tokens import BEGIN, END, MASK, PAD, SPECIAL, UNKNOWN, packed

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def texts(tmp_path):
    write_texts(tmp_path / "novels", all=novels())
    return find(tmp_path, "novels")


def decoded(made, ids):
    return tokenizers.Tokenizer.from_str(made.tokenizer).decode([int(i) - SPECIAL for i in ids])


def test_the_special_tokens_have_robertas_numbers():
    assert (BEGIN, PAD, END, UNKNOWN) == (0, 1, 2, 3)
    assert SPECIAL == MASK + 1 == 5


def test_blocks_are_whole_sentences_that_can_be_read_again(texts):
    """Each block ends with a sentence, and the next sentence would not have fitted."""
    made = tokens.tokenized(texts, 320, 64)
    assert made.vocabulary == 320
    for part in ("train", "valid", "test"):
        wanted = [(doc, line) for which, doc, line in texts.sentences() if which == part]
        ids, starts = made.parts[part].ids, made.parts[part].starts
        assert ids.dtype == np.uint16
        assert starts[0] == 0
        assert starts[-1] == len(ids)
        seen, previous = [], None
        for start, end in itertools.pairwise(starts):
            assert 0 < end - start <= 63
            assert ids[end - 1] == END
            if previous is not None:  # no room for this block's first sentence
                first = start + list(ids[start:end]).index(END) + 1
                assert first - previous > 63
            previous = start
        run = []
        for one in ids:
            assert one == END or one >= SPECIAL
            if one == END:
                seen.append(decoded(made, run))
                run = []
            else:
                run.append(one)
        expected = []
        for index, (doc, line) in enumerate(wanted):
            expected += [""] if index and wanted[index - 1][0] != doc else []  # between documents
            expected.append(line)
        assert seen == expected


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ([3, 3, 4, 10, 1], [0, 10, 20, 21]),
        ([6, 5, 5, 6], [0, 6, 16, 22]),
        ([10], [0, 10]),
        ([1] * 25, [0, 10, 20, 25]),
    ],
)
def test_packing_by_hand(sizes, starts):
    assert packed(sizes, 10).tolist() == starts


def test_a_sentence_longer_than_a_block_is_cut(tmp_path):
    """Into blocks of 15 tokens; the last one has room for the next sentence."""
    long = "".join(chr(ord("A") + (7 * i * i + i // 26) % 26) for i in range(40))
    write_texts(
        tmp_path, train=f"{long}\nB\n", valid="C c c c c c c c c c\n", test="D d d d d d d d d d\n"
    )
    made = tokens.tokenized(find(tmp_path, "x"), 261, 16)
    train = made.parts["train"]
    assert train.starts.tolist() == [0, 15, 30, 43]
    assert decoded(made, train.ids[:40]) == long
    assert [int(train.ids[40]), int(train.ids[42])] == [END, END]
    assert decoded(made, train.ids[41:42]) == "B"


def test_training_the_vocabulary_repeats_itself_and_sees_no_test_text(texts, tmp_path):
    first = tokens.tokenized(texts, 400, 32)
    assert tokens.tokenized(texts, 400, 32).tokenizer == first.tokenizer
    before, mark, rest = novels().partition("<|n19|>")  # a document of the test set
    changed, mark_after, after = rest.partition("<|n20|>")
    changed = changed.replace("sees", "zqxzqx")
    write_texts(tmp_path / "other", all="".join([before, mark, changed, mark_after, after]))
    made = tokens.tokenized(find(tmp_path / "other", "novels"), 400, 32)
    assert made.tokenizer == first.tokenizer
    assert not np.array_equal(made.parts["test"].ids, first.parts["test"].ids)


def test_joined_parts_keep_their_blocks(texts):
    made = tokens.tokenized(texts, 320, 32).parts
    both = tokens.joined(made["train"], made["valid"])
    blocks = [
        part.ids[start:end].tolist()
        for part in (made["train"], made["valid"])
        for start, end in itertools.pairwise(part.starts)
    ]
    assert [both.ids[s:e].tolist() for s, e in itertools.pairwise(both.starts)] == blocks


def equal(one, other):
    return one.tokenizer == other.tokenizer and all(
        np.array_equal(one.parts[part].ids, other.parts[part].ids)
        and np.array_equal(one.parts[part].starts, other.parts[part].starts)
        for part in one.parts
    )


def test_tokens_are_cached(texts, monkeypatch):
    made = tokens.corpus(texts, 320, 32)
    (kept,) = texts.place.glob("*.npz")
    monkeypatch.setattr(tokens, "tokenized", None)
    assert equal(tokens.corpus(texts, 320, 32), made)
    assert sorted(path.name for path in texts.place.iterdir()) == ["all.txt", kept.name]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_cache_is_remade(texts, damage):
    made = tokens.corpus(texts, 320, 32)
    (kept,) = texts.place.glob("*.npz")
    whole = kept.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    damaged = {"cut": whole[:-100], "flipped": flipped, "empty": b"", "other": b"x" * 999}
    kept.write_bytes(damaged[damage])
    assert equal(tokens.corpus(texts, 320, 32), made)
    assert len(kept.read_bytes()) == len(whole)


def test_other_text_and_other_sizes_have_other_files(texts):
    sums = {tokens.checksum(texts, 320, 32), tokens.checksum(texts, 321, 32)}
    sums.add(tokens.checksum(texts, 320, 64))
    (texts.place / "all.txt").write_text(novels() + "More.\n")
    sums.add(tokens.checksum(texts, 320, 32))
    assert len(sums) == 4


def test_the_users_cache_is_used_where_the_text_is_read_only(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save = tokens._save

    def refusing(path, made):
        if path.parent == texts.place:
            raise PermissionError(13, "Permission denied")
        save(path, made)

    monkeypatch.setattr(tokens, "_save", refusing)
    made = tokens.corpus(texts, 320, 32)
    assert len(list((tmp_path / "cache" / "cubegrad").glob("*.npz"))) == 1
    assert [path.name for path in texts.place.iterdir()] == ["all.txt"]
    assert equal(tokens.corpus(texts, 320, 32), made)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_bytes(b"in the way")
    with pytest.raises(StudyError, match=r"can be kept neither in .* nor in .*XDG_CACHE_HOME"):
        tokens.corpus(texts, 320, 32)


def test_a_write_that_fails_leaves_nothing(texts, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(texts.place / "cache"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StudyError, match="No space left on device"):
        tokens.corpus(texts, 320, 32)
    assert not [path for path in texts.place.rglob("*") if "tokens" in path.name]


@pytest.mark.parametrize("vocabulary", [260, 65_537])
def test_a_vocabulary_has_limits(texts, vocabulary):
    with pytest.raises(StudyError, match=f"a vocabulary of {vocabulary} must be 261"):
        tokens.tokenized(texts, vocabulary, 32)


REAL = Path(__file__).parents[3] / "shared" / "data" / "wikitext2_valid.txt.xz"


@pytest.mark.skipif(not REAL.exists(), reason="WikiText-2 is not beside the checkout")
def test_real_text_survives_the_round_trip(tmp_path):
    (tmp_path / "train.txt.xz").symlink_to(REAL)
    some = lzma.decompress(REAL.read_bytes()).splitlines(keepends=True)[:400]
    for part in ("valid", "test"):
        (tmp_path / f"{part}.txt").write_bytes(b"".join(some))
    texts = find(tmp_path, "wikitext-2")
    made = tokens.corpus(texts, 1024, 128)
    part = made.parts["test"]
    text = [sentence for name, _, sentence in texts.sentences() if name == "test"]
    ends = (part.ids == END).nonzero()[0]
    assert len(ends) == len(text) > 400
    for index in range(1, len(text), 7):
        ids = part.ids[ends[index - 1] + 1 : ends[index]]
        assert decoded(made, ids) == text[index]
