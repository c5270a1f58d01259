"""Masked language modelling: the networks, the batches, the presets, and whole runs."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from killed import killed_and_resumed
from small_runs import CPU, needs_gpu, settings_of, setup_of
from small_text import small_problem, task_of

from cubegrad.study import StudyError, methods, schedules
from cubegrad.study.data.masking import IGNORED, masked
from cubegrad.study.data.plain_text import find
from cubegrad.study.data.tokens import corpus
from cubegrad.study.problem import PAPER_METHODS
from cubegrad.study.problems import bookwiki
from cubegrad.study.train import Place, run

pytest.importorskip("transformers")


def parameter_count(preset, vocabulary):
    with torch.device("meta"):
        model = bookwiki.network(dict(preset.options), vocabulary)
    return sum(param.numel() for param in model.parameters())


def test_the_papers_network_is_roberta_base():
    """Counted by hand; the same as in transformers, and 768 more than in fairseq."""
    paper = bookwiki.problem().presets["paper"]
    width, vocabulary = 768, 50_265
    embeddings = (vocabulary + 514 + 1) * width + 2 * width  # tokens, places, one type, norm
    attention = 4 * (width * width + width) + 2 * width
    feed_forward = 2 * 4 * width * width + 5 * width + 2 * width
    head = width * width + width + 2 * width + vocabulary
    count = embeddings + 12 * (attention + feed_forward) + head
    assert parameter_count(paper, vocabulary) == count == 124_697_433
    assert f"{count:,} parameters" in paper.size


def test_the_smaller_networks_have_the_documented_sizes():
    problem = bookwiki.problem()
    for name in ("cpu", "gpu"):
        preset = problem.presets[name]
        assert (
            f"{parameter_count(preset, preset.options['vocabulary']):,} parameters" in preset.size
        )


def test_the_presets_are_the_papers_or_its_fractions():
    problem = bookwiki.problem()
    table = methods.PAPER[problem.paper]
    paper = problem.presets["paper"]
    assert table.length == f"{paper.epochs * paper.options['updates']:,} updates"
    assert table.batch == "8 x 16 sentences x 16 updates"
    assert paper.batch == 8 * 16 * 16
    assert (table.schedule, table.seeds) == (paper.schedule, paper.seeds)
    assert (paper.options["length"], paper.options["dropout"], paper.options["clip"]) == (
        512,
        0.1,
        0.5,
    )
    assert paper.decays == (0.0,)
    for method, (lr, _, _) in table.best.items():
        low, high = paper.lrs[method]
        assert low <= lr <= high
    factor = schedules.parse(paper.schedule, paper.epochs, paper.options["updates"])
    for update, expected in ((0, 1e-4), (4999, 0.5), (9999, 1.0), (14_999, 0.5), (19_999, 1e-4)):
        assert factor(update) == pytest.approx(expected, rel=1e-3)
    for name, preset in problem.presets.items():
        schedules.parse(preset.schedule, preset.epochs, preset.options["updates"])
        assert json.loads(json.dumps(dict(preset.options))) == preset.options
        searched = set(preset.methods) - {"adamw"}  # which has Adam's
        assert set(preset.lrs) == searched | ({"mirror-madgrad"} if name == "gpu" else set())
    assert paper.methods == PAPER_METHODS


def test_batches_are_a_function_of_seed_and_update(small_bookwiki):
    def inputs(seed, epoch, **options):
        return [batch.inputs for batch in task_of(small_bookwiki, seed, **options).batches(epoch)]

    first = inputs(0, 1)
    assert len(first) == 6
    assert {batch.shape for batch in first} == {(8, 32)}
    assert all(torch.equal(a, b) for a, b in zip(first, inputs(0, 1), strict=True))
    assert not torch.equal(first[0], inputs(0, 2)[0])
    assert not torch.equal(first[0], inputs(1, 1)[0])
    # The length of an epoch makes no difference.
    assert torch.equal(inputs(0, 3, updates=2)[1], first[1])


def test_a_block_is_masked_differently_each_time(small_bookwiki):
    task = task_of(small_bookwiki)
    train = bookwiki.parts(small_bookwiki[1], "novels", 300, 32, False, CPU)[0]["train"]
    whole = {tuple(row) for row in train.rows(torch.arange(train.number), 32).tolist()}
    batch = next(iter(task.batches(0)))
    asked = batch.labels != IGNORED
    restored = batch.inputs.scatter(
        1, batch.places, torch.where(asked, batch.labels, batch.inputs.gather(1, batch.places))
    )
    assert {tuple(row) for row in restored.tolist()} <= whole
    again = masked(restored, 300, torch.Generator().manual_seed(9))
    assert not torch.equal(again.inputs, batch.inputs)


def test_a_part_is_held_out(small_bookwiki):
    _, data = small_bookwiki
    made = corpus(find(data, "novels"), 300, 32).parts
    sizes = {part: len(made[part].starts) - 1 for part in made}
    held = bookwiki.parts(data, "novels", 300, 32, True, CPU)[0]
    assert {part: blocks.number for part, blocks in held.items()} == sizes
    whole = bookwiki.parts(data, "novels", 300, 32, False, CPU)[0]
    assert whole["train"].number == sizes["train"] + sizes["valid"]
    task = task_of(small_bookwiki, hold_out=True)
    task.model.eval()
    assert task.evaluate(task.model, "valid") != task.evaluate(task.model, "test")


@needs_gpu
@pytest.mark.parametrize("at_once", [8, 3])
def test_a_run_on_a_gpu_learns(tmp_path, at_once):
    problem = small_problem(tmp_path, at_once=at_once, updates=40)
    settings = settings_of(problem, device="cuda", method="adam", lr=5e-3)
    record = run(problem, settings, Place(tmp_path))
    assert record.status == "finished"
    assert record.curve["loss"][-1] < record.curve["loss"][0]


def test_evaluation_uses_the_same_masks_in_every_run(small_bookwiki):
    one, other = task_of(small_bookwiki, seed=0), task_of(small_bookwiki, seed=5)
    other.model.load_state_dict(one.model.state_dict())
    for task in (one, other):
        task.model.eval()
    assert one.evaluate(one.model, "test") == other.evaluate(other.model, "test")


@pytest.mark.training
def test_a_run_learns_and_repeats_itself(small_bookwiki):
    problem, data = small_bookwiki
    settings = settings_of(problem, epochs=6)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    assert set(record.curve) == {"train_loss", "loss", "perplexity"}
    losses = record.curve["loss"]
    assert losses[0] < math.log2(300) + 0.5  # bits; guessing among 300 tokens has log2(300)
    assert losses[-1] < losses[0] - 0.5
    assert record.curve["perplexity"][-1] == pytest.approx(2 ** losses[-1])
    assert run(problem, settings, Place(data)).curve == record.curve
    assert run(problem, replace(settings, seed=1), Place(data)).curve != record.curve


@pytest.mark.training
def test_a_killed_run_ends_with_the_same_numbers(small_bookwiki):
    problem, data = small_bookwiki
    settings = settings_of(problem)
    place = Place(data, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, data / "x.pt", after=2)
    assert resumed.curve == run(problem, settings, place).curve


def test_missing_data_and_libraries_are_reported_before_any_run(
    small_bookwiki, tmp_path, monkeypatch
):
    problem, data = small_bookwiki
    setup = setup_of(problem, data)
    problem.check_data(setup)
    assert list((data / "novels").glob("*.npz"))
    with pytest.raises(StudyError, match="there is no text in"):
        problem.check_data(replace(setup, data=tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StudyError, match="transformers"):
        problem.check_data(setup)
