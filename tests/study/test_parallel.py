"""Parallel text is read in every published format; a malformed file is reported in one line."""

import random

import pytest
from command_line import refused

from cubegrad.study import StudyError
from cubegrad.study.data import parallel
from cubegrad.study.data.parallel import Pair, corpus
from cubegrad.study.data.subwords import (
    END,
    PAD,
    UNKNOWN,
    BytePairs,
    Marked,
    Sentences,
    Vocabulary,
)

TWO = {"de": "Guten Tag .\nHallo !\n", "en": "good day .\nhello !\n"}


def write_files(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name.replace("__", "-").replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def write_split(folder, valid="valid", **changed):
    files = {f"{part}_{side}": TWO[side] for part in ("train", valid, "test") for side in TWO}
    return write_files(folder, **{**files, **changed})


def test_prepared_iwslt14(tmp_path):
    write_split(tmp_path / "iwslt14.tokenized.de-en")
    found = corpus(tmp_path, ("iwslt14.tokenized.de-en", "iwslt14"))
    pairs = [Pair("Guten Tag .", "good day ."), Pair("Hallo !", "hello !")]
    assert found.parts == {"train": pairs, "valid": pairs, "test": pairs}
    assert not found.marked
    assert corpus(tmp_path / "iwslt14.tokenized.de-en", ("other",)) == found
    cut = {"train_de": "Gu@@ ten Tag .\nHallo !\n"}
    assert corpus(write_split(tmp_path / "cut", valid="val", **cut), ()).marked


def test_columns_follow_the_files_name(tmp_path):
    german_first = "Hallo!\tHello!\n@@\tA line.\n"
    english_first = "Hello!\tHallo!\nA line.\t@@\n"
    pairs = [Pair("Hallo!", "Hello!"), Pair("@@", "A line.")]
    for suffix, text in ((".de-en.tsv", german_first), (".en-de.tsv", english_first)):
        folder = tmp_path / suffix[1:]
        folder.mkdir()
        for name in ("train", "val", "test_2016_flickr", "test_2017_mscoco"):
            other = text if name != "test_2017_mscoco" else "Nein\tNo\n"
            (folder / f"{name}{suffix}").write_text(other, newline="\r\n")
        found = corpus(folder, ())
        assert found.parts == {"train": pairs, "valid": pairs, "test": pairs}
        assert not found.marked  # "@@" alone marks a missing sentence


def tatoeba(count=3000):
    """Pairs with many repeated sentences, as in Tatoeba."""
    source = random.Random(0)
    return [Pair(f"Satz {source.randrange(4000)}.", f"Line {n * 4 // 5}.") for n in range(count)]


def test_tatoeba_and_two_whole_files_are_split_alike(tmp_path):
    pairs = tatoeba()
    text = "".join(f"{english}\t{german}\tCC-BY 2.0\n" for german, english in pairs)
    tabbed = corpus(write_files(tmp_path, deu_txt=text), ("tatoeba",))
    files = {"x_de": "\n".join(p.german for p in pairs), "x_en": "\n".join(p[1] for p in pairs)}
    assert corpus(write_files(tmp_path / "two", **files), ()) == tabbed
    assert {part: bool(some) for part, some in tabbed.parts.items()} == dict.fromkeys(
        ("train", "valid", "test"), True
    )


def test_no_sentence_lies_in_two_parts():
    pairs = tatoeba()
    split = parallel.split(pairs)
    assert sorted(pair for some in split.values() for pair in some) == sorted(pairs)
    for side in (0, 1):
        sets = [{pair[side] for pair in some} for some in split.values()]
        assert sum(map(len, sets)) == len(set.union(*sets))
    assert 0.9 < len(split["train"]) / len(pairs) < 0.99
    shuffled = random.Random(1).sample(pairs, len(pairs))
    again = parallel.split(shuffled)
    assert {part: sorted(some) for part, some in again.items()} == {
        part: sorted(some) for part, some in split.items()
    }


def test_a_chain_of_translations_is_one_group():
    chain = [Pair("a", "x"), Pair("b", "y"), Pair("b", "x"), Pair("c", "c"), Pair("y", "a")]
    groups = parallel._groups(chain)
    assert groups[0] == groups[1] == groups[2]
    assert len(set(groups)) == 3  # the same text in the other language is another sentence


MALFORMED = {
    "nothing": (lambda folder: folder, "no German-English sentences in"),
    "one side": (lambda folder: (folder / "train.en").unlink(), r"train\.en is missing"),
    "no test": (lambda folder: (folder / "test.de").unlink(), r"test\.de is missing"),
    "line counts": (
        lambda folder: (folder / "valid.en").write_text("hello\n"),
        r"valid\.de has 2 lines and valid\.en 1: line i",
    ),
    "empty": (lambda folder: (folder / "train.de").write_text("\n"), r"train\.de is empty"),
    "bytes": (
        lambda folder: (folder / "train.de").write_bytes("Grüße\nJa\n".encode("latin-1")),
        r"train\.de is not UTF-8 at byte 2",
    ),
    "a folder": (
        lambda folder: ((folder / "train.de").unlink(), (folder / "train.de").mkdir()),
        "cannot be read",
    ),
    "several": (
        lambda folder: [(folder / f"train.{side}").rename(folder / f"x.{side}") for side in TWO],
        r"several texts \(test, valid, x\)",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_reported_in_one_line(case, tmp_path, capsys):
    change, message = MALFORMED[case]
    folder = tmp_path / "iwslt14"
    change(write_split(folder) if case != "nothing" else tmp_path)
    with pytest.raises(StudyError, match=message) as raised:
        corpus(tmp_path, ("iwslt14",))
    words = "train iwslt14 --preset paper --device cpu"
    line = refused(f"{words} --data {tmp_path} --out {tmp_path / 'runs'}", capsys)
    assert str(raised.value) in line


@pytest.mark.parametrize("line", ["No tab here.", "Half a pair.\t", "\tHalbes Paar.", ""])
def test_a_line_that_is_no_pair(line, tmp_path):
    folder = write_files(tmp_path, deu_txt=f"Hi.\tHallo!\n{line}\nGo.\tGeh.\n")
    with pytest.raises(StudyError, match=r"deu\.txt, line 2: .* is not two sentences with a tab"):
        corpus(folder, ())


def test_too_few_pairs_to_split(tmp_path):
    with pytest.raises(StudyError, match="2 pairs are too few to split"):
        corpus(write_files(tmp_path, deu_txt="Hi.\tHallo!\nGo.\tGeh.\n"), ())


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(StudyError, match="no German-English sentences in"):
        corpus(tmp_path / "nowhere", ("tatoeba",))


TEXTS = ["Grüß Gott, wie geht's?", "Das ist  ein Haus – 3,5 % größer!", "日本 🙂", "x", "Das Haus"]


def test_byte_pairs_come_back_and_repeat():
    learnt = BytePairs(TEXTS * 3, 30)
    for text in [*TEXTS, "Ganz neu: ¿qué? §12", ""]:
        (pieces,) = learnt.cut([text])
        assert learnt.join(pieces) == text
    assert learnt.bpe.get_vocab_size() == 256 + 30  # each merge adds one
    assert BytePairs(TEXTS * 3, 30).cut(TEXTS) == learnt.cut(TEXTS)
    first, later = learnt.cut(["Haus", "ein Haus"])
    assert later[-len(first) :] == first  # a word is encoded the same way anywhere


def test_marked_subwords_come_back():
    (pieces,) = Marked().cut(["ein Wolken@@ kratz@@ er ."])
    assert pieces == ["ein", "Wolken@@", "kratz@@", "er", "."]
    assert Marked().join(pieces) == "ein Wolkenkratzer ."
    assert Marked().join(["Wolken@@"]) == "Wolken"  # a translation may be cut off


def test_a_vocabulary_by_hand():
    words = Vocabulary([["b", "a", "b"], ["c", "a", "b", "</s>"]])
    assert words.types == ["<s>", "<pad>", "</s>", "<unk>", "b", "a", "c"]
    assert len(words) == 8
    assert words.encode(["a", "b", "z"]) == [5, 4, UNKNOWN, END]
    assert words.decode([5, 4, 7, END, 6, 6]) == ["a", "b", "<unk>"]
    assert words.decode([6]) == ["c"]
    assert len(Vocabulary([[str(n) for n in range(5)]])) == 16


def test_sentences_are_filled_up_on_the_right():
    some = Sentences([[4, 5, END], [END], [6, END]])
    assert some.lengths.tolist() == [3, 1, 2]
    assert some.padded(some.lengths.new_tensor([2, 0])).tolist() == [[6, END, PAD], [4, 5, END]]
    assert some.padded(some.lengths.new_tensor([1])).tolist() == [[END]]
