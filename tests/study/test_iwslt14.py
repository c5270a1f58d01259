"""Batches by length, the losses, BLEU and the presets; whole runs on made-up sentences."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import killed_and_resumed
from pretend_cuda import pretend_cuda
from small_runs import CPU, needs_gpu, settings_of, setup_of
from small_translation import small_problem, write_parts
from torch import nn
from torch.nn.functional import cross_entropy

import cubegrad
from cubegrad.study import Setup, StudyError, methods, schedules
from cubegrad.study.data.subwords import END, PAD
from cubegrad.study.data.translation import Batch
from cubegrad.study.problems import iwslt14
from cubegrad.study.train import Place, run


@pytest.fixture
def data(tmp_path):
    write_parts(tmp_path / "small")
    return tmp_path


def test_a_run_goes_over_all_sentences_again_and_again(data):
    problem = small_problem()
    task = iwslt14.build(setup_of(problem, data))
    assert task.steps_per_epoch == 15
    updates = [batch for epoch in range(8) for batch in task.batches(epoch)]
    assert len(updates) == 8 * 15

    def rows(batches):
        return sorted(str(row) for batch in batches for row in batch.source.tolist())

    number = len({batch.source.data_ptr() for batch in updates})
    assert 15 < number < 60
    sentences = [batch.source.shape[0] for batch in updates[:number]]
    assert sum(sentences) == 400
    assert rows(updates[:number]) == rows(updates[number : 2 * number])
    assert [id(batch) for batch in updates[:number]] != [
        id(batch) for batch in updates[number : 2 * number]
    ]


def test_batches_are_a_function_of_seed_and_epoch(data):
    problem = small_problem()

    def sources(seed, epoch):
        task = iwslt14.build(setup_of(problem, data, seed))
        return [batch.source.tolist() for batch in task.batches(epoch)]

    torch.manual_seed(1)
    first = sources(0, 1)
    torch.manual_seed(2)
    assert sources(0, 1) == first
    assert sources(0, 2) != first
    assert sources(1, 1) != first


class Fixed(nn.Module):
    """Scores that do not depend on the source; keeps the target words it was given."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, _source, _lengths, given):
        self.given = given
        return self.scores[: given.shape[0], : given.shape[1]]


def test_losses_against_torch_and_by_hand():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 8, generator=generator)
    target = torch.tensor([[5, 6, END], [7, END, PAD]])
    batch = Batch(torch.zeros(2, 1), torch.ones(2), target)
    model = Fixed(scores)
    smoothed, nll = iwslt14.losses(model, batch)
    assert model.given.tolist() == [[END, 5, 6], [END, 7, END]]
    flat, wanted = scores.flatten(0, 1), target.flatten()
    torch.testing.assert_close(nll / 5, cross_entropy(flat, wanted, ignore_index=PAD))
    expected = cross_entropy(flat, wanted, ignore_index=PAD, label_smoothing=0.1)
    torch.testing.assert_close(smoothed / 5, expected)
    torch.testing.assert_close(iwslt14.mean_loss(model, batch), expected)
    judged = iwslt14.metrics(model, [batch, batch])
    assert judged["loss"] == pytest.approx(expected.item() / math.log(2))
    even = iwslt14.metrics(Fixed(torch.zeros(2, 3, 8)), [batch])
    assert even == pytest.approx({"loss": 3, "nll": 3, "perplexity": 8})  # 8 types are 3 bits
    hopeless = torch.zeros(2, 3, 8).index_fill_(2, torch.tensor([0]), 1e6)
    assert iwslt14.metrics(Fixed(hopeless), [batch])["perplexity"] == 2.0**100


def test_the_training_loss_is_in_bits_and_gradients_are_clipped(data):
    task = iwslt14.build(setup_of(small_problem(), data))
    task.model.eval()
    batch = next(iter(task.batches(0)))
    expected = task.loss(task.model, batch).item() / math.log(2)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3)
    assert task.step(optimizer, batch).item() == pytest.approx(expected)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.mul_(100)
    task.step(optimizer, batch)
    norm = torch.stack([p.grad.norm() for p in task.model.parameters()]).norm()
    assert norm.item() == pytest.approx(25, rel=1e-3)


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=needs_gpu)])
def test_a_graphed_step_is_a_plain_one(data, monkeypatch, device):
    """Two passes over all batches, in other orders: a graph of each, all with one gradient."""
    tasks = []
    for _ in range(2):
        torch.manual_seed(0)
        tasks.append(iwslt14.build(setup_of(small_problem(dropout=0.0), data, device=device)))
    plain, graphed = tasks
    optimizers = [cubegrad.MADGRAD(task.model.parameters(), lr=1e-2) for task in tasks]
    captures = pretend_cuda(monkeypatch, graphed.model) if device == CPU else []
    steps = [iwslt14.make_step(plain.model), iwslt14.make_step(graphed.model, graphed=True)]
    seen = set()
    for epoch in range(6):
        for pair in zip(plain.batches(epoch), graphed.batches(epoch), strict=True):
            seen.add(id(pair[0]))
            expected, found = (
                step(optimizer, batch).item()
                for step, optimizer, batch in zip(steps, optimizers, pair, strict=True)
            )
            assert found == pytest.approx(expected, rel=1e-6 if device == CPU else 1e-2)
    assert 2 * len(seen) < 6 * plain.steps_per_epoch
    if device == CPU:
        assert len(captures) == len(seen)


def test_graphs_are_captured_only_if_there_are_few_and_they_are_used_again():
    assert iwslt14.pays_off(218, 2500)  # preset gpu
    assert not iwslt14.pays_off(218, 800)
    assert not iwslt14.pays_off(30_000, 10**6)  # a text of millions of sentences


class Memorised(nn.Module):
    """Knows all translations; with `wrong`, the first of each batch is empty."""

    def __init__(self, bleu, text, wrong=False):
        super().__init__()
        words = [text.english.encode(text.subwords.cut([line])[0]) for line in bleu.references]
        self.rows = iter(words)
        self.wrong = wrong

    def translate(self, source, _lengths, end, _limit):
        rows = [next(self.rows) for _ in source]
        longest = max(map(len, rows))
        rows = torch.tensor([row + [end] * (longest - len(row)) for row in rows])
        if self.wrong:
            rows[0] = end
        return rows


def test_bleu(data, monkeypatch):
    problem = small_problem()
    text = iwslt14._text(setup_of(problem, data))
    english = (data / "small" / "test.en").read_text().splitlines()
    bleu = iwslt14.Bleu(text, text.parts["test"], 24, 64, CPU)
    assert len(bleu.batches) > 1
    assert sorted(bleu.references) == sorted(english[::2])  # 24 of 48
    assert bleu(Memorised(bleu, text)) == {"bleu": pytest.approx(100)}
    assert 50 < bleu(Memorised(bleu, text, wrong=True))["bleu"] < 100
    assert iwslt14.Bleu(text, text.parts["test"], 0, 64, CPU)(Memorised(bleu, text)) == {}

    def missing(module):
        raise StudyError(f"{module} is missing")

    monkeypatch.setattr(iwslt14, "optional", missing)
    assert bleu(Memorised(bleu, text)) == {}
    task = iwslt14.build(setup_of(problem, data))
    assert set(task.evaluate(task.model, "test")) == {"loss", "nll", "perplexity"}
    with pytest.raises(StudyError, match="tokenizers is missing"):
        problem.check_data(setup_of(problem, data))


def test_the_presets_are_the_papers_or_smaller():
    problem = iwslt14.problem()
    paper = problem.presets["paper"]
    table = methods.PAPER[problem.paper]
    assert table.length == f"{paper.epochs * paper.options['steps']:,} updates" == "60,000 updates"
    assert table.batch == f"{paper.batch} tokens" == "4096 tokens"
    assert (
        (table.schedule, table.seeds) == (paper.schedule, paper.seeds) == ("inverse-sqrt:4000", 10)
    )
    assert (paper.options["dropout"], iwslt14.SMOOTHING, paper.options["width"]) == (0.3, 0.1, 256)
    factor = schedules.parse(paper.schedule, paper.epochs, paper.options["steps"])
    steps = (0, 1999, 3999, 15999, 59999)
    expected = (1 / 4000, 0.5, 1.0, 0.5, 15**-0.5)
    assert [factor(step) for step in steps] == pytest.approx(expected)
    for method in paper.methods:
        lr, decay, _ = table.best[method]
        low, high = paper.lrs[method]
        assert low <= lr <= high
        assert decay in paper.decays
    for preset in problem.presets.values():
        warm_up = int(preset.schedule.partition(":")[2])
        assert warm_up <= preset.epochs * preset.options["steps"] / 5
        json.dumps(dict(preset.options))


def test_missing_data_is_reported_before_any_run(tmp_path):
    problem = iwslt14.problem()
    for preset in problem.presets.values():
        with pytest.raises(StudyError, match="no German-English sentences in"):
            problem.check_data(Setup(preset, 0, CPU, tmp_path))


@pytest.mark.training
def test_a_run_learns_and_repeats_itself(data):
    problem = small_problem(width=32, merges=200, steps=40, dropout=0.1)
    settings = settings_of(problem, epochs=8, lr=0.1, schedule="inverse-sqrt:40")
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    assert set(record.curve) == {"train_loss", "loss", "nll", "perplexity", "bleu"}
    assert record.curve["loss"][0] > 2.5
    assert record.curve["loss"][-1] < 1.5
    assert record.curve["bleu"][-1] > 50
    again = run(problem, replace(settings, epochs=1), Place(data))
    assert again.curve["loss"] == record.curve["loss"][:1]
    other = run(problem, replace(settings, epochs=1, seed=1), Place(data))
    assert other.curve != again.curve


def test_another_part_is_judged_when_choosing(data):
    task = iwslt14.build(setup_of(small_problem(), data, hold_out=True))
    task.model.eval()
    valid = task.evaluate(task.model, "valid")
    assert valid != task.evaluate(task.model, "test")
    assert valid == task.evaluate(task.model, "valid")


@pytest.mark.training
def test_a_killed_run_ends_with_the_same_numbers(data, tmp_path):
    problem = small_problem(steps=4)
    settings = settings_of(problem, schedule="inverse-sqrt:5")
    place = Place(data, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, tmp_path / "x.pt", after=2)
    assert resumed.curve == run(problem, settings, place).curve


@needs_gpu
def test_a_gpu_has_the_same_losses_within_its_precision(data):
    problem = small_problem(dropout=0.0)
    losses = {}
    for device in ("cpu", "cuda"):
        settings = settings_of(problem, device=device, epochs=2, schedule="inverse-sqrt:5")
        losses[device] = run(problem, settings, Place(data)).curve["loss"]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)


def test_the_documentation_names_the_presets():
    page = Path(__file__).parents[2] / "docs" / "problems" / "iwslt14.md"
    text = page.read_text().partition("## Presets")[2]
    for name, preset in iwslt14.problem().presets.items():
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        updates = preset.epochs * preset.options["steps"]
        for value in (f"{updates:,}", f"{preset.batch:,}", preset.schedule):
            assert value in row, (name, value)
