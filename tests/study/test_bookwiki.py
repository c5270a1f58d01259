"""Masked language modelling: what is masked, what an update is, and that a run learns."""

import itertools
import json
import lzma
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import killed_and_resumed
from pretend_cuda import pretend_cuda
from test_plain_text import lay
from test_tokens import text
from torch import nn

import cubegrad
from cubegrad.study import Setup, StudyError, methods, schedules
from cubegrad.study.data.masking import IGNORED, Blocks, Masked, masked
from cubegrad.study.data.plain_text import find
from cubegrad.study.data.tokens import END, MASK, PAD, SPECIAL, corpus
from cubegrad.study.problems import bookwiki
from cubegrad.study.records import Settings
from cubegrad.study.train import Place, run

pytest.importorskip("transformers")
CPU = torch.device("cpu")
TINY = {
    "vocabulary": 300,
    "length": 32,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "dropout": 0.1,
    "updates": 6,
    "at_once": 3,
    "test_blocks": 20,
}


@pytest.fixture
def small(tmp_path):
    """The problem on made-up novels, and where they lie."""
    bookwiki.parts.cache_clear()
    lay(tmp_path / "novels", all=text())
    problem = bookwiki.problem()
    gpu = problem.presets["gpu"]
    preset = replace(gpu, epochs=3, batch=8, options={**gpu.options, **TINY})
    yield replace(problem, presets={"cpu": preset}), tmp_path
    bookwiki.parts.cache_clear()


def task_of(small, seed=0, hold_out=False, **options):
    problem, data = small
    preset = problem.presets["cpu"]
    preset = replace(preset, options={**preset.options, **options})
    torch.manual_seed(seed)
    return bookwiki.build(Setup(preset, seed, CPU, data, hold_out))


def settings_of(problem, **other):
    preset = problem.presets["cpu"]
    lengths = {"epochs": preset.epochs, "batch": preset.batch, "schedule": "flat"}
    setting = {"method": "madgrad", "lr": 0.01, "decay": 0.0, "seed": 0}
    return Settings("bookwiki", "cpu", **{**lengths, **setting, **other})


def parameters(preset, vocabulary):
    with torch.device("meta"):
        model = bookwiki.network(dict(preset.options), vocabulary)
    return sum(param.numel() for param in model.parameters())


def test_the_papers_network_is_roberta_base():
    """By hand; transformers' own default of that size has as many. fairseq's lacks 768 of them."""
    paper = bookwiki.problem().presets["paper"]
    width, vocabulary = 768, 50_265
    embeddings = (vocabulary + 514 + 1) * width + 2 * width  # tokens, places, one type, norm
    attention = 4 * (width * width + width) + 2 * width
    feed_forward = 2 * 4 * width * width + 5 * width + 2 * width
    head = width * width + width + 2 * width + vocabulary
    count = embeddings + 12 * (attention + feed_forward) + head
    assert parameters(paper, vocabulary) == count == 124_697_433
    assert f"{count:,} parameters" in paper.size


def test_the_smaller_networks_have_the_sizes_they_say():
    problem = bookwiki.problem()
    for name in ("cpu", "gpu"):
        preset = problem.presets[name]
        assert f"{parameters(preset, preset.options['vocabulary']):,} parameters" in preset.size


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
    for preset in problem.presets.values():
        schedules.parse(preset.schedule, preset.epochs, preset.options["updates"])
        assert json.loads(json.dumps(dict(preset.options))) == preset.options
        assert set(preset.lrs) == set(preset.methods)


def test_batches_are_a_function_of_seed_and_update(small):
    def inputs(seed, epoch, **options):
        return [batch.inputs for batch in task_of(small, seed, **options).batches(epoch)]

    first = inputs(0, 1)
    assert len(first) == 6
    assert {batch.shape for batch in first} == {(8, 32)}
    assert all(torch.equal(a, b) for a, b in zip(first, inputs(0, 1), strict=True))
    assert not torch.equal(first[0], inputs(0, 2)[0])
    assert not torch.equal(first[0], inputs(1, 1)[0])
    # How updates are cut into epochs does not show.
    assert torch.equal(inputs(0, 3, updates=2)[1], first[1])


def test_the_same_block_is_masked_anew_each_turn(small):
    task = task_of(small)
    train = bookwiki.parts(small[1], "novels", 300, 32, False, CPU)[0]["train"]
    whole = {tuple(row) for row in train.rows(torch.arange(train.number), 32).tolist()}
    batch = next(iter(task.batches(0)))
    asked = batch.labels != IGNORED
    restored = batch.inputs.scatter(
        1, batch.places, torch.where(asked, batch.labels, batch.inputs.gather(1, batch.places))
    )
    assert {tuple(row) for row in restored.tolist()} <= whole
    again = masked(restored, 300, torch.Generator().manual_seed(9))
    assert not torch.equal(again.inputs, batch.inputs)


def test_a_part_is_held_out(small):
    _, data = small
    made = corpus(find(data, "novels"), 300, 32).parts
    sizes = {part: len(made[part].starts) - 1 for part in made}
    held = bookwiki.parts(data, "novels", 300, 32, True, CPU)[0]
    assert {part: blocks.number for part, blocks in held.items()} == sizes
    whole = bookwiki.parts(data, "novels", 300, 32, False, CPU)[0]
    assert whole["train"].number == sizes["train"] + sizes["valid"]
    task = task_of(small, hold_out=True)
    task.model.eval()
    assert task.evaluate(task.model, "valid") != task.evaluate(task.model, "test")


class Sure(nn.Module):
    """Scores every token alike, but for the one at each place's input, by a factor of 3."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.tensor(math.log(3.0)))

    def roberta(self, inputs, attention_mask):
        assert attention_mask.shape == (len(inputs), 1, 1, inputs.shape[1])
        assert torch.equal(attention_mask[:, 0, 0], inputs != PAD)
        hidden = nn.functional.one_hot(inputs, self.vocabulary).float() * self.weight
        return type("Output", (), {"last_hidden_state": hidden})

    def lm_head(self, hidden):
        return hidden


def by_hand():
    """Three questions in two blocks: one shown as it is, two masked."""
    inputs = torch.tensor([[0, 5, MASK, 2], [0, MASK, 2, PAD]])
    places = torch.tensor([[1, 2], [1, 3]])
    return Masked(inputs, places, torch.tensor([[5, 6], [7, IGNORED]]))


def test_the_loss_is_in_bits_by_hand():
    model = Sure(8)
    nats = math.log(10 / 3) + 2 * math.log(10)  # of 8 tokens one weighs 3, the others 1
    assert bookwiki.total_loss(model, by_hand()).item() == pytest.approx(nats)
    judged = bookwiki.metrics(model, by_hand())
    assert judged["loss"] == pytest.approx(nats / 3 / math.log(2))
    assert judged["perplexity"] == pytest.approx((1000 / 3) ** (1 / 3))


@pytest.mark.parametrize("clip", [1e9, 0.01])
def test_an_update_is_the_mean_over_its_questions_clipped(clip):
    """The gradient by hand: each question's share of the heavy token, less 1 where it is right."""
    model = Sure(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()
    loss = bookwiki.make_step(model, 1, clip)(optimizer, by_hand())
    gradient = ((0.3 - 1) + 0.3 + 0.3) / 3
    step = math.copysign(min(abs(gradient), clip), gradient)
    assert model.weight.item() == pytest.approx(before - step, rel=1e-4)
    assert loss.item() == pytest.approx((math.log(10 / 3) + 2 * math.log(10)) / 3 / math.log(2))
    assert not loss.requires_grad


def test_pieces_of_an_update_add_up(small):
    gradients = []
    for at_once in (8, 3):
        task = task_of(small, at_once=at_once, dropout=0.0)
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.0)
        task.step(optimizer, next(iter(task.batches(0))))
        gradients.append(torch.cat([param.grad.flatten() for param in task.model.parameters()]))
    assert gradients[0].norm().item() == pytest.approx(0.5, rel=1e-3)  # clipped
    assert torch.allclose(*gradients, atol=1e-6)


def test_a_graphed_update_is_a_plain_one(small, monkeypatch):
    """Three updates each way: a graph writes its gradients anew, and they are clipped in place."""
    losses, weights, captures = [], [], []
    for graphed in (False, True):
        task = task_of(small, dropout=0.0)
        if graphed:
            captures = pretend_cuda(monkeypatch, task.model)
        step = bookwiki.make_step(task.model, 8, 0.5, graphed)
        optimizer = cubegrad.MADGRAD(task.model.parameters(), lr=0.01)
        updates = itertools.islice(task.batches(0), 3)
        losses.append([step(optimizer, update).item() for update in updates])
        weights.append(torch.cat([param.detach().flatten() for param in task.model.parameters()]))
    assert len(captures) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert torch.allclose(*weights, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("at_once", [8, 3])
def test_a_run_on_a_gpu_learns(small, at_once):
    problem, data = small
    preset = problem.presets["cpu"]
    preset = replace(preset, options={**preset.options, "at_once": at_once, "updates": 40})
    problem = replace(problem, presets={"cpu": preset})
    settings = settings_of(problem, device="cuda", method="adam", lr=5e-3)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    assert record.curve["loss"][-1] < record.curve["loss"][0]


def test_no_part_of_an_update_waits_for_values_or_leaves_its_device():
    """Meta tensors have no values to wait for, and refuse to meet those of another device."""
    preset = bookwiki.problem().presets["gpu"]
    batch, length = preset.batch, preset.options["length"]
    with torch.device("meta"):
        ids, starts = torch.zeros(9000, dtype=torch.int16), torch.zeros(601, dtype=torch.long)
        rows = Blocks(ids, starts).rows(torch.zeros(batch, dtype=torch.long), length)
        model = bookwiki.network(dict(preset.options), 8192)
    update = masked(rows, 8192, None)  # there is no generator of such numbers
    assert update.places.shape == update.labels.shape == (batch, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = bookwiki.make_step(model, 100, 0.5)(optimizer, update)
    assert loss.is_meta
    assert all(param.grad.is_meta for param in model.parameters())


def test_scoring_chosen_places_is_the_librarys_own_loss(small):
    task = task_of(small)
    task.model.eval()
    update = next(iter(task.batches(0)))
    labels = torch.full_like(update.inputs, IGNORED)
    asked = update.labels != IGNORED
    rows = torch.arange(len(labels))[:, None].expand_as(update.places)
    labels[rows[asked], update.places[asked]] = update.labels[asked]
    with torch.no_grad():
        out = task.model(update.inputs, attention_mask=update.inputs != PAD, labels=labels)
        assert task.loss(task.model, update).item() == pytest.approx(out.loss.item(), rel=1e-5)


def test_evaluation_asks_the_same_in_every_run(small):
    one, other = task_of(small, seed=0), task_of(small, seed=5)
    other.model.load_state_dict(one.model.state_dict())
    for task in (one, other):
        task.model.eval()
    assert one.evaluate(one.model, "test") == other.evaluate(other.model, "test")


def test_a_run_learns_and_repeats_itself(small):
    problem, data = small
    settings = settings_of(problem, epochs=6)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    assert set(record.curve) == {"train_loss", "loss", "perplexity"}
    losses = record.curve["loss"]
    assert losses[0] < math.log2(300) + 0.5  # bits: a guess among all tokens has log2(300)
    assert losses[-1] < losses[0] - 0.5
    assert record.curve["perplexity"][-1] == pytest.approx(2 ** losses[-1])
    assert run(problem, settings, Place(data)).curve == record.curve
    assert run(problem, replace(settings, seed=1), Place(data)).curve != record.curve


@pytest.mark.parametrize("method", ["madgrad", "adam"])
def test_a_killed_run_ends_with_the_same_numbers(small, method):
    problem, data = small
    settings = settings_of(problem, method=method)
    place = Place(data, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, data / "x.pt", after=2)
    assert resumed.curve == run(problem, settings, place).curve


def test_missing_data_and_libraries_are_told_before_any_run(small, tmp_path, monkeypatch):
    problem, data = small
    setup = Setup(problem.presets["cpu"], 0, CPU, data)
    problem.check_data(setup)
    assert list((data / "novels").glob("*.npz"))
    with pytest.raises(StudyError, match="there is no text in"):
        problem.check_data(replace(setup, data=tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StudyError, match="transformers"):
        problem.check_data(setup)


REAL = Path(__file__).parents[3] / "shared" / "data" / "wikitext2_valid.txt.xz"


@pytest.mark.skipif(not REAL.exists(), reason="WikiText-2 is not beside the checkout")
def test_real_text_survives_the_round_trip(tmp_path):
    (tmp_path / "train.txt.xz").symlink_to(REAL)
    some = lzma.decompress(REAL.read_bytes()).splitlines(keepends=True)[:400]
    for part in ("valid", "test"):
        (tmp_path / f"{part}.txt").write_bytes(b"".join(some))
    texts = find(tmp_path, "wikitext-2")
    made = corpus(texts, 1024, 128)
    tokens = made.parts["test"]
    text = [sentence for part, _, sentence in texts.sentences() if part == "test"]
    library = pytest.importorskip("tokenizers").Tokenizer.from_str(made.tokenizer)
    ends = (tokens.ids == END).nonzero()[0]
    assert len(ends) == len(text) > 400
    for index in range(1, len(text), 7):
        ids = tokens.ids[ends[index - 1] + 1 : ends[index]]
        assert library.decode((ids - SPECIAL).tolist()) == text[index]
