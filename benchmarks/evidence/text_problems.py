"""A byte-level GPT of 2 layers, for a CPU: on novels, and fine-tuned on WikiText-2.

They are problems of the study, for `madgradw_choices.py`: `text_problems:novels` and
`text_problems:wikitext`. An epoch is 250 steps.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from cubegrad.study import Preset, Problem, Setup, StudyError, Task, checkpoints, train
from cubegrad.study.problem import Split
from cubegrad.study.problems.finetune import checksum
from cubegrad.study.records import Settings

sys.path.append(str(Path(__file__).parents[1]))
from shared import byte_gpt

SHAPE = byte_gpt.Preset(128, 2, 4, 96, 12, 250, 0, 20)  # its steps are those of an epoch
TESTED = 64  # windows in a batch of the evaluation
PRETRAINING = {"epochs": 12, "schedule": "polynomial:300", "lr": 4e-3, "decay": 0.1, "seed": 0}


def batch_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def task(setup: Setup, text: byte_gpt.Text, model: nn.Module, start: str = "") -> Task:
    def batches(epoch: int) -> Iterator[Tensor]:
        seed = 1000 * setup.seed + epoch
        return text.windows("train", seed, SHAPE.steps, setup.preset.batch)

    def step(optimizer: Optimizer, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = batch_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def evaluate(model: nn.Module, part: Split) -> dict[str, float]:  # noqa: ARG001
        windows = text.windows("validation", 7, SHAPE.validation_batches, TESTED)
        losses = [batch_loss(model, batch).item() for batch in windows]
        return {"loss": sum(losses) / len(losses) / math.log(2)}

    return Task(model, batches, batch_loss, evaluate, SHAPE.steps, step=step, start=start)


def read(setup: Setup, folder: str, name: str) -> byte_gpt.Text:
    path = setup.data / folder / name
    if not path.is_file():
        raise StudyError(f"{path} is missing; give the folder that has it with --data")
    return byte_gpt.Text(path, SHAPE, setup.device.type)


def build_novels(setup: Setup) -> Task:
    text = read(setup, "novels", "novels100.txt")
    return task(setup, text, byte_gpt.GPT(SHAPE).to(setup.device))


def build_wikitext(setup: Setup) -> Task:
    text = read(setup, "wikitext-2", "train.txt")
    model = byte_gpt.GPT(SHAPE)
    model.load_state_dict(pretrained(setup))
    return task(setup, text, model.to(setup.device), checksum(model.state_dict()))


def pretrained(setup: Setup) -> dict[str, Tensor]:
    """The weights after a run of AdamW on the novels, whose checkpoint is kept in the data."""
    path, epochs = setup.data / "small-gpt-adamw.pt", int(PRETRAINING["epochs"])
    state = checkpoints.load(path)
    if state is None or state["epoch"] < epochs:
        settings = Settings(
            "novels-gpt",
            "cpu",
            batch=SHAPE.batch,
            method="adamw",
            **PRETRAINING,  # type: ignore[arg-type]
        )
        train.run(novels(), settings, train.Place(setup.data, save_every=0), path)
        state = checkpoints.load(path)
        assert state is not None
    weights: dict[str, Tensor] = state["model"]
    return weights


def novels() -> Problem:
    return Problem(
        name="novels-gpt",
        description="a byte-level GPT of 2 layers on novels",
        build=build_novels,
        presets={"cpu": Preset(4, SHAPE.batch, "polynomial:100", lrs={"adam": (1e-3, 1e-2)})},
        unit="bits",
        data="plain text: novels",
    )


def wikitext() -> Problem:
    return Problem(
        name="wikitext-gpt",
        description="a byte-level GPT trained on novels, fine-tuned on WikiText-2",
        build=build_wikitext,
        presets={"cpu": Preset(1, SHAPE.batch, "polynomial:13", lrs={"adam": (5e-4, 5e-3)})},
        unit="bits",
        data="plain text: novels, WikiText-2",
    )
