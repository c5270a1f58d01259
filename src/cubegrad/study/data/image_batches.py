"""Batches of crops of photographs: cropped on the device from memory, or in worker processes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Generator

from cubegrad.study.data import crops
from cubegrad.study.data.decoding import Batch, Request, Stored, Workers
from cubegrad.study.problem import Split

Source = Callable[[Split, int | None, list[list[int]]], Iterator[Batch]]
"""(part, epoch, indices by batch) -> batches: random crops of that epoch; None: the middles."""


def from_memory(sets: dict[Split, Stored], seed: int, side: int, short: int) -> Source:
    """Crop on the device, with the same random numbers that a worker would draw."""

    def batches(part: Split, epoch: int | None, plan: list[list[int]]) -> Iterator[Batch]:
        images, sizes, labels = sets[part]
        device = images.device
        if epoch is None:
            boxes = crops.middle_boxes(sizes, short, side)
            bounds = np.concatenate([np.zeros_like(sizes), sizes], 1)
            mirrored = np.zeros(len(sizes), dtype=bool)
        else:
            uniform = crops.draws(seed, epoch, 0, len(sizes))
            boxes, mirrored = crops.random_boxes(sizes, uniform)
            bounds = boxes
        on_device = [
            torch.from_numpy(array).to(device, dtype)
            for array, dtype in (
                (boxes, torch.float32),
                (bounds, torch.float32),
                (mirrored, torch.bool),
            )
        ]
        order = torch.tensor([index for indices in plan for index in indices], device=device)
        for index in torch.split(order, [len(indices) for indices in plan]):
            box, bound, mirror = (values[index] for values in on_device)
            yield Batch(crops.resample(images[index], box, bound, mirror, side), labels[index])

    return batches


def from_workers(workers: Workers, device: torch.device) -> Source:
    def batches(part: Split, epoch: int | None, plan: list[list[int]]) -> Iterator[Batch]:
        for images, labels in workers.answers(Request(part, some, epoch) for some in plan):
            yield Batch(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))

    return batches


def shuffled(count: int, batch: int, generator: Generator) -> list[list[int]]:
    """An epoch's batches. The last may be smaller, but a single image is dropped.

    It may leave a batch norm one value per channel, whose variance is undefined.
    """
    order = torch.randperm(count, generator=generator).tolist()
    if count % batch == 1:
        order.pop()
    return in_order(order, batch)


def in_order(order: list[int], batch: int) -> list[list[int]]:
    return [order[start : start + batch] for start in range(0, len(order), batch)]
