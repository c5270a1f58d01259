"""Fine-tuning a causal model of a user's: its tokens, its loss, LoRA, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from killed import killed_and_resumed
from small_finetune import small_problem, write_causal_model
from small_runs import settings_of
from small_text import novels, write_texts
from torch import Generator, nn

from cubegrad.study import Setup, StudyError, methods
from cubegrad.study.data import next_token, plain_text, tokens
from cubegrad.study.models import lora, own_causal, own_folder
from cubegrad.study.problems import bookwiki, finetune
from cubegrad.study.train import Place, run

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")
KINDS = ("GPT2", "Llama")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The problem in small, and a folder with a text."""
    write_texts(tmp_path / "text", mine=novels())
    return small_problem(tmp_path, monkeypatch), tmp_path


def setup_of(small, preset="own", seed=0):
    problem, data = small
    return Setup(problem.presets[preset], seed, CPU, data)


# The text.


def test_documents_are_joined_by_the_end_of_text(small):
    _, data = small
    folder = write_causal_model(data / "model")
    text = "".join(f"<|n{d}|>\n  Page {d}.\n\n    wrapped\n  here. End\n\n" for d in range(80))
    write_texts(data / "text", mine=text)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    sets, vocabulary = finetune.parts(data, None, 32, True, CPU)
    assert vocabulary == len(own)
    for part, some in sets.items():
        rows = some.rows(torch.arange(some.number), 32)
        pages = [d for d in range(80) if plain_text.part_of(d) == part]
        whole = "".join(f"  Page {d}.\n\n    wrapped\n  here. End<|endoftext|>" for d in pages)
        found = own.decode(rows.flatten())
        assert whole.startswith(found)
        left = own.encode(whole[len(found) :], add_special_tokens=False, truncation=False)
        assert len(left) < 32


def test_a_long_document_is_tokenized_in_passages(small, monkeypatch):
    _, data = small
    text = "One here.\nTwo there. Three.\n" * 30
    texts = plain_text.find(write_texts(data / "parts", train=text, valid="V.\n", test="T.\n"), "")
    whole = list(next_token.passages(texts))
    assert whole == [("train", text.rstrip(), True), ("valid", "V.", True), ("test", "T.", True)]
    monkeypatch.setattr(next_token, "PASSAGE", 100)
    cut = [passage for passage in next_token.passages(texts) if passage[0] == "train"]
    assert "".join(passage for _, passage, _ in cut) == text.rstrip()
    assert [ends for _, _, ends in cut] == [*(len(cut) - 1) * [False], True]
    assert all(passage.endswith("\n") and len(passage) < 150 for _, passage, _ in cut[:-1])


def test_a_large_vocabulary_is_stored_without_loss(small):
    """The end-of-text token's id needs more than two bytes."""
    _, data = small
    folder = write_causal_model(data / "model", extra=70_000, hidden_size=2)
    own = own_causal.tokenizer(folder)
    assert own.end == own.size - 1 > 70_000
    texts = plain_text.find(data, "text")
    made = next_token.encoded(own, texts, 32)["train"]
    assert made.ids.dtype == np.int32
    expected = [
        number
        for part, text, _ in next_token.passages(texts)
        if part == "train"
        for number in [*own.tokenizer.encode(text).ids, own.end]
    ]
    blocks = next_token.FullBlocks.of(made, CPU)
    rows = blocks.rows(torch.arange(blocks.number), 32).flatten().tolist()
    assert rows == expected[: len(rows)]
    assert rows.count(own.end) > 30
    task = finetune.build(setup_of(small))
    assert abs(task.evaluate(task.model.eval(), "test")["loss"] - math.log2(own.size)) < 1


@pytest.mark.parametrize(("size", "kept"), [(2**16, "uint16"), (2**16 + 1, "int32")])
def test_ids_take_two_bytes_if_all_fit(size, kept):
    class Largest:
        def encode_batch_fast(self, texts):
            return [type("Encoding", (), {"ids": 8 * [size - 1]}) for _ in texts]

    class Parts:
        place = "here"

        def verbatim(self):
            return iter([(part, 0, "text") for part in plain_text.PARTS])

    made = next_token.encoded(next_token.WithEnd(Largest(), 0, size), Parts(), 3)
    joined = tokens.joined(made["train"], made["valid"])
    assert joined.ids.dtype == kept
    rows = next_token.FullBlocks.of(joined, CPU).rows(torch.arange(6), 3)
    assert rows.tolist() == 2 * [*(2 * [3 * [size - 1]]), [size - 1, size - 1, 0]]


# Runs.


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers_in_bits(small, kind):
    _, data = small
    folder = write_causal_model(data / "model", kind)
    task = finetune.build(setup_of(small))
    sets, _ = finetune.parts(data, None, 32, False, CPU)
    rows = sets["test"].evenly_spaced(20, 32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(input_ids=rows, labels=rows).loss.item() / math.log(2)
    judged = task.evaluate(task.model.eval(), "test")
    assert judged["loss"] == pytest.approx(expected, rel=1e-6)
    # In pieces of at_once=3 blocks, the gradient is that of the whole update.
    (first, *_) = task.batches(0)
    assert first.inputs.shape == (8, 32)
    sgd = torch.optim.SGD(task.model.parameters(), lr=0.0)
    loss = task.step(sgd, first).item()
    whole = model(input_ids=first.inputs, labels=first.inputs).loss
    assert loss == pytest.approx(whole.item() / math.log(2), rel=1e-6)
    whole.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for param, ours in zip(model.parameters(), task.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, param.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.training
@pytest.mark.parametrize(
    ("preset", "kind", "gain"),  # bits; measured with four seeds:
    [
        ("own", "GPT2", 0.5),  # 1.5 to 2.1
        ("own", "Llama", 1.0),  # 3.5 to 3.7
        ("own-lora", "GPT2", 0.1),  # 0.26 to 0.55
        ("own-lora", "Llama", 0.3),  # 1.2 to 2.6
    ],
)
def test_a_run_learns_and_repeats_itself_when_killed(small, preset, kind, gain, tmp_path):
    problem, data = small
    # LoRA cannot change GPT-2's embedding, so its random one has to tell tokens apart.
    wide = {"initializer_range": 0.2} if (preset, kind) == ("own-lora", "GPT2") else {}
    write_causal_model(data / "model", kind, **wide)
    problem.check_data(setup_of(small, preset))
    settings = replace(settings_of(problem, method="adamw", lr=0.02), preset=preset)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    losses = record.curve["loss"]
    assert losses[-1] + gain < losses[0] < math.log2(301) + 0.5
    place = Place(data, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, tmp_path / "x.pt")
    assert resumed.curve == record.curve


def test_the_batches_depend_on_the_seed_alone(small):
    write_causal_model(small[1] / "model")
    first, again, other = (
        torch.stack(
            [update.inputs for update in finetune.build(setup_of(small, seed=s)).batches(1)]
        )
        for s in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_weights_are_float32_and_dropout_is_off_in_evaluation(small):
    _, data = small
    folder = write_causal_model(data / "model", dtype="bfloat16", resid_pdrop=0.5)
    transformers.AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    task = finetune.build(setup_of(small))
    assert {param.dtype for param in task.model.parameters()} == {torch.float32}
    (update, *_) = task.batches(0)
    task.model.train()
    assert task.loss(task.model, update) != task.loss(task.model, update)
    task.model.eval()
    assert task.loss(task.model, update) == task.loss(task.model, update)


# LoRA.


@pytest.mark.parametrize(("kind", "count"), [("GPT2", 4), ("Llama", 8)])  # Llama's with the head
def test_lora_trains_its_factors_alone_and_starts_as_the_model(small, kind, count):
    write_causal_model(small[1] / "model", kind)
    whole = finetune.build(setup_of(small))
    low = finetune.build(setup_of(small, "own-lora"))
    judged = [task.evaluate(task.model.eval(), "test") for task in (whole, low)]
    assert judged[0] == judged[1]
    names = {name for name, param in low.model.named_parameters() if param.requires_grad}
    assert {name.rpartition(".")[2] for name in names} == {"down", "up"}
    assert len(names) == 2 * count
    assert ("model.lm_head.up" in names) == (kind == "Llama")  # GPT-2's is tied to the embedding
    before = {name: value.clone() for name, value in low.model.state_dict().items()}
    factors = [param for param in low.model.parameters() if param.requires_grad]
    optimizer = methods.make("madgrad", factors, 0.01, 0)
    low.model.train()
    for update in low.batches(0):
        low.step(optimizer, update)
    changed = {
        n for n, value in low.model.state_dict().items() if not torch.equal(value, before[n])
    }
    assert changed == names


def test_factors_of_a_transposed_layer_are_those_of_a_linear_one():
    layer = transformers.pytorch_utils.Conv1D(5, 3)
    linear = nn.Linear(3, 5)
    linear.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
    inputs, outputs = torch.randn(7, 3), []
    for one in (layer, linear):
        low = lora.LowRank(one, 2, Generator().manual_seed(0))
        nn.init.ones_(low.up)
        outputs.append(low(inputs))
    torch.testing.assert_close(*outputs)


def test_a_model_without_linear_layers_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.embedding.weight

    with pytest.raises(StudyError, match=r"the model has none .* use the preset without lora"):
        lora.add_low_rank(Tied(), 2, Generator())


def test_a_layer_with_factors_cannot_be_bypassed():
    with pytest.raises(StudyError, match="LoRA does not work for this model"):
        _ = lora.LowRank(nn.Linear(3, 5), 2, Generator()).weight


# What is refused.


def test_the_kind_is_found_from_the_configuration(tmp_path):
    configs = [transformers.BertConfig(), transformers.Qwen2Config()]
    configs.append(transformers.BertConfig(is_decoder=True))
    for config, kind in zip(configs, ("masked", "causal", "causal"), strict=True):
        config.save_pretrained(tmp_path)
        assert own_folder.kind(tmp_path) == kind
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(StudyError, match=r"type 't5', .* use a causal one"):
        own_folder.kind(tmp_path)
    quantized = transformers.GPT2Config(quantization_config={"quant_method": "gptq", "bits": 4})
    quantized.save_pretrained(tmp_path)
    with pytest.raises(StudyError, match=r"is quantized, .* use the model it was made from"):
        own_folder.kind(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": 16}, "reads 16 tokens and blocks have 32"),
        ({"vocab_size": 250}, "tokenizer in .* has 301 tokens and the model's embedding 250"),
        ({"end": None}, "has no end-of-text token, .* set its eos_token"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(small, changes, message):
    write_causal_model(small[1] / "model", **changes)
    with pytest.raises(StudyError, match=message):
        finetune.build(setup_of(small))


def test_too_little_text_and_missing_weights_are_refused(small):
    folder = write_causal_model(small[1] / "model")
    write_texts(small[1] / "little", train="Short.\n", valid="", test="")
    texts = plain_text.find(small[1], "little")
    with pytest.raises(StudyError, match="tokens for 'train' and one block takes 32"):
        next_token.encoded(own_causal.tokenizer(folder), texts, 32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StudyError, match="transformers' AutoModelForCausalLM can read"):
        finetune.build(setup_of(small))


def test_no_more_scores_than_fit_are_computed_at_once(small, monkeypatch):
    write_causal_model(small[1] / "model")
    task = finetune.build(setup_of(small))
    whole = task.evaluate(task.model.eval(), "test")["loss"]
    sizes = []
    predict = task.model.predict
    monkeypatch.setattr(task.model, "predict", lambda b: sizes.append(len(b.inputs)) or predict(b))
    monkeypatch.setattr(bookwiki, "MOST_SCORES", 6 * 31 * 301)
    assert task.evaluate(task.model, "test")["loss"] == pytest.approx(whole, rel=1e-6)
    assert set(sizes[:-1]) == {6}
