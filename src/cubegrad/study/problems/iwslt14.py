"""German to English with LSTMs and attention, as in the paper's section on IWSLT14.

The length of a run is given in updates: an epoch of the study is a fixed number of them, not a pass
over the data. Batches are formed once per run, by length, and kept on the device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from cubegrad.study.data import parallel
from cubegrad.study.data.subwords import END, PAD
from cubegrad.study.data.translation import (
    Batch,
    Limits,
    Part,
    Text,
    batch_of,
    by_length,
    prepared,
)
from cubegrad.study.graphs import Graphs
from cubegrad.study.models.lstm_attention import Translator
from cubegrad.study.problem import (
    OWN_DECAYS,
    Preset,
    Problem,
    Setup,
    Split,
    StudyError,
    Task,
    optional,
)

SMOOTHING = 0.1
CLIP = 25.0  # fairseq's default when the paper was written
BIT = math.log(2)  # nats
MOST_GRAPHS = 1000  # each takes some 8 MB of the GPU's memory
LEAST_REPLAYS = 4
SOURCES = (
    "German-English sentences: IWSLT14 as fairseq's prepare-iwslt14.sh leaves it (paper), "
    "tatoeba/deu.txt of https://www.manythings.org/anki/deu-eng.zip (gpu, cpu), or your own"
)


def losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Losses summed over the tokens, in nats: with smoothed labels, and without."""
    given = batch.target.roll(1, 1)
    given[:, 0] = END
    log_p = model(batch.source, batch.lengths, given).log_softmax(2)
    real = batch.target != PAD
    nll = -log_p.gather(2, batch.target.unsqueeze(2)).squeeze(2).masked_fill(~real, 0).sum()
    uniform = -log_p.mean(2).masked_fill(~real, 0).sum()  # against uniform labels
    return (1 - SMOOTHING) * nll + SMOOTHING * uniform, nll


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return losses(model, batch)[0] / (batch.target != PAD).sum()


def loss_of_tensors(model: nn.Module, *tensors: Tensor) -> Tensor:
    return mean_loss(model, Batch(*tensors))


def pays_off(batches: int, updates: int) -> bool:
    """Whether to capture a graph of each batch, which costs as much as some plain updates."""
    return batches <= MOST_GRAPHS and updates >= LEAST_REPLAYS * batches


def make_step(model: nn.Module, graphed: bool = False) -> Callable[[Optimizer, Batch], Tensor]:
    """`Task.step`, with clipping. As in fairseq, gradients are of nats and the loss is in bits.

    With `graphed` each batch is a CUDA graph, as its sentences have their own lengths: batches must
    be the same objects in each pass over them.
    """
    graphs, kept = Graphs(model), dict[int, Batch]()  # kept, so that no other batch gets its id

    def step(optimizer: Optimizer, batch: Batch) -> Tensor:
        if graphed:
            kept[id(batch)] = batch
            loss = graphs.replay(id(batch), loss_of_tensors, batch)
        else:
            optimizer.zero_grad()
            loss = mean_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach() / BIT

    return step


@torch.no_grad()
def metrics(model: nn.Module, batches: Sequence[Batch]) -> dict[str, float]:
    """Bits per token, with smoothed labels (the paper's loss) and without, and the perplexity."""
    device = batches[0].target.device
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        tokens = (batch.target != PAD).sum()
        total += torch.stack([value.double() for value in (*losses(model, batch), tokens)])
    smoothed, nll, count = total.tolist()
    smoothed, nll = smoothed / count / BIT, nll / count / BIT
    # Clamped, as an overflow of a hopeless model would count as divergence.
    perplexity = 2.0 ** min(nll, 100.0) if math.isfinite(nll) else nll
    return {"loss": smoothed, "nll": nll, "perplexity": perplexity}


class Bleu:
    """The BLEU of greedy translations of `count` evenly spaced sentences of a part."""

    def __init__(self, text: Text, part: Part, count: int, tokens: int, device: torch.device):
        self.text = text
        total = len(part.source)
        count = min(count, total)
        chosen = torch.arange(count) * total // max(count, 1)
        groups = by_length(part, tokens, chosen) if count else []
        self.batches = [batch_of(part, group, device) for group in groups]
        self.references = [part.references[i] for group in groups for i in reversed(group)]

    def translations(self, model: Translator) -> list[str]:
        texts = []
        for batch in self.batches:
            limit = int(1.2 * batch.source.shape[1]) + 10
            rows = model.translate(batch.source, batch.lengths, END, limit).tolist()
            texts += [self.text.subwords.join(self.text.english.decode(row)) for row in rows]
        return texts

    def __call__(self, model: Translator) -> dict[str, float]:
        """Empty if sacrebleu is not installed: the score is not the metric that decides."""
        try:
            sacrebleu = optional("sacrebleu") if self.batches else None
        except StudyError:
            sacrebleu = None
        if sacrebleu is None:
            return {}
        tokenizer = "none" if self.text.tokenised else "13a"
        score = sacrebleu.corpus_bleu(
            self.translations(model), [self.references], tokenize=tokenizer, force=True
        )
        return {"bleu": score.score}


def _text(setup: Setup) -> Text:
    options = setup.preset.options
    return prepared(setup.data, tuple(options["folders"]), options["merges"], _limits(setup))


def _limits(setup: Setup) -> Limits:
    return Limits(*(setup.preset.options[name] for name in ("train", "test", "words")))


def build(setup: Setup) -> Task:
    options, tokens = setup.preset.options, setup.preset.batch
    text = _text(setup)
    train = text.parts["train"]
    order = torch.randperm(len(train.source), generator=Generator().manual_seed(setup.seed))
    all_batches = [
        batch_of(train, group, setup.device) for group in by_length(train, tokens, order)
    ]
    model = Translator(
        len(text.german), len(text.english), options["width"], options["dropout"], PAD
    ).to(setup.device)
    steps: int = options["steps"]

    def batches(epoch: int) -> Iterator[Batch]:
        """Passes over all batches, each in its own random order."""
        order: list[int] = []
        for update in range(epoch * steps, (epoch + 1) * steps):
            number, place = divmod(update, len(all_batches))
            if not order or not place:
                generator = Generator().manual_seed(1_000_003 * setup.seed + number)
                order = torch.randperm(len(all_batches), generator=generator).tolist()
            yield all_batches[order[place]]

    @lru_cache
    def examples_of(split: Split) -> tuple[list[Batch], Bleu]:
        part = text.parts[split]
        groups = by_length(part, max(tokens, _longest(part)), torch.arange(len(part.source)))
        bleu = Bleu(text, part, options["bleu"], max(tokens, _longest(part)), setup.device)
        return [batch_of(part, group, setup.device) for group in groups], bleu

    def evaluate(model: nn.Module, split: Split) -> dict[str, float]:
        assert isinstance(model, Translator)
        examples, bleu = examples_of(split)
        return {**metrics(model, examples), **bleu(model)}

    graphed = pays_off(len(all_batches), steps * setup.preset.epochs)
    step = make_step(model, graphed and setup.device.type == "cuda")
    return Task(model, batches, mean_loss, evaluate, steps_per_epoch=steps, step=step)


def _longest(part: Part) -> int:
    return int(torch.maximum(part.source.lengths, part.target.lengths).max())


def check_data(setup: Setup) -> None:
    corpus = parallel.corpus(setup.data, setup.preset.options["folders"])
    _limits(setup).of(corpus)
    if not corpus.marked:
        optional("tokenizers")


WHOLE = {"train": 0, "test": 0, "words": 0, "merges": 10_000, "width": 256, "dropout": 0.3}


def _paper() -> Preset:
    return Preset(
        epochs=60,
        batch=4096,
        schedule="inverse-sqrt:4000",
        methods=("madgrad", "sgd", "adamw", "adagrad"),  # fairseq's Adam decays as AdamW does
        seeds=10,
        decays=(0.0, 5e-6, 1e-5, 5e-2),
        own_decays={},
        lrs={
            "madgrad": (1e-2, 5e-2),
            "sgd": (5e-1, 2.5),
            "adamw": (5e-3, 2.5e-2),
            "adagrad": (1e-1, 5e-1),
        },
        size="LSTMs of 256 with attention, 5,474,304 parameters, 60 x 1,000 updates",
        options={
            **WHOLE,
            "folders": ("iwslt14.tokenized.de-en", "iwslt14"),
            "steps": 1000,
            "bleu": 1000,
        },
    )


def _gpu() -> Preset:
    return replace(
        _paper(),
        epochs=10,
        batch=8192,
        schedule="inverse-sqrt:400",
        methods=Preset.methods,
        seeds=3,
        decays=(0.0,),
        own_decays=OWN_DECAYS,
        lrs={
            "madgrad": (2.5e-2, 2.5e-1),
            "sgd": (5e-1, 2.5),
            "adam": (5e-3, 5e-2),
            "adagrad": (1e-1, 1.0),
        },
        size="LSTMs of 256 with attention, 4,687,872 parameters on Tatoeba, 10 x 250 updates",
        options={**WHOLE, "folders": ("tatoeba",), "steps": 250, "bleu": 1000},
    )


def _cpu() -> Preset:
    few: dict[str, Any] = {"folders": ("tatoeba",), "train": 8000, "test": 300, "words": 4}
    few |= {"merges": 500, "width": 64, "dropout": 0.3, "steps": 80, "bleu": 100}
    return replace(
        _gpu(),
        epochs=6,
        batch=256,
        schedule="inverse-sqrt:80",
        lrs={
            "madgrad": (1e-1, 5e-1),
            "sgd": (5e-1, 2.5),
            "adam": (2.5e-2, 1e-1),
            "adagrad": (2.5e-1, 1.0),
        },
        size="LSTMs of 64 with attention, 156,160 parameters, on 8,000 short pairs of Tatoeba",
        options=few,
    )


def problem() -> Problem:
    return Problem(
        name="iwslt14",
        description="German to English with LSTMs and attention, losses in bits a token",
        build=build,
        presets={"cpu": _cpu(), "gpu": _gpu(), "paper": _paper()},
        data=SOURCES,
        unit="bits",
        beside=("bleu",),
        paper="IWSLT14",
        check_data=check_data,
    )
