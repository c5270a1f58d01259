"""Accelerated MR reconstruction with an end-to-end VarNet, as in the paper's section on fastMRI.

Preset `paper` reads fastMRI's k-space; the others simulate k-space from real MR slices. On a GPU
with `graph`, a batch's loss and gradients are one CUDA graph.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.optim import Optimizer

from cubegrad.study.data import fastmri as data
from cubegrad.study.data import mr_slices
from cubegrad.study.graphs import Captured
from cubegrad.study.models.kspace import Slices, centre_crop, measured
from cubegrad.study.models.varnet import VarNet
from cubegrad.study.problem import PAPER_METHODS, Preset, Problem, Setup, Split, StudyError, Task

ACCELERATION = 4
OFFSET = 1
WINDOW = 7
HELD_OUT = 10  # with --select valid, every tenth of fastMRI's training volumes
# VarNet's arguments, the number of central lines measured and, on a GPU, whether the U-Nets run in
# bfloat16 and a step is one CUDA graph. Do not compile the U-Nets until torch has fixed a race in
# the code for their gradients: runs at `gpu` went wrong with it (docs/problems/fastmri.md).
NETWORKS: dict[str, dict[str, Any]] = {
    "paper": {"network": (12, 18, 4, 8, 4), "low": 16, "mixed": False, "graph": False},
    "gpu": {"network": (6, 16, 4, 8, 3), "low": 8, "mixed": True, "graph": True},
    "cpu": {"network": (2, 8, 2, 4, 2), "low": 4, "mixed": False, "graph": False},
}
LRS = {
    "paper": {
        "madgrad": (5e-3, 2.5e-2),
        "sgd": (5e-3, 2.5e-2),
        "adam": (1e-4, 5e-4),
        "adagrad": (1e-1, 5e-1),
    },
    "gpu": {
        "madgrad": (2.5e-2, 1e-1),
        "madgrad-compact": (2.5e-2, 1e-1),
        "mirror-madgrad": (2.5e-2, 1e-1),
        "sgd": (5e-2, 2.5e-1),
        "adam": (1e-3, 5e-3),
        "adagrad": (1e-2, 5e-2),
    },
    "cpu": {
        "madgrad": (5e-3, 2.5e-2),
        "sgd": (1e-1, 5e-1),
        "adam": (2.5e-3, 1e-2),
        "adagrad": (2.5e-2, 1e-1),
    },
}

Batch = list[Slices]  # each entry holds slices of one shape


class Source(Protocol):
    def __len__(self) -> int: ...

    def batches(self, wanted: list[list[int]]) -> Iterator[Batch]: ...


def ssim(images: Tensor, targets: Tensor, peaks: Tensor) -> Tensor:
    """Structural similarity of each pair of images, over every window of 7x7."""
    x = (images / peaks[:, None, None])[:, None]
    y = (targets / peaks[:, None, None])[:, None]
    moments = torch.cat([x, y, x * x, y * y, x * y], 1)
    mean_x, mean_y, xx, yy, xy = avg_pool2d(moments, WINDOW, 1).unbind(1)
    unbiased = WINDOW**2 / (WINDOW**2 - 1)
    luminance, contrast = 0.01**2, 0.03**2
    covariance = unbiased * (xy - mean_x * mean_y)
    variances = unbiased * (xx - mean_x**2 + yy - mean_y**2)
    similar = (2 * mean_x * mean_y + luminance) / (mean_x**2 + mean_y**2 + luminance)
    return (similar * (2 * covariance + contrast) / (variances + contrast)).mean((1, 2))


def similarity(model: Callable[..., Tensor], slices: Slices, low: int) -> Tensor:
    """SSIM of each slice, reconstructed from a quarter of its lines."""
    kspace, target, peak = slices
    lines = measured(kspace.shape[-1], low, ACCELERATION, OFFSET, kspace.device)
    image = model(kspace * lines, lines, low)
    height, width = (min(sides) for sides in zip(image.shape[1:], target.shape[1:], strict=True))
    return ssim(centre_crop(image, height, width), centre_crop(target, height, width), peak)


class Step:
    """`Task.step`: gradients are summed over the batch's shapes before the optimizer steps."""

    def __init__(self, model: nn.Module, low: int, graphed: int = 0) -> None:
        self.model = model
        self.low = low
        self.graphed = graphed  # batches of this size run as a CUDA graph; 0: none do
        self.captured: Captured | None = None

    def __call__(self, optimizer: Optimizer, batch: Batch) -> Tensor:
        if len(batch) == 1 and len(batch[0].peak) == self.graphed:
            if self.captured is None:
                self.captured = Captured(self.model, self._mean_loss, batch[0])
            loss = self.captured.replay(batch[0])
        else:
            optimizer.zero_grad()
            loss = torch.stack([self._backward(one, batch) for one in batch]).sum()
        optimizer.step()
        return loss

    def _mean_loss(self, model: nn.Module, *slices: Tensor) -> Tensor:
        return (1 - similarity(model, Slices(*slices), self.low)).mean()

    def _backward(self, slices: Slices, batch: Batch) -> Tensor:
        count = sum(len(one.peak) for one in batch)
        loss = (1 - similarity(self.model, slices, self.low)).sum() / count
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@lru_cache(maxsize=1)
def scans(folder: Path, hold_out: bool, device: torch.device) -> dict[str, Source]:
    """fastMRI's volumes; with `hold_out` every tenth training volume is for validation."""
    train, test = data.volumes(folder, "train"), data.volumes(folder, "test")
    if not hold_out:
        return {"train": data.Scans(train, device), "test": data.Scans(test, device)}
    if len(train) < 2:
        raise StudyError(
            f"{folder / data.FOLDERS['train']} holds one volume, and --select valid needs two"
        )
    valid = train[::HELD_OUT]
    kept = [volume for volume in train if volume not in valid]
    parts = {"train": kept, "valid": valid, "test": test}
    return {part: data.Scans(some, device) for part, some in parts.items()}


@lru_cache(maxsize=1)
def simulated(
    folder: Path, hold_out: bool, device: torch.device, sizes: tuple[int, int, int, int], fold: int
) -> dict[str, Source]:
    """Shrunk slices on the device; `sizes`: most for training, most for the test, shrink, coils."""
    train, test, shrink, coils = sizes
    stored = mr_slices.load(folder)
    return {
        part: mr_slices.Simulated(
            stored,
            mr_slices.evenly_spaced(places, train if part == "train" else test),
            shrink,
            coils,
            device,
        )
        for part, places in mr_slices.split(stored.volumes, hold_out, fold).items()
        if places
    }


def sources(setup: Setup) -> dict[str, Source]:
    options = setup.preset.options
    if options["data"] == "fastmri":
        return scans(setup.data, setup.hold_out, setup.device)
    sizes = (options["train"], options["test"], options["shrink"], options["coils"])
    # By the seed, so that all methods have the same test heads with a seed. Records without this
    # option are of the first fold.
    fold = setup.seed % mr_slices.FOLDS if options.get("cross_validate") else 0
    return simulated(setup.data, setup.hold_out, setup.device, sizes, fold)


def build(setup: Setup) -> Task:
    options = setup.preset.options
    parts, low, batch = sources(setup), options["low"], setup.preset.batch
    train = parts["train"]
    mixed = options["mixed"] and setup.device.type == "cuda"
    model = VarNet(*options["network"], mixed=mixed).to(setup.device)

    def batches(epoch: int) -> Iterator[Batch]:
        generator = Generator().manual_seed(1_000_003 * setup.seed + epoch)
        order = torch.randperm(len(train), generator=generator)
        return train.batches([some.tolist() for some in torch.split(order, batch)])

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return 1 - torch.cat([similarity(model, one, low) for one in batch]).mean()

    def evaluate(model: nn.Module, part: Split) -> dict[str, float]:
        return metrics(model, parts[part], low, options["judged_at_once"])

    graphed = batch if options["graph"] and setup.device.type == "cuda" else 0
    step = Step(model, low, graphed)
    steps = -(-len(train) // batch)
    return Task(model, batches, loss, evaluate, steps_per_epoch=steps, step=step)


@torch.no_grad()
def metrics(model: nn.Module, source: Source, low: int, at_once: int) -> dict[str, float]:
    """Mean SSIM over the slices, and 1 - SSIM; the host waits for the device once."""
    order = torch.split(torch.arange(len(source)), at_once)
    total = torch.stack(
        [
            similarity(model, slices, low).double().sum()
            for batch in source.batches([some.tolist() for some in order])
            for slices in batch
        ]
    )
    mean = total.sum().item() / len(source)
    return {"loss": 1 - mean, "ssim": mean}


def check_data(setup: Setup) -> None:
    options = setup.preset.options
    if options["data"] == "fastmri":
        for part in data.FOLDERS:
            data.volumes(setup.data, part)
        return
    stored = mr_slices.load(setup.data)
    pools = options["network"][2]
    mr_slices.check(setup.data, stored, options["shrink"], max(2 << pools, WINDOW))


def problem() -> Problem:
    paper = Preset(
        epochs=50,
        batch=8,  # the paper has 8 GPUs with one slice each
        schedule="tenthing:40",
        methods=PAPER_METHODS,
        lrs=LRS["paper"],
        size="VarNet of 12 cascades, 12,931,532 parameters",
        options={"data": "fastmri", "judged_at_once": 8, **NETWORKS["paper"]},
    )
    slices = {"data": "slices", "judged_at_once": 32}
    everything = {"train": 1_000_000, "test": 1_000_000, "cross_validate": True}
    gpu = replace(
        paper,
        epochs=8,
        schedule="tenthing:80%",
        methods=Preset.methods,
        seeds=3,
        lrs=LRS["gpu"],
        size="VarNet of 6 cascades, 5,079,610 parameters",
        options={**slices, **everything, "shrink": 2, "coils": 6, **NETWORKS["gpu"]},
    )
    some = {"train": 120, "test": 40}
    cpu = replace(
        gpu,
        epochs=5,
        batch=4,
        lrs=LRS["cpu"],
        size="VarNet of 2 cascades, 30,576 parameters, on 120 slices",
        options={**slices, **some, "shrink": 8, "coils": 4, **NETWORKS["cpu"]},
    )
    return Problem(
        name="fastmri",
        description="VarNet reconstructs MR images from a quarter of the lines of k-space",
        build=build,
        presets={"cpu": cpu, "gpu": gpu, "paper": paper},
        metric="ssim",
        higher_is_better=True,
        data=f"fastMRI's multi-coil volumes ({data.URL}) at paper, else slices in mr-slices/",
        paper="fastMRI",
        check_data=check_data,
    )
