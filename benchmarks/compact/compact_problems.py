"""A run in which rounding could add up: the digits for 100,000 steps.

It is a problem of the study, for compact_quality.py: `compact_problems:digits_long`. The other one,
which starts from trained weights, is the study's `finetune`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cubegrad.study import Problem, Setup, Task
from cubegrad.study.graphs import GraphedStep
from cubegrad.study.problems import digits

PASSES = 50  # over the digits between two evaluations: 1,000 steps


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
