"""CIFAR-10 in small: made-up images and a net of some 20,000 weights."""

from dataclasses import replace
from pathlib import Path

import torch

from cubegrad.study import Setup
from cubegrad.study.data import cifar10 as data
from cubegrad.study.data.cifar10 import Images
from cubegrad.study.problems import cifar10
from cubegrad.study.records import Settings

CPU = torch.device("cpu")
# Below 16 channels into a strided 1x1 convolution in channels_last, oneDNN's backward pass writes
# past its buffer on CPUs without AVX-512, and on others with several threads (uxlfoundation/oneDNN
# #6035): at width 4 the tests ended in "double free or corruption".
TINY = {"stages": (1, 1), "bottleneck": False, "width": 16, "last_norm": True, "compile": False}


def made_up(count, seed=0):
    """Images whose class can be seen: the brighter, the higher."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(20, (count, 3, 32, 32), generator=generator)
    return Images((noise + 20 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)


def channels_last(count):
    """As the device holds them; the labels are the places."""
    return Images(made_up(count).images.permute(0, 2, 3, 1).contiguous(), torch.arange(count))


def small_problem(monkeypatch):
    """The problem on 70 made-up images; a fixture yields from it."""
    monkeypatch.setattr(data, "cifar10", lambda *_: (made_up(70), made_up(30, seed=1)))
    cifar10.parts.cache_clear()
    problem = cifar10.problem()
    options = {**TINY, "train": 70, "test": 25}
    preset = replace(problem.presets["cpu"], epochs=3, batch=16, options=options)
    yield replace(problem, presets={"cpu": preset})
    cifar10.parts.cache_clear()


def setup_of(problem, seed=0, device=CPU, hold_out=False):
    return Setup(problem.presets["cpu"], seed, device, Path("nowhere"), hold_out)


def settings_of(problem, **other):
    preset = problem.presets["cpu"]
    lengths = {"epochs": preset.epochs, "batch": preset.batch, "schedule": "flat"}
    setting = {"method": "madgrad", "lr": 0.01, "decay": 0.0, "seed": 0}
    return Settings("cifar10", "cpu", **{**lengths, **setting, **other})
