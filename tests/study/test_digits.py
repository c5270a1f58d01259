"""The problem whose data comes with scikit-learn: its split, its net, and that it learns."""

import torch
from small_runs import settings_of, setup_of

from cubegrad.study.problems.digits import parts, problem
from cubegrad.study.train import Place, run


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


def test_parts_are_disjoint_and_have_the_same_shares_of_each_class() -> None:
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


def test_the_net_has_the_documented_size() -> None:
    task = problem().build(setup_of(problem()))
    assert sum(param.numel() for param in task.model.parameters()) == 6090
    assert "6,090 parameters" in problem().presets["cpu"].size
    assert task.steps_per_epoch == len(list(task.batches(0))) == 20


def test_an_epoch_is_a_shuffle_that_repeats_itself() -> None:
    task = problem().build(setup_of(problem(), seed=3))
    first, again, next_one = (
        torch.cat([labels for _, labels in task.batches(epoch)]) for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, next_one)
    assert torch.equal(first.sort().values, next_one.sort().values)


def test_it_learns() -> None:
    record = run(problem(), settings_of(problem(), epochs=4), Place())
    accuracies = record.curve["accuracy"]
    assert len(accuracies) == 4
    assert accuracies[-1] is not None
    assert accuracies[-1] > 85
