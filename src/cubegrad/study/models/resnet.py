"""Residual networks for photographs: ResNet-18, ResNet-50 and narrower ones.

As is usual now, a bottleneck has its stride in the 3x3 convolution, not in the first 1x1 as
originally published: a little more accurate, with the same parameters.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import relu

STAGES_18 = (2, 2, 2, 2)
STAGES_50 = (3, 4, 6, 3)
EXPANSION = 4  # a bottleneck's output channels, in multiples of its width


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1, each with its norm, and a shortcut, projected if the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.reduce, self.norm1 = _convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.filter, self.norm2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.expand, self.norm3 = _convolution(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.norm1(self.reduce(x)))
        out = relu(self.norm2(self.filter(out)))
        return relu(self.norm3(self.expand(out)) + self.shortcut(x))


class Plain(nn.Module):
    """3x3 twice, each with its norm, and a shortcut, projected if the shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.filter1, self.norm1 = _convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.filter2, self.norm2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.norm1(self.filter1(x)))
        return relu(self.norm2(self.filter2(out)) + self.shortcut(x))


class Stem(NamedTuple):
    """What comes before the stages; by default it quarters the side, as published."""

    kernel: int = 7
    stride: int = 2
    pool: bool = True  # a max pool that halves the side


PUBLISHED = Stem()


class ResNet(nn.Module):
    """A stem that lowers the resolution, then stages that double the width and halve the side."""

    def __init__(
        self,
        stages: Sequence[int] = STAGES_50,
        width: int = 64,
        classes: int = 1000,
        stem: Stem = PUBLISHED,
        bottleneck: bool = True,
    ) -> None:
        super().__init__()
        self.first = _convolution(3, width, stem.kernel, stem.stride)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if stem.pool else nn.Identity()
        blocks: list[nn.Module] = []
        block, expansion = (Bottleneck, EXPANSION) if bottleneck else (Plain, 1)
        channels = width
        for stage, count in enumerate(stages):
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(block(channels, width << stage, stride))
                channels = expansion * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.pool(relu(self.norm(self.first(images)))))
        scores: Tensor = self.classifier(features.mean((2, 3)))
        return scores
