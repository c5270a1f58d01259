"""Two runs in which rounding could add up: 100,000 steps, and a start from trained weights.

They are problems of the study, for compact_quality.py: `compact_problems:digits_long`, and
`compact_problems:finetune`, a RoBERTa trained on novels that learns WikiText-2.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cubegrad.study import Preset, Problem, Setup, Task, checkpoints, train
from cubegrad.study.data import plain_text, tokens
from cubegrad.study.data.masking import Blocks
from cubegrad.study.graphs import GraphedStep
from cubegrad.study.problem import Split, optional
from cubegrad.study.problems import bookwiki, digits
from cubegrad.study.records import Settings

PASSES = 50  # over the digits between two evaluations: 1,000 steps
PRETRAINING = {"cpu": ("polynomial:450", 0.025), "gpu": ("polynomial:1000", 0.01)}
PRETRAINING_EPOCHS = {"cpu": 18, "gpu": 10}


def digits_long() -> Problem:
    short = digits.problem()
    preset = replace(short.presets["cpu"], epochs=100, schedule="flat")
    return replace(
        short,
        name="digits-long",
        description="the digits for 100,000 steps at one learning rate",
        build=_build_digits_long,
        presets={"cpu": preset, "gpu": preset},
        metric="loss",
        higher_is_better=False,
        unit="",
        beside=("accuracy",),
    )


def _build_digits_long(setup: Setup) -> Task:
    task = digits.build(setup)

    def batches(epoch: int) -> Iterator[Any]:
        for one in range(epoch * PASSES, (epoch + 1) * PASSES):
            yield from task.batches(one)

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(images), labels)

    graphed = setup.device.type == "cuda"
    step = GraphedStep(task.model, loss, setup.preset.batch) if graphed else None
    steps = PASSES * task.steps_per_epoch
    return replace(task, batches=batches, steps_per_epoch=steps, step=step)


def novels() -> Problem:
    """The RoBERTa of bookwiki, on the novels at every size."""
    problem = bookwiki.problem()
    presets = {
        name: replace(preset, options={**preset.options, "corpus": "novels"})
        for name, preset in problem.presets.items()
    }
    return replace(problem, name="novels", presets=presets)


def finetune() -> Problem:
    presets: dict[str, Preset] = {}
    for name, epochs, schedule in (("cpu", 4, "polynomial:20"), ("gpu", 2, "polynomial:40")):
        presets[name] = replace(novels().presets[name], epochs=epochs, schedule=schedule)
    return replace(
        novels(),
        name="finetune",
        description="a RoBERTa trained on novels, fine-tuned on WikiText-2",
        build=_build_finetune,
        presets=presets,
    )


def _build_finetune(setup: Setup) -> Task:
    options = setup.preset.options
    sets, vocabulary = wikitext(setup.data, options["vocabulary"], options["length"], setup.device)
    task = bookwiki.task(setup, sets, vocabulary)
    task.model.load_state_dict(torch.load(weights(setup.data, setup.preset), setup.device))
    return task


@lru_cache(maxsize=1)
def wikitext(
    data: Path, vocabulary: int, length: int, device: torch.device
) -> tuple[dict[Split, Blocks], int]:
    """WikiText-2 in the tokens of the novels, and their number."""
    corpus = tokens.corpus(plain_text.find(data, "novels"), vocabulary, length)
    tokenizer = optional("tokenizers").Tokenizer.from_str(corpus.tokenizer)
    parts = tokens.encoded(tokenizer, plain_text.find(data, "wikitext-2"), length)
    return {part: Blocks.of(some, device) for part, some in parts.items()}, corpus.vocabulary


def weights(data: Path, preset: Preset) -> Path:
    return data / f"novels-roberta-{preset.options['width']}.pt"


def tokenize(data: Path, preset_name: str, device: str) -> None:
    """Caches the tokens of the novels, so that the runs need not."""
    bookwiki.check_data(Setup(novels().presets[preset_name], 0, torch.device(device), data))


def pretrain(data: Path, preset_name: str, device: str) -> None:
    """Trains on the novels with a float32 state, and saves the weights for `finetune`."""
    problem = novels()
    preset, (schedule, lr) = problem.presets[preset_name], PRETRAINING[preset_name]
    path = weights(data, preset)
    if path.exists():
        return
    settings = Settings(
        problem.name,
        preset_name,
        PRETRAINING_EPOCHS[preset_name],
        preset.batch,
        "madgrad",
        schedule,
        lr,
        decay=0.0,
        seed=0,
        device=device,
        options=json.dumps(dict(preset.options), sort_keys=True),
    )
    checkpoint = path.with_suffix(".checkpoint")
    train.run(problem, settings, train.Place(data, save_every=0), checkpoint)
    state = checkpoints.load(checkpoint)
    assert state is not None
    torch.save(state["model"], path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    checkpoint.unlink()
