"""Masked language modelling with RoBERTa, as in the paper's section on BookWiki.

Tokens are on the device in two bytes each, and blocks are cut and masked there. Losses are in bits,
as fairseq prints them and the paper reports them; gradients are of the loss in nats, as in fairseq.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from cubegrad.study.data import plain_text, tokens
from cubegrad.study.data.masking import IGNORED, Blocks, Masked, block_indices, combined_seed
from cubegrad.study.data.tokens import BEGIN, PAD
from cubegrad.study.graphs import Captured, Loss, compiled
from cubegrad.study.problem import PAPER_METHODS, Preset, Problem, Setup, Split, Task, optional

TEST_SEED = 20_210_126  # of the masks for test and validation, the same for all runs
EVALUATED_AT_ONCE = 128  # blocks, of which no more than
MOST_SCORES = 2**29  # 2 GiB in float32


def network(options: dict[str, Any], vocabulary: int) -> nn.Module:
    """RoBERTa with a masked-LM head and random weights."""
    library = optional("transformers")
    config = library.RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=options["width"],
        num_hidden_layers=options["layers"],
        num_attention_heads=options["heads"],
        intermediate_size=4 * options["width"],
        hidden_dropout_prob=options["dropout"],
        attention_probs_dropout_prob=options["dropout"],
        max_position_embeddings=options["length"] + PAD + 1,  # positions count from PAD + 1
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        bos_token_id=BEGIN,
        pad_token_id=PAD,
        eos_token_id=tokens.END,
        attn_implementation="sdpa",
    )
    model: nn.Module = library.RobertaForMaskedLM(config)
    return model


def predictions(model: Any, blocks: Masked) -> Tensor:
    """The scores of all tokens at the masked places. A user's own model has a method for it."""
    if hasattr(model, "predict"):
        scores: Tensor = model.predict(blocks)
        return scores
    # Four dimensions, so that the library uses the mask as it is, without reading its values.
    seen = (blocks.inputs != PAD)[:, None, None, :]
    hidden: Tensor = model.roberta(blocks.inputs, attention_mask=seen).last_hidden_state
    places = blocks.places[:, :, None].expand(-1, -1, hidden.shape[2])
    scores = model.lm_head(hidden.gather(1, places))
    return scores


def total_loss(model: nn.Module, blocks: Masked) -> Tensor:
    """In nats, summed over all predictions; only their places are scored."""
    # No cast cache: it would outlive a graph's capture, and each weight is cast only once.
    with torch.autocast("cuda", torch.bfloat16, blocks.inputs.is_cuda, cache_enabled=False):
        scores = predictions(model, blocks)
    flat = scores.float().flatten(0, 1)
    return cross_entropy(flat, blocks.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def prediction_count(blocks: Masked) -> Tensor:
    return (blocks.labels != IGNORED).sum()


def mean_loss(model: nn.Module, *tensors: Tensor) -> Tensor:
    blocks = Masked(*tensors)
    return total_loss(model, blocks) / prediction_count(blocks)


def make_step(
    model: nn.Module, at_once: int, clip: float, graphed: Loss | None = None
) -> Callable[[Optimizer, Masked], Tensor]:
    """`Task.step`: the clipped gradient of the mean over all predictions of the update.

    With `graphed`, which is `mean_loss` or its compiled form, it is one CUDA graph, for updates of
    at most `at_once` blocks.
    """
    params = list(model.parameters())
    captured: Captured | None = None

    def in_pieces(optimizer: Optimizer, update: Masked) -> Tensor:
        optimizer.zero_grad()
        count = prediction_count(update)
        total = torch.zeros((), device=count.device)
        for piece in update.split(at_once):
            loss = total_loss(model, piece) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def step(optimizer: Optimizer, update: Masked) -> Tensor:
        nonlocal captured
        if graphed:
            captured = captured or Captured(model, graphed, update)
            total = captured.replay(update)
        else:
            total = in_pieces(optimizer, update)
        clip_grad_norm_(params, clip)
        optimizer.step()
        return total / math.log(2)

    return step


@torch.no_grad()
def metrics(model: nn.Module, blocks: Masked, vocabulary: int = 1) -> dict[str, float]:
    """The mean loss in bits and the perplexity; the host waits for the device once."""
    fit = max(1, MOST_SCORES // (blocks.labels.shape[1] * vocabulary))
    pieces = blocks.split(min(EVALUATED_AT_ONCE, fit))
    sums = [total_loss(model, piece).double() for piece in pieces]
    loss = torch.stack(sums).sum() / prediction_count(blocks) / math.log(2)
    bits, perplexity = torch.stack([loss, loss.exp2()]).tolist()
    return {"loss": bits, "perplexity": perplexity}


@lru_cache(maxsize=1)
def parts(
    folder: Path, name: str, vocabulary: int, length: int, hold_out: bool, device: torch.device
) -> tuple[dict[Split, Blocks], int]:
    """The text on the device, and the size of its vocabulary."""
    texts = plain_text.find(folder, name)
    corpus = tokens.corpus(texts, vocabulary, length)
    by_part = dict(corpus.parts)
    if not hold_out and not texts.has_parts:
        by_part["train"] = tokens.joined(by_part["train"], by_part["valid"])
    return {part: Blocks.of(some, device) for part, some in by_part.items()}, corpus.vocabulary


def build(setup: Setup) -> Task:
    names = ("corpus", "vocabulary", "length")
    chosen = (setup.preset.options[name] for name in names)
    return task(setup, *parts(setup.data, *chosen, setup.hold_out, setup.device))


def task(
    setup: Setup, sets: dict[Split, Blocks], vocabulary: int, trained: nn.Module | None = None
) -> Task:
    """The task on this text, with a new network unless there is a trained one."""
    options = dict(setup.preset.options)
    batch, length, updates = setup.preset.batch, options["length"], options["updates"]
    device, seed = setup.device, setup.seed
    train = sets["train"]
    model = trained or network(options, vocabulary).to(device)

    def batches(epoch: int) -> Iterator[Masked]:
        generator = Generator(device)
        for update in range(epoch * updates, (epoch + 1) * updates):
            indices = block_indices(seed, update, batch, train.number, device)
            generator.manual_seed(combined_seed(seed, update))
            yield train.to_predict(train.rows(indices, length), vocabulary, generator)

    @lru_cache(maxsize=2)
    def test_blocks(part: Split) -> Masked:
        """Masked on the CPU: the same on every machine."""
        rows = sets[part].evenly_spaced(options["test_blocks"], length)
        generator = Generator().manual_seed(TEST_SEED)
        on_cpu = sets[part].to_predict(rows.cpu(), vocabulary, generator)
        return Masked(*(tensor.to(device) for tensor in on_cpu))

    def evaluate(model: nn.Module, part: Split) -> dict[str, float]:
        return metrics(model, test_blocks(part), vocabulary)

    own = hasattr(model, "predict")  # few models of users allow a graph
    in_one_piece = batch <= options["at_once"]
    graphed = compiled(mean_loss) if device.type == "cuda" and in_one_piece and not own else None
    step = make_step(model, options["at_once"], options["clip"], graphed)
    return Task(
        model, batches, lambda model, update: mean_loss(model, *update), evaluate, updates, step
    )


def check_data(setup: Setup) -> None:
    """Reads the text and caches its tokens for the runs."""
    optional("transformers")
    options = setup.preset.options
    texts = plain_text.find(setup.data, options["corpus"])
    tokens.corpus(texts, options["vocabulary"], options["length"])


def _paper() -> Preset:
    return Preset(
        epochs=20,
        batch=2048,  # 8 GPUs x 16 blocks x an update frequency of 16
        schedule="polynomial:10000",
        methods=PAPER_METHODS,
        seeds=5,
        lrs={
            "madgrad": (2.5e-3, 1e-2),
            "sgd": (5e-1, 2.5),
            "adam": (5e-4, 2.5e-3),
            "adagrad": (5e-3, 2.5e-2),
        },
        size="RoBERTa-base, 124,697,433 parameters",
        options={
            "corpus": "bookwiki",
            "vocabulary": 50_265,
            "length": 512,
            "layers": 12,
            "width": 768,
            "heads": 12,
            "dropout": 0.1,
            "clip": 0.5,
            "updates": 1000,
            "at_once": 32,
            "test_blocks": 4096,
        },
    )


def _gpu() -> Preset:
    paper = _paper()
    return replace(
        paper,
        epochs=15,
        batch=256,
        schedule="polynomial:1500",
        methods=Preset.methods,
        seeds=3,
        # Between the paper's and those of the tiny network of preset cpu, which are larger.
        lrs={
            "madgrad": (5e-3, 2.5e-2),
            "mirror-madgrad": (2.5e-2, 1e-1),
            "sgd": (2.5e-1, 1.0),
            "adam": (1e-3, 5e-3),
            "adagrad": (1e-2, 5e-2),
        },
        size="4 layers of 256, 5,364,736 parameters",
        options={
            **paper.options,
            "corpus": "novels",
            "vocabulary": 8192,
            "length": 128,
            "layers": 4,
            "width": 256,
            "heads": 4,
            "updates": 200,
            "at_once": 256,
            "test_blocks": 2048,
        },
    )


def _cpu() -> Preset:
    gpu = _gpu()
    return replace(
        gpu,
        epochs=6,
        batch=32,
        schedule="polynomial:150",
        lrs={
            "madgrad": (1e-2, 5e-2),
            "sgd": (2.5e-1, 1.0),
            "adam": (2.5e-3, 1e-2),
            "adagrad": (2.5e-2, 1e-1),
        },
        size="2 layers of 64, 173,184 parameters",
        options={
            **gpu.options,
            "corpus": "wikitext-2",
            "vocabulary": 1024,
            "length": 32,
            "layers": 2,
            "width": 64,
            "heads": 2,
            "dropout": 0.0,
            "updates": 50,
            "at_once": 32,
            "test_blocks": 512,
        },
    )


def problem() -> Problem:
    return Problem(
        name="bookwiki",
        description="masked language modelling with RoBERTa, on whole sentences of plain text",
        build=build,
        presets={"cpu": _cpu(), "gpu": _gpu(), "paper": _paper()},
        metric="loss",
        unit="bits",
        data="plain text of your own: BookCorpus and Wikipedia, novels, WikiText-2",
        beside=("perplexity",),
        paper="BookWiki",
        check_data=check_data,
    )
