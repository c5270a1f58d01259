"""scikit-learn's bundled handwritten digits, 1,797 images of 8x8, and a small convnet."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from cubegrad.study.problem import Preset, Problem, Setup, Split, Task

Data = tuple[Tensor, Tensor]
SPLIT_SEED = 0


def split(data: Data, share: float, generator: Generator) -> tuple[Data, Data]:
    """Split at random; the first part gets this share of every class."""
    images, labels = data
    order = torch.randperm(len(labels), generator=generator)
    classes = [order[labels[order] == label] for label in range(10)]
    first = torch.cat([members[: round(share * len(members))] for members in classes])
    second = torch.cat([members[round(share * len(members)) :] for members in classes])
    return (images[first], labels[first]), (images[second], labels[second])


@cache
def parts(hold_out: bool) -> dict[Split, Data]:
    """70 % for training, with `hold_out` a fifth of it for validation; 30 % for the test."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    generator = Generator().manual_seed(SPLIT_SEED)
    train, test = split((images.float().view(-1, 1, 8, 8) / 16, labels), 0.7, generator)
    if not hold_out:
        return {"train": train, "test": test}
    train, valid = split(train, 0.8, generator)
    return {"train": train, "valid": valid, "test": test}


def network() -> nn.Module:
    convolutions = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def build(setup: Setup) -> Task:
    data = {
        part: (images.to(setup.device), labels.to(setup.device))
        for part, (images, labels) in parts(setup.hold_out).items()
    }
    images, labels = data["train"]
    batch = setup.preset.batch

    def batches(epoch: int) -> Iterator[Data]:
        generator = Generator().manual_seed(1000 * setup.seed + epoch)
        order = torch.randperm(len(labels), generator=generator).to(setup.device)
        for index in torch.split(order, batch):
            yield images[index], labels[index]

    def loss(model: nn.Module, batch: Data) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module, part: Split) -> dict[str, float]:
        images, labels = data[part]
        scores = model(images)
        right = (scores.argmax(1) == labels).sum().item()
        return {
            "loss": cross_entropy(scores, labels).item(),
            "accuracy": 100 * right / len(labels),
        }

    steps = -(-len(labels) // batch)
    return Task(network().to(setup.device), batches, loss, evaluate, steps_per_epoch=steps)


def problem() -> Problem:
    cpu = Preset(
        epochs=15,
        batch=64,
        schedule="tenthing:60%-85%",
        decays=(0.0, 1e-4),
        lrs={
            "madgrad": (5e-3, 1e-1),
            "sgd": (2.5e-2, 5e-1),
            "adam": (2.5e-3, 5e-2),
            "adagrad": (1e-2, 2.5e-1),
        },
        size="6,090 parameters",
    )
    longer = replace(cpu, epochs=30, decays=(0.0, 1e-5, 1e-4, 1e-3), seeds=10)
    return Problem(
        name="digits",
        description="two convolutions on scikit-learn's handwritten digits",
        build=build,
        presets={"cpu": cpu, "gpu": longer, "paper": replace(longer, epochs=300, batch=128)},
        metric="accuracy",
        higher_is_better=True,
        unit="%",
        data="bundled with scikit-learn",
    )
