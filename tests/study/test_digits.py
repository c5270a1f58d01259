"""The embedded problem: its split, its net, and that it learns."""

from pathlib import Path

import torch

from cubegrad.study.problem import Setup
from cubegrad.study.problems.digits import parts, problem
from cubegrad.study.records import Settings
from cubegrad.study.train import Place, run

CPU = problem().presets["cpu"]


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_parts_are_disjoint_and_hold_every_class_alike() -> None:
    whole, held = parts(hold_out=False), parts(hold_out=True)
    sizes = {name: len(labels) for name, (_, labels) in held.items()}
    assert {name: len(labels) for name, (_, labels) in whole.items()} == {
        "train": 1258,
        "test": 539,
    }
    assert sizes == {"train": 1008, "valid": 250, "test": 539}
    images = {name: rows(images) for name, (images, _) in held.items()}
    assert not images["train"] & images["valid"]
    assert not images["train"] & images["test"]
    assert images["train"] | images["valid"] == rows(whole["train"][0])
    assert torch.equal(whole["test"][0], held["test"][0])
    for _, labels in whole.values():
        shares = labels.bincount(minlength=10) / len(labels)
        assert shares.min() > 0.09
        assert shares.max() < 0.11


def test_the_net_has_the_size_that_is_told() -> None:
    task = problem().build(Setup(CPU, 0, torch.device("cpu"), Path()))
    assert sum(param.numel() for param in task.model.parameters()) == 6090
    assert "6,090 parameters" in CPU.size
    assert task.steps_per_epoch == len(list(task.batches(0))) == 20


def test_an_epoch_is_a_shuffle_that_can_be_asked_for_again() -> None:
    task = problem().build(Setup(CPU, 3, torch.device("cpu"), Path()))
    first, again, next_one = (
        torch.cat([labels for _, labels in task.batches(epoch)]) for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, next_one)
    assert torch.equal(first.sort().values, next_one.sort().values)


def test_it_learns() -> None:
    settings = Settings("digits", "cpu", 4, 64, "madgrad", "flat", 0.01, 0.0, 0)
    record = run(problem(), settings, Place())
    accuracies = record.curve["accuracy"]
    assert len(accuracies) == 4
    assert accuracies[-1] is not None
    assert accuracies[-1] > 85
