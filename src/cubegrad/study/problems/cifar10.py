"""CIFAR-10 with pre-activation residual networks, as in the paper's section on it.

The data is kept on the device in bytes, and cropped and flipped there. On a GPU the convolutions
run in bfloat16, and a batch's loss and gradients are one CUDA graph of compiled code.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, pad

from cubegrad.study.data import cifar10 as data
from cubegrad.study.data.cifar10 import Images
from cubegrad.study.graphs import GraphedStep, compiled
from cubegrad.study.models.preact import STAGES_18, STAGES_152, PreActResNet
from cubegrad.study.problem import (
    OWN_DECAYS,
    PAPER_METHODS,
    Preset,
    Problem,
    Setup,
    Split,
    Task,
)

SIDE = 32
PADDING = 4
HELD_OUT = 0.1  # the last images of the training set, which the publisher has shuffled
TEST_BATCH = 1000
CROPPED_AT_ONCE = 8192  # images; their indices temporarily take 8 KiB each


@lru_cache(maxsize=1)
def parts(
    folder: Path, download: bool, hold_out: bool, sizes: tuple[int, int], device: torch.device
) -> dict[Split, Images]:
    """The first `sizes` images of the training and the test set on the device, channels last."""
    train, test = data.cifar10(folder, download)
    train, test = (
        Images(images[:size].permute(0, 2, 3, 1).contiguous().to(device), labels[:size].to(device))
        for (images, labels), size in zip((train, test), sizes, strict=True)
    )
    if not hold_out:
        return {"train": train, "test": test}
    kept = len(train.labels) - round(HELD_OUT * len(train.labels))
    valid = Images(train.images[kept:], train.labels[kept:])
    return {"train": Images(train.images[:kept], train.labels[:kept]), "valid": valid, "test": test}


def augmented(train: Images, batch: int, generator: Generator) -> Iterator[Images]:
    """An epoch's batches in random order: each image is shifted by up to 4 px, half are mirrored.

    Padding is black, as if images were padded before they are centred.
    """
    device = train.images.device
    count = len(train.labels)
    padded = pad(train.images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    order = torch.randperm(count, generator=generator, device=device)
    shifts = torch.randint(2 * PADDING + 1, (2, count, 1), generator=generator, device=device)
    mirrored = torch.randint(2, (count, 1), generator=generator, device=device, dtype=torch.bool)
    across = torch.arange(SIDE, device=device)
    rows = shifts[0] + across
    columns = shifts[1] + torch.where(mirrored, across.flip(0), across)
    at_once = max(CROPPED_AT_ONCE // batch, 1) * batch
    for start in range(0, count, at_once):
        some = slice(start, start + at_once)
        images = padded[order[some, None, None], rows[some, :, None], columns[some, None, :]]
        labels = train.labels[order[some]]
        for first in range(0, len(labels), batch):
            yield Images(images[first : first + batch], labels[first : first + batch])


def scores(model: nn.Module, images: Tensor) -> Tensor:
    """Class scores of byte images, which are centred here."""
    centred = images.permute(0, 3, 1, 2).float() / 255 - 0.5
    # No cast cache: it would outlive a graph's capture, and each weight is cast only once.
    mixed = torch.autocast("cuda", torch.bfloat16, images.is_cuda, cache_enabled=False)
    with mixed:
        out: Tensor = model(centred)
    return out.float()


def mean_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores(model, images), labels)


def build(setup: Setup) -> Task:
    options = setup.preset.options
    sizes = (options["train"], options["test"])
    sets = parts(setup.data, setup.download, setup.hold_out, sizes, setup.device)
    train = sets["train"]
    batch = setup.preset.batch
    model = PreActResNet(
        options["stages"],
        options["bottleneck"],
        options["width"],
        last_norm=options["last_norm"],
    )
    model = model.to(setup.device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batches(epoch: int) -> Iterator[Images]:
        generator = Generator(setup.device).manual_seed(1_000_003 * setup.seed + epoch)
        return augmented(train, batch, generator)

    def loss(model: nn.Module, batch: Images) -> Tensor:
        return mean_loss(model, batch.images, batch.labels)

    def evaluate(model: nn.Module, part: Split) -> dict[str, float]:
        return metrics(model, sets[part])

    step = None
    if setup.device.type == "cuda":
        full_batch_loss = compiled(mean_loss) if options["compile"] else mean_loss
        step = GraphedStep(model, full_batch_loss, batch, rest=mean_loss)
    steps = -(-len(train.labels) // batch)
    return Task(model, batches, loss, evaluate, steps_per_epoch=steps, step=step)


@torch.no_grad()
def metrics(model: nn.Module, examples: Images) -> dict[str, float]:
    """Mean loss and accuracy in percent; the host waits for the device once."""
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=examples.images.device)
    for first in range(0, len(examples.labels), TEST_BATCH):
        labels = examples.labels[first : first + TEST_BATCH]
        out = scores(model, examples.images[first : first + TEST_BATCH])
        right = (out.argmax(1) == labels).sum()
        total += torch.stack([cross_entropy(out, labels, reduction="sum").double(), right.double()])
    model.train(was_training)
    loss, right_count = (total / len(examples.labels)).tolist()
    return {"loss": loss, "accuracy": 100 * right_count}


def check_data(setup: Setup) -> None:
    data.cifar10(setup.data, setup.download)


WHOLE = {"train": 50_000, "test": 10_000, "compile": True, "width": 64, "last_norm": True}


def _gpu() -> Preset:
    return Preset(
        epochs=36,
        batch=128,
        schedule="tenthing:50%-75%",
        seeds=3,
        decays=(1e-4, 5e-4),
        own_decays={"adamw": (1e-1, 5e-1, 2.5)},  # 0.5 was the best, 50 times torch's default
        lrs={
            "madgrad": (1e-4, 5e-4),
            "mirror-madgrad": (5e-4, 2.5e-3),
            "sgd": (5e-2, 2.5e-1),
            "adam": (1e-4, 5e-4),
            "adagrad": (1e-2, 5e-2),
        },
        size="PreAct ResNet-18, 11,172,170 parameters",
        options={**WHOLE, "stages": STAGES_18, "bottleneck": False},
    )


def _paper() -> Preset:
    return replace(
        _gpu(),
        epochs=300,
        schedule="tenthing:150-225",
        methods=PAPER_METHODS,
        seeds=10,
        size="PreAct ResNet-152, 58,144,842 parameters",
        options={**WHOLE, "stages": STAGES_152, "bottleneck": True, "last_norm": False},
    )


def _cpu() -> Preset:
    few = {"train": 1000, "test": 500, "compile": False, "width": 8, "last_norm": True}
    return replace(
        _gpu(),
        epochs=6,
        batch=32,
        decays=(1e-4,),
        own_decays=OWN_DECAYS,
        lrs={
            "madgrad": (1e-3, 5e-3),
            "sgd": (1e-2, 5e-2),
            "adam": (1e-3, 5e-3),
            "adagrad": (2.5e-2, 1e-1),
        },
        size="PreAct ResNet-8, 19,858 parameters, on 1,000 images",
        options={**few, "stages": (1, 1, 1), "bottleneck": False},
    )


def problem() -> Problem:
    return Problem(
        name="cifar10",
        description="PreAct ResNets on CIFAR-10, with flips and crops",
        build=build,
        presets={"cpu": _cpu(), "gpu": _gpu(), "paper": _paper()},
        metric="accuracy",
        higher_is_better=True,
        unit="%",
        data=" or ".join(source.url for source in data.CIFAR10),
        paper="CIFAR10",
        check_data=check_data,
    )
