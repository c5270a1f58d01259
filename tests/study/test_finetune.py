"""Fine-tuning: presets, pretraining and its cache, LoRA, a user's own text and model."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import KilledError, killed_and_resumed
from small_finetune import small_problem, write_model
from small_runs import settings_of
from small_text import novels, write_texts

from cubegrad.study import Setup, StudyError, catalogue, methods, schedules, train
from cubegrad.study.data.tokens import SPECIAL
from cubegrad.study.models import own_masked
from cubegrad.study.models.lora import LowRank
from cubegrad.study.problems import bookwiki, finetune
from cubegrad.study.records import Runs
from cubegrad.study.sweep import Plan
from cubegrad.study.train import Place, run

pytest.importorskip("transformers")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
CPU = torch.device("cpu")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The problem on made-up texts, and their folder."""
    return small_problem(tmp_path, monkeypatch), tmp_path


def setup_of(small, preset="cpu", seed=0, **changes):
    problem, data = small
    return replace(Setup(problem.presets[preset], seed, CPU, data), **changes)


def trained(model):
    return {name for name, param in model.named_parameters() if param.requires_grad}


# Presets and records.


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_sizes_are_counted(name):
    problem = finetune.problem()
    preset = problem.presets[f"{name}-lora"]
    model = bookwiki.network(dict(preset.options), preset.options["vocabulary"])
    count = sum(param.numel() for param in model.parameters())
    finetune.add_low_rank(model, preset.options["lora_rank"], torch.Generator())
    factors = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert f"{count:,} parameters, and {factors:,} in LoRA factors" in preset.size
    assert f"{count:,} parameters" in problem.presets[name].size


def test_every_preset_can_be_recorded_and_has_ranges():
    for preset in finetune.problem().presets.values():
        schedules.parse(preset.schedule, preset.epochs, preset.options["updates"])
        assert json.loads(json.dumps(dict(preset.options))) == preset.options
        fixed = {name for name in preset.methods if not methods.estimates(name)}
        assert set(preset.lrs) >= fixed
        assert preset.decays == (0.0, 1e-5)


def test_the_records_that_there_are_still_have_the_keys_of_the_presets():
    problem = catalogue.find("finetune")
    found = [
        record.settings
        for folder in (RESULTS / "compact", RESULTS / "compact" / "before")
        for record in Runs(folder).load()[0].values()
        if record.settings.problem == "finetune"
    ]
    assert {one.preset for one in found} == {"cpu", "gpu"}
    for one in found:
        preset = problem.presets[one.preset]
        plan = Plan(problem, one.preset, preset, (), one.device)
        entry = methods.entry(one.method, preset)
        assert plan.settings(entry, (one.lr, one.decay), one.seed, False).key == one.key


# Pretraining.


def test_the_model_is_pretrained_once(small, monkeypatch):
    problem, data = small
    problem.check_data(setup_of(small))
    (file,) = data.glob("cubegrad-pretrained-*.pt")
    weights = finetune.pretrained(setup_of(small))
    monkeypatch.setattr(train, "run", None)
    for preset, seed in (("cpu", 0), ("gpu", 1), ("cpu-lora", 2)):  # all tiny here
        again = finetune.pretrained(setup_of(small, preset, seed))
        assert all(torch.equal(again[name], value) for name, value in weights.items())
    monkeypatch.undo()
    assert list(data.glob("cubegrad-pretrained-*.pt")) == [file]


def test_the_weights_are_those_of_a_run_on_the_novels(small):
    """Better than chance on the novels, and the same in every run of the fine-tuning."""
    setup = setup_of(small, seed=5)
    task = finetune.build(setup)
    other = finetune.build(replace(setup, seed=6))
    assert all(map(torch.equal, task.model.parameters(), other.model.parameters()))
    assert len(task.start) == 16
    assert task.start == other.start
    changed = {name: weights.clone() for name, weights in task.model.state_dict().items()}
    changed["roberta.embeddings.word_embeddings.weight"] *= 1 + 1e-6
    assert finetune.checksum(task.model.state_dict()) == task.start != finetune.checksum(changed)
    fresh = bookwiki.network(dict(setup.preset.options), 300)
    sets, vocabulary = bookwiki.parts(setup.data, "novels", 300, 32, False, CPU)
    losses = []
    for model in (task.model, fresh):
        model.eval()
        on_novels = bookwiki.task(setup, sets, vocabulary, model)
        losses.append(on_novels.evaluate(model, "test")["loss"])
    assert losses[0] < losses[1] - 0.2  # measured: 7.63, and 8.21 to 8.24 without


def test_other_novels_or_a_damaged_file_are_pretrained_again(small):
    problem, data = small
    first = finetune.pretrained(setup_of(small))
    (file,) = data.glob("cubegrad-pretrained-*.pt")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    again = finetune.pretrained(setup_of(small))
    assert all(torch.equal(again[name], value) for name, value in first.items())
    write_texts(data / "novels", all=novels(41))
    problem.check_data(setup_of(small))
    assert len(list(data.glob("cubegrad-pretrained-*.pt"))) == 2


def test_a_killed_pretraining_is_resumed(small, monkeypatch):
    whole = finetune.pretrained(setup_of(small))
    (file,) = small[1].glob("cubegrad-pretrained-*.pt")
    file.unlink()
    epochs = train._epoch

    def killed(problem, settings, state, schedule):
        if state.epoch == 1:
            raise KilledError
        epochs(problem, settings, state, schedule)

    monkeypatch.setattr(train, "_epoch", killed)
    with pytest.raises(KilledError):
        finetune.pretrained(setup_of(small))
    assert file.exists()
    monkeypatch.setattr(train, "_epoch", epochs)
    resumed = finetune.pretrained(setup_of(small))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_without_a_writable_folder_the_users_cache_is_used(small, monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(finetune.os, "access", lambda *_: False)
    finetune.pretrained(setup_of(small))
    assert list((cache / "cubegrad").glob("cubegrad-pretrained-*.pt"))
    assert not list(small[1].glob("*.pt"))


# Runs.


@pytest.mark.training
# Bits; measured with four seeds: 2.2 to 2.5, and 0.009 to 0.021.
@pytest.mark.parametrize(("preset", "gain"), [("cpu", 1.0), ("cpu-lora", 0.003)])
def test_a_run_learns_and_repeats_itself_when_killed(small, preset, gain, tmp_path):
    problem, data = small
    settings = replace(settings_of(problem, epochs=4, lr=0.02), preset=preset)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    losses = record.curve["loss"]
    assert losses[-1] + gain < losses[0] < math.log2(300) + 0.5
    place = Place(data, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, tmp_path / "x.pt", after=2)
    assert resumed.curve == record.curve


def test_lora_trains_its_factors_alone_and_starts_as_the_model(small):
    whole = finetune.build(setup_of(small))
    low = finetune.build(setup_of(small, "cpu-lora"))
    other = finetune.build(setup_of(small, "cpu-lora", seed=1))
    for task in (whole, low):
        task.model.eval()
    assert low.evaluate(low.model, "test") == whole.evaluate(whole.model, "test")
    names = trained(low.model)
    assert {name.rpartition(".")[2] for name in names} == {"down", "up"}
    assert "lm_head.dense.up" in names
    assert "lm_head.decoder.up" not in names  # tied to the embeddings
    factors = [module for module in low.model.modules() if isinstance(module, LowRank)]
    assert len(factors) == 7  # six of the layer, one of the head
    assert {module.up.shape[1] for module in factors} == {8}
    assert all((module.up == 0).all() for module in factors)
    state, others = low.model.state_dict(), other.model.state_dict()
    assert not torch.equal(state["lm_head.dense.down"], others["lm_head.dense.down"])
    frozen = {name: value.clone() for name, value in state.items() if name not in names}
    optimizer = methods.make(
        "madgrad", [p for p in low.model.parameters() if p.requires_grad], 0.1, 0
    )
    low.model.train()
    for batch in low.batches(0):
        low.step(optimizer, batch)
    assert all(torch.equal(low.model.state_dict()[name], value) for name, value in frozen.items())
    assert all((module.up != 0).any() for module in factors)


# A user's own text and model.


def test_a_text_of_ones_own_beside_the_novels(small):
    _, data = small
    shutil.rmtree(data / "wikitext-2")
    write_texts(data, mine=novels(40, 10).replace("cat", "horse"))
    whole = finetune.build(setup_of(small)).batches(0)
    assert {batch.inputs.shape for batch in whole} == {(8, 32)}
    sizes = {}
    for hold_out in (False, True):
        sets, vocabulary = finetune.parts(data, (300, 32), 32, hold_out, CPU)
        assert vocabulary == 300
        sizes[hold_out] = sets["train"].number
    assert sizes[False] > sizes[True]


@pytest.mark.parametrize("preset", ["own", "own-lora"])
def test_a_model_of_ones_own(small, preset):
    problem, data = small
    write_model(data / "model")
    write_texts(data / "text", mine=novels())
    problem.check_data(setup_of(small, preset))
    task = finetune.build(setup_of(small, preset))
    assert isinstance(task.model, own_masked.OwnMasked)
    factors = {name.rpartition(".")[2] for name in trained(task.model)} == {"down", "up"}
    assert factors == (preset == "own-lora")
    settings = replace(settings_of(problem, method="adamw", lr=0.02), preset=preset)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    if preset == "own":  # measured: 0.29 to 0.35 bits; LoRA has random weights to start from here
        assert record.curve["loss"][-1] < record.curve["loss"][0] - 0.1
    assert not list(data.glob("*.pt"))  # nothing to pretrain


def test_the_tokens_are_those_of_the_users_tokenizer(small):
    from transformers import AutoTokenizer

    _, data = small
    folder = write_model(data / "model")
    write_texts(data / "text", mine=novels())
    sets, vocabulary = finetune.parts(data, None, 32, False, CPU)
    tokenizer, special, count = own_masked.tokenizer(folder)
    assert vocabulary == SPECIAL + count
    model = own_masked.model(folder, special, count, 32)
    (row,) = sets["train"].rows(torch.tensor([0]), 32)
    own = AutoTokenizer.from_pretrained(folder)
    text = own.decode(model.own_ids[row]).replace(" .", ".")
    assert text.startswith("[CLS] Then the cat sees the cat 0. [SEP] Then a dog hears the cat 1.")
    assert len(tokenizer.encode("Then the cat sees the cat.").ids) > 4  # not cut


@pytest.mark.parametrize(
    ("preset", "missing", "message"),
    [
        ("cpu", "novels", "there is no folder .*novels, and the model is pretrained on it"),
        ("cpu", "wikitext-2", "there is no text in .*wikitext-2"),
        ("own", "model", "has no model that transformers' AutoConfig can read"),
        ("own", "text", "there is no text in .*text"),
    ],
)
def test_what_is_missing_is_said_before_any_run(small, preset, missing, message):
    problem, data = small
    write_model(data / "model")
    write_texts(data / "text", mine=novels())
    shutil.rmtree(data / missing)
    with pytest.raises(StudyError, match=message):
        problem.check_data(setup_of(small, preset))


def test_a_model_that_reads_too_little_is_refused(small):
    folder = write_model(small[1] / "model", places=16)
    _, special, count = own_masked.tokenizer(folder)
    with pytest.raises(StudyError, match="reads 16 tokens and blocks have 32"):
        own_masked.model(folder, special, count, 32)


def test_a_vocabulary_that_does_not_fit_is_refused(small, monkeypatch):
    folder = write_model(small[1] / "model")
    monkeypatch.setattr(own_masked, "LARGEST", 100)
    with pytest.raises(StudyError, match="and at most 95 fit"):
        own_masked.tokenizer(folder)


def test_missing_libraries_are_named(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(StudyError, match="transformers is missing"):
        small[0].check_data(setup_of(small))
