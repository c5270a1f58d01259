"""A problem that takes milliseconds; TOY_DIE makes it exit, TOY_SLEEP slows each epoch down."""

import os
import time

import torch
from torch import nn

from cubegrad.study import Preset, Problem, Task


def build(setup):
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    parts = {"train": slice(0, 32 if setup.hold_out else 64), "valid": slice(32, 64)}
    parts["test"] = slice(64, 96)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    n = len(inputs[parts["train"]])

    def batches(epoch):
        if os.environ.get("TOY_DIE"):
            os._exit(9)  # as when the system runs out of memory
        time.sleep(float(os.environ.get("TOY_SLEEP", "0")))
        generator = torch.Generator().manual_seed(1000 * setup.seed + epoch)
        yield from torch.randperm(n, generator=generator).split(setup.preset.batch)

    def loss(model, index):
        return nn.functional.mse_loss(model(inputs[index]), targets[index])

    def evaluate(model, split):
        return {"loss": loss(model, parts[split]).item()}

    return Task(model, batches, loss, evaluate, steps_per_epoch=-(-n // setup.preset.batch))


def problem():
    preset = Preset(epochs=4, batch=16, methods=("madgrad", "sgd"), seeds=2)
    return Problem("toy", "a linear map", build, {"cpu": preset})


def not_a_problem():
    return 3
