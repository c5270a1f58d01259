"""CIFAR-10 in small: made-up images and a net of some 20,000 weights."""

from dataclasses import replace

import torch
from torch import nn

from cubegrad.study.data import cifar10 as data
from cubegrad.study.data.cifar10 import Images
from cubegrad.study.problems import cifar10

# Below 16 channels into a strided 1x1 convolution in channels_last, oneDNN's backward pass writes
# past its buffer on CPUs without AVX-512, and on others with several threads (uxlfoundation/oneDNN
# #6035): at width 4 the tests ended in "double free or corruption".
TINY = {"stages": (1, 1), "bottleneck": False, "width": 16, "last_norm": True, "compile": False}


def made_up_images(count, seed=0):
    """The brighter an image, the higher its class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randint(20, (count, 3, 32, 32), generator=generator)
    return Images((noise + 20 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)


def channels_last(count):
    """Images as they are kept on the device, each labelled with its index."""
    images = made_up_images(count).images.permute(0, 2, 3, 1).contiguous()
    return Images(images, torch.arange(count))


class FirstValues(nn.Module):
    """Scores images by their first values, and keeps what it was called with."""

    def __init__(self, classes=10):
        super().__init__()
        self.classes = classes

    def forward(self, images):
        self.images, self.was_training = images, self.training
        return images[:, 0, 0, : self.classes]


def small_problem(monkeypatch):
    """The problem on 70 made-up images."""
    train, test = made_up_images(70), made_up_images(30, seed=1)
    monkeypatch.setattr(data, "cifar10", lambda *_: (train, test))
    problem = cifar10.problem()
    options = {**TINY, "train": 70, "test": 25}
    preset = replace(problem.presets["cpu"], epochs=3, batch=16, options=options)
    return replace(problem, presets={"cpu": preset})
