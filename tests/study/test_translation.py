"""Parallel text as tokens: how much is used, how it is encoded, and its batches."""

from itertools import chain

import pytest
import torch
from small_runs import CPU
from small_translation import write_parts

from cubegrad.study import StudyError
from cubegrad.study.data import translation
from cubegrad.study.data.parallel import Pair
from cubegrad.study.data.subwords import END, PAD, Sentences
from cubegrad.study.data.translation import Limits, Part


def part_of(lengths):
    """Sentences of these lengths, (source, target)."""
    sides = ([[4] * (length - 1) + [END] for length in side] for side in zip(*lengths, strict=True))
    return Part(*map(Sentences, sides), [])


def test_batches_by_hand():
    lengths = [(4, 4)] * 20
    cut = translation.by_length(part_of(lengths), 40, torch.arange(20))
    assert [len(group) for group in cut] == [8, 8, 4]  # ten would fit, eight is a multiple of 8
    assert list(chain(*cut)) == list(range(20))
    few = translation.by_length(part_of(lengths), 20, torch.arange(20))
    assert [len(group) for group in few] == [5, 5, 5, 5]  # fewer than 8 are not rounded
    # The longer side counts: with a target of 9, two sentences fit into 20 tokens.
    mixed = [(2, 2), (3, 9), (3, 3), (2, 3), (5, 1)]
    cut = translation.by_length(part_of(mixed), 20, torch.tensor([4, 3, 2, 1, 0]))
    assert cut == [[0, 3, 2], [1, 4]]


def test_alike_sentences_stay_in_the_given_order():
    lengths = [(3, 3), (2, 2), (3, 2), (3, 3), (2, 2)]
    assert translation.by_length(part_of(lengths), 100, torch.arange(5)) == [[1, 4, 2, 0, 3]]
    assert translation.by_length(part_of(lengths), 100, torch.arange(5).flip(0)) == [
        [4, 1, 2, 3, 0]
    ]


def test_no_batch_is_larger_than_asked_for_and_none_is_left_out():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (500, 2), generator=generator).tolist()
    part = part_of(lengths)
    cut = translation.by_length(part, 160, torch.randperm(500, generator=generator))
    assert sorted(chain(*cut)) == list(range(500))
    for group in cut:
        batch = translation.batch_of(part, group, CPU)
        assert max(batch.source.numel(), batch.target.numel()) <= 160
        assert batch.lengths.tolist() == sorted((lengths[i][0] for i in group), reverse=True)
        assert (batch.source != PAD).sum(1).tolist() == batch.lengths.tolist()
    with pytest.raises(StudyError, match="has 39 tokens and a batch 20; use --batch 39"):
        translation.by_length(part, 20, torch.arange(500))


def test_few_are_evenly_spaced_and_short():
    pairs = [Pair("a " * n, "b") for n in range(1, 11)]
    assert Limits().select(pairs, 0) == pairs
    assert Limits().select(pairs, 5) == pairs[::2]
    assert Limits(words=3).select(pairs, 99) == pairs[:3]
    with pytest.raises(StudyError, match="0 of 10 pairs have at most 3 words, and this preset"):
        Limits(words=3).select([Pair("a", "b " * 4)] * 10, 5)
    with pytest.raises(StudyError, match="2 of 99 pairs have at most 3 words, and this preset"):
        Limits(words=3).select([Pair("a", "b")] * 2 + [Pair("a", "b " * 4)] * 97, 50)


def test_prepared_subwords_are_taken_as_they_are(tmp_path, monkeypatch):
    write_parts(tmp_path / "small", (60, 10, 10))
    for path in (tmp_path / "small").iterdir():
        path.write_text(path.read_text().replace("ieben", "ie@@ ben").replace("even", "ev@@ en"))
    monkeypatch.setattr(translation, "BytePairs", None)
    text = translation.prepared(tmp_path, ("small",), 40, Limits())
    assert {"sie@@", "ben", "acht"} < set(text.german.types)
    assert (len(text.german), len(text.english)) == (16, 16)  # 4 special, 11 types
    assert text.tokenised
    assert any("seven" in line for line in text.parts["test"].references)
    assert not any("@@" in line for line in text.parts["test"].references)
