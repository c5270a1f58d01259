"""Blocks on a device, the order they are used in, and which of their tokens are masked."""

import math

import pytest
import torch
from small_runs import CPU

from cubegrad.study.data.masking import IGNORED, Blocks, block_indices, masked
from cubegrad.study.data.tokens import BEGIN, END, MASK, PAD, SPECIAL


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_rows_begin_with_a_mark_and_are_padded():
    ids = torch.tensor([5, 6, 2, 60_000, 2, 9, 9, 9, 2]).to(torch.int16)
    blocks = Blocks(ids, torch.tensor([0, 3, 5, 9]))
    assert blocks.number == 3
    assert blocks.rows(torch.tensor([2, 0, 1]), 5).tolist() == [
        [BEGIN, 9, 9, 9, END],
        [BEGIN, 5, 6, END, PAD],
        [BEGIN, 60_000, END, PAD, PAD],
    ]


def test_evenly_spaced_blocks_are_from_all_over_the_text():
    blocks = Blocks(torch.arange(5, 15).to(torch.int16), torch.arange(11))
    for most, expected in ((4, [5, 7, 10, 12]), (1, [5]), (10, range(5, 15)), (99, range(5, 15))):
        assert blocks.evenly_spaced(most, 2)[:, 1].tolist() == list(expected)


def made_up_rows(count, length=128, vocabulary=1000, seed=1):
    rows = torch.randint(SPECIAL, vocabulary, (count, length), generator=generator(seed))
    rows[:, 0] = BEGIN
    rows[:, 40] = END
    rows[1::2, 100] = END
    rows[1::2, 101:] = PAD  # 98 tokens that may be masked; the others have 126
    return rows


def test_masks_have_their_shares():
    rows = made_up_rows(4000)
    blocks = masked(rows, 1000, generator())
    asked = blocks.labels != IGNORED
    for kind, tokens in ((slice(0, None, 2), 126), (slice(1, None, 2), 98)):
        counts = asked[kind].sum(1)
        low = int(0.15 * tokens)
        assert set(counts.tolist()) == {low, low + 1}
        assert counts.double().mean().item() == pytest.approx(0.15 * tokens, abs=0.05)
    there = rows.gather(1, blocks.places)[asked]
    shown = blocks.inputs.gather(1, blocks.places)[asked]
    assert torch.equal(blocks.labels[asked], there)
    questions = len(there)
    as_mask = (shown == MASK).double().mean().item()
    kept = (shown == there).double().mean().item()
    spread = 5 * math.sqrt(0.16 / questions)
    assert as_mask == pytest.approx(0.8, abs=spread)
    assert kept == pytest.approx(0.1 + 0.1 / 995, abs=spread)
    others = shown[(shown != MASK) & (shown != there)]
    assert len(others) / questions == pytest.approx(0.1, abs=spread)
    assert others.min() == SPECIAL
    assert others.max() == 999
    assert others.double().mean().item() == pytest.approx(502, abs=10)


def test_special_tokens_are_never_masked_and_the_rest_stays():
    rows = made_up_rows(500)
    blocks = masked(rows, 1000, generator(4))
    asked = torch.zeros(rows.shape, dtype=torch.long)
    asked.scatter_add_(1, blocks.places, (blocks.labels != IGNORED).long())
    assert asked.max() == 1  # no place is masked twice
    assert not asked[rows < SPECIAL].any()
    changed = blocks.inputs != rows
    assert not changed[asked == 0].any()
    assert (blocks.inputs[rows == PAD] == PAD).all()
    # Every place of a block is as likely as any other.
    often = asked[::2].sum(0)[rows[0] >= SPECIAL].double()
    assert (often - 37.5).abs().max() < 5 * math.sqrt(37.5)


def test_a_block_with_few_tokens_has_few_masks():
    rows = torch.tensor([[BEGIN, 7, END, PAD, PAD, PAD, PAD, PAD], [BEGIN, END] + 6 * [PAD]])
    seen = [masked(rows, 10, generator(seed)).labels for seed in range(400)]
    questions = torch.stack([(labels != IGNORED).sum(1) for labels in seen])
    assert questions[:, 1].max() == 0
    assert questions[:, 0].max() == 1
    assert questions[:, 0].double().mean().item() == pytest.approx(0.15, abs=0.08)


def test_each_turn_through_the_text_has_each_block_once():
    updates = [block_indices(3, update, 8, 20, CPU) for update in range(10)]
    assert {len(numbers) for numbers in updates} == {8}
    turns = torch.cat(updates).view(4, 20)
    for turn in turns:
        assert sorted(turn.tolist()) == list(range(20))
    assert len({tuple(turn.tolist()) for turn in turns}) == 4
    assert block_indices(0, 1, 50, 20, CPU).shape == (50,)
