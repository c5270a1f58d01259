"""ImageNet with ResNet-50, as in the paper's section on it; any folder-per-class tree will do.

Images are decoded and cropped in worker processes, or kept in bytes on the device and cropped
there. On a GPU the network runs in bfloat16, channels last, and a step is one CUDA graph, at `gpu`
of compiled code.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from cubegrad.study.data.decoding import Batch, Crops, Stored, Workers, read_all, worker_count
from cubegrad.study.data.folders import Tree, read_tree
from cubegrad.study.data.image_batches import from_memory, from_workers, in_order, shuffled
from cubegrad.study.graphs import GraphedStep, compiled
from cubegrad.study.models.resnet import STAGES_18, STAGES_50, ResNet, Stem
from cubegrad.study.problem import (
    PAPER_METHODS,
    Preset,
    Problem,
    Setup,
    Split,
    StudyError,
    Task,
    optional,
)

MEANS = (0.485, 0.456, 0.406)
DEVIATIONS = (0.229, 0.224, 0.225)
TEST_BATCH = 250
MOST_BYTES = 16 * 2**30  # of images in memory


def tree_of(setup: Setup) -> Tree:
    options = setup.preset.options
    most = options["train"], options["test"]
    return read_tree(setup.data, options["classes"], most, setup.hold_out)


@lru_cache(maxsize=1)
def stored(
    folder: Path, chosen: tuple[Any, ...], hold_out: bool, longest: int, device: torch.device
) -> tuple[int, dict[Split, Stored]]:
    """The number of classes, and the images, which the runs of one process share."""
    classes, *most = chosen
    tree = read_tree(folder, classes, (most[0], most[1]), hold_out)
    return len(tree.classes), read_all(tree.parts, longest, device)


@cache
def normalisation(device: torch.device) -> tuple[Tensor, Tensor]:
    """Cached, as the host waits while they are copied to the device."""
    means, deviations = (
        255 * torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEANS, DEVIATIONS)
    )
    return means, deviations


def normalised(images: Tensor) -> Tensor:
    """Images with values 0 to 255 as the network takes them."""
    means, deviations = normalisation(images.device)
    return ((images.float() - means) / deviations).contiguous(memory_format=torch.channels_last)


def scores(model: nn.Module, normal: Tensor) -> Tensor:
    """Class scores of normalised images."""
    # No cast cache: it would outlive a graph's capture, and each weight is cast only once.
    with torch.autocast("cuda", torch.bfloat16, normal.is_cuda, cache_enabled=False):
        out: Tensor = model(normal)
    return out.float()


def loss_of_normalised(model: nn.Module, normal: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores(model, normal), labels)


def mean_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return loss_of_normalised(model, normalised(images), labels)


def compiled_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The cached constants stay outside: compiled code would copy them from the host each time."""
    return compiled(loss_of_normalised)(model, normalised(images), labels)


def build(setup: Setup) -> Task:
    options, device, batch = setup.preset.options, setup.device, setup.preset.batch
    side, short = options["side"], options["short"]
    if batch < 2:
        raise StudyError(f"--batch {batch} leaves batch norms nothing to average; use 2 or more")
    if options["longest"] is not None:
        chosen = tuple(options[name] for name in ("classes", "train", "test"))
        classes, sets = stored(setup.data, chosen, setup.hold_out, options["longest"], device)
        counts = {part: len(images.labels) for part, images in sets.items()}
        source = from_memory(sets, setup.seed, side, short)
    else:
        tree = tree_of(setup)
        classes = len(tree.classes)
        counts = {part: len(listing) for part, listing in tree.parts.items()}
        workers = Workers(
            Crops(tree.parts, setup.seed, side, short),
            worker_count(counts["train"]),
            pinned=device.type == "cuda",
        )
        source = from_workers(workers, device)
    # Records without these options have the paper's network.
    stem, bottleneck = Stem(*options.get("stem", ())), options.get("bottleneck", True)
    model = ResNet(options["stages"], options["width"], classes, stem, bottleneck)
    model = model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def batches(epoch: int) -> Iterator[Batch]:
        generator = Generator().manual_seed(1_000_003 * setup.seed + epoch)
        return source("train", epoch, shuffled(counts["train"], batch, generator))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_loss(model, *batch)

    def evaluate(model: nn.Module, part: Split) -> dict[str, float]:
        plan = in_order(list(range(counts[part])), TEST_BATCH)
        return metrics(model, source(part, None, plan), counts[part])

    steps = len(shuffled(counts["train"], batch, Generator()))
    step = None
    if device.type == "cuda":
        full_batch_loss = compiled_loss if options.get("compile") else mean_loss
        step = GraphedStep(model, full_batch_loss, batch, rest=mean_loss)
    return Task(model, batches, loss, evaluate, steps_per_epoch=steps, step=step)


@torch.no_grad()
def metrics(model: nn.Module, batches: Iterator[Batch], count: int) -> dict[str, float]:
    """Mean loss and accuracy in percent; the host waits for the device once."""
    sums: list[Tensor] = []
    names = ["loss", "accuracy"]
    for images, labels in batches:
        out = scores(model, normalised(images))
        values = [cross_entropy(out, labels, reduction="sum"), (out.argmax(1) == labels).sum()]
        if out.shape[1] > 5:  # else top 5 is always right
            names = ["loss", "accuracy", "top5"]
            values.append((out.topk(5, 1).indices == labels[:, None]).sum())
        sums.append(torch.stack([value.double() for value in values]))
    means = (torch.stack(sums).sum(0) / count).tolist()
    return {
        name: mean if name == "loss" else 100 * mean
        for name, mean in zip(names, means, strict=True)
    }


def check_data(setup: Setup) -> None:
    optional("PIL.Image")
    longest = setup.preset.options["longest"]
    count = sum(len(listing) for listing in tree_of(setup).parts.values())
    if longest is not None and count * 3 * longest**2 > MOST_BYTES:
        raise StudyError(
            f"this preset keeps all images in memory, and {count:,} may take "
            f"{count * 3 * longest**2 / 2**30:.0f} GiB, more than {MOST_BYTES >> 30}; "
            "use fewer images, or --preset paper"
        )


# All classes, and all images of each.
WHOLE = {"stages": STAGES_50, "width": 64, "classes": None, "train": None, "test": None}
# For 64 px, where the paper's stem would leave the last stage 2x2 features.
SMALL = {
    "stages": STAGES_18,
    "bottleneck": False,
    "stem": Stem(kernel=3, stride=1),
    "compile": True,
}


def _paper() -> Preset:
    return Preset(
        epochs=90,
        batch=256,
        # 90 is in the paper's table, though a run of 90 epochs ends before it.
        schedule="tenthing:30-60-90",
        methods=PAPER_METHODS,
        decays=(2.5e-5, 1e-4),
        lrs={
            "madgrad": (5e-4, 2.5e-3),
            "sgd": (5e-2, 2.5e-1),
            "adam": (1e-4, 5e-4),
            "adagrad": (5e-3, 2.5e-2),
        },
        size="ResNet-50, 25,557,032 parameters with 1,000 classes, at 224 px",
        options={**WHOLE, "side": 224, "short": 256, "longest": None},
    )


def _gpu() -> Preset:
    madgrad = (5e-4, 2.5e-3)
    return replace(
        _paper(),
        epochs=40,
        schedule="tenthing:33%-67%",
        methods=Preset.methods,
        seeds=3,
        # A factor of 5 apart: three values then have the best one between two others.
        decays=(1e-4, 5e-4, 2.5e-3),
        own_decays={"adamw": (5e-2, 2.5e-1, 1.0)},  # it grows to the best, 2.5
        lrs={
            "madgrad": madgrad,
            "madgrad-compact": madgrad,
            "mirror-madgrad": madgrad,
            "sgd": (2.5e-2, 1e-1),
            "adam": (2.5e-4, 1e-3),
            "adagrad": (5e-3, 2.5e-2),
        },
        size="ResNet-18, 11,194,482 parameters with 50 classes, at 64 px",
        options={**WHOLE, **SMALL, "side": 64, "short": 73, "longest": 128},
    )


def _cpu() -> Preset:
    # A fourth stage would reduce 32 pixels to one, and leave batch norms 32 values to average.
    few = {"stages": (1, 1, 1), "width": 16, "classes": 10, "train": 100, "test": 30}
    return replace(
        _paper(),
        epochs=12,
        batch=32,
        schedule="tenthing:4-8",
        methods=Preset.methods,
        seeds=3,
        decays=(1e-4,),
        lrs={
            "madgrad": (1e-3, 5e-3),
            "sgd": (1e-2, 5e-2),
            "adam": (1e-3, 5e-3),
            "adagrad": (1e-2, 5e-2),
        },
        size="ResNet of 3 bottlenecks, 129,562 parameters, at 32 px, on 1,000 images",
        options={**few, "side": 32, "short": 37, "longest": 64},
    )


def problem() -> Problem:
    return Problem(
        name="imagenet",
        description="a residual network on a folder of images for each class, ImageNet's or yours",
        build=build,
        presets={"cpu": _cpu(), "gpu": _gpu(), "paper": _paper()},
        metric="accuracy",
        higher_is_better=True,
        unit="%",
        data="yours, as imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG in --data; "
        "ImageNet's own from https://image-net.org/download.php",
        beside=("top5",),
        paper="ImageNet",
        check_data=check_data,
    )
