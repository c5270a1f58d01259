"""The problem `finetune` in small: made-up texts, a tiny RoBERTa, a model folder of a user's."""

import json
from dataclasses import replace

import pytest
from small_text import TINY, novels, sentence, write_texts

from cubegrad.study.problems import finetune


def small_problem(data, monkeypatch):
    """With a few updates of pretraining; writes its texts to `data`."""
    write_texts(data / "novels", all=novels())
    lines = [f"Now {sentence(7 * i)}\n" for i in range(600)]
    parts = {"train": lines[:500], "valid": lines[500:550], "test": lines[550:]}
    write_texts(data / "wikitext-2", **{part: "".join(some) for part, some in parts.items()})
    brief = finetune.Pretraining(2, 8, "polynomial:3", 0.01)
    monkeypatch.setitem(finetune.PRETRAINING, TINY["width"], brief)
    problem = finetune.problem()
    presets = {name: _small(problem.presets[name]) for name in problem.presets}
    return replace(problem, presets=presets)


def _small(preset):
    tiny = TINY if "width" in preset.options else {"length": 32, "updates": 6, "test_blocks": 20}
    options = {**preset.options, **tiny, "at_once": 3}
    return replace(preset, epochs=3, batch=8, options=options)


def write_model(folder, kind="BertForMaskedLM", places=64):
    """A small model and its tokenizer, as their `save_pretrained` writes them."""
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    special = list(names.values())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(novels().splitlines(), trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)  # which the study must not keep
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": text for name, text in names.items()}
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=places,
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    return folder


def write_causal_model(folder, kind="GPT2", places=64, extra=0, end="<|endoftext|>", **config):
    """A small GPT2 or Llama and its tokenizer, with `extra` tokens that are in no text."""
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(novels().splitlines(), trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary |= {f"<{number}>": len(vocabulary) + number for number in range(extra)}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    first = ("<|endoftext|>", tokenizer.get_vocab_size() - 1)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[first]
    )
    tokenizer.enable_truncation(4)  # neither of which the study must keep
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(
        folder
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": places}
    sizes |= {"intermediate_size": 32} if kind == "Llama" else {}
    made = getattr(transformers, f"{kind}Config")(**{**sizes, **config})
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    getattr(transformers, name)(made).save_pretrained(folder)
    return folder
