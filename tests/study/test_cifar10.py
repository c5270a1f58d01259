"""CIFAR-10's crops, evaluation and presets; whole runs on made-up images."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed import killed_and_resumed
from small_cifar import FirstValues, channels_last
from small_runs import CPU, settings_of, setup_of

from cubegrad.study import Setup, StudyError, methods, schedules
from cubegrad.study.data.cifar10 import Images
from cubegrad.study.problems import cifar10
from cubegrad.study.train import Place, run


def test_an_epoch_holds_each_image_once_cropped_and_perhaps_mirrored():
    train = channels_last(40)
    batches = list(cifar10.augmented(train, 16, torch.Generator().manual_seed(3)))
    assert [len(batch.labels) for batch in batches] == [16, 16, 8]
    labels = torch.cat([batch.labels for batch in batches])
    assert sorted(labels.tolist()) == list(range(40))
    assert labels.tolist() != list(range(40))
    padded = torch.zeros(40, 40, 40, 3, dtype=torch.uint8)
    padded[:, 4:36, 4:36] = train.images
    seen = set()
    for image, label in zip(torch.cat([b.images for b in batches]), labels, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if torch.equal(
                image.flip(1) if mirrored else image,
                padded[label, top : top + 32, left : left + 32],
            )
        ]
        assert len(found) == 1
        seen.update(found)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_the_size_of_the_chunks_makes_no_difference(monkeypatch):
    train = channels_last(40)
    whole = list(cifar10.augmented(train, 8, torch.Generator().manual_seed(3)))
    monkeypatch.setattr(cifar10, "CROPPED_AT_ONCE", 19)  # two batches
    pieces = list(cifar10.augmented(train, 8, torch.Generator().manual_seed(3)))
    assert len(whole) == len(pieces) == 5
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_batches_are_a_function_of_seed_and_epoch(small_cifar10):
    def images(seed, epoch):
        task = cifar10.build(setup_of(small_cifar10, seed=seed))
        return torch.cat([batch.images for batch in task.batches(epoch)])

    torch.manual_seed(1)
    first = images(0, 1)
    torch.manual_seed(2)
    assert torch.equal(images(0, 1), first)
    assert not torch.equal(images(0, 2), first)
    assert not torch.equal(images(1, 1), first)


def test_a_shift_or_mirror_is_as_likely_as_any_other():
    count = 8100
    images = torch.zeros(count, 32, 32, 3, dtype=torch.uint8)
    images[:, 10, 6] = 255  # one dot, whose place shows the shift and the mirroring
    train = Images(images, torch.zeros(count, dtype=torch.long))
    (batch,) = cifar10.augmented(train, count, torch.Generator().manual_seed(0))
    rows, columns = batch.images[..., 0].nonzero()[:, 1:].unbind(1)
    assert rows.bincount(minlength=32)[6:15].sum() == count
    kept = columns < 16
    assert abs(kept.sum().item() - count / 2) < 5 * (count / 4) ** 0.5
    for landed in (rows - 6, torch.where(kept, columns - 2, columns - 21)):
        expected = count / 9
        counts = landed.bincount(minlength=9)
        assert len(counts) == 9
        assert (counts - expected).abs().max() < 5 * expected**0.5


def test_images_are_centred_at_a_half():
    images = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    images[1, 5, 6, 2] = 255
    model = FirstValues()
    cifar10.scores(model, images)
    assert model.images.shape == (2, 3, 32, 32)
    assert model.images.is_contiguous(memory_format=torch.channels_last)
    assert model.images[1, 2, 5, 6] == 0.5
    assert model.images.sum() == -0.5 * 2 * 3072 + 1


def test_evaluation_by_hand(monkeypatch):
    monkeypatch.setattr(cifar10, "TEST_BATCH", 3)
    images = torch.zeros(7, 32, 32, 3, dtype=torch.uint8)
    images[torch.arange(7), 0, torch.arange(7), 0] = 255  # image i scores 1 more for class i
    labels = torch.tensor([0, 1, 2, 3, 9, 9, 9])
    model = FirstValues().train()
    judged = cifar10.metrics(model, Images(images, labels))
    assert model.training
    assert not model.was_training
    rest = torch.tensor(9 + torch.e).log()
    assert judged["accuracy"] == pytest.approx(400 / 7)
    assert judged["loss"] == pytest.approx((4 * (rest - 1) + 3 * rest).item() / 7, rel=1e-6)


def test_a_part_is_held_out(small_cifar10):
    whole = cifar10.parts(Path("x"), False, False, (70, 25), CPU)
    assert {part: len(images.labels) for part, images in whole.items()} == {"train": 70, "test": 25}
    held = cifar10.parts(Path("x"), False, True, (70, 25), CPU)
    counts = {part: len(images.labels) for part, images in held.items()}
    assert counts == {"train": 63, "valid": 7, "test": 25}
    together = torch.cat([held["train"].images, held["valid"].images])
    assert torch.equal(together, whole["train"].images)
    assert torch.equal(held["test"].images, whole["test"].images)
    task = cifar10.build(setup_of(small_cifar10, hold_out=True))
    assert task.steps_per_epoch == 4 == len(list(task.batches(0)))
    assert task.evaluate(task.model, "valid") != task.evaluate(task.model, "test")


def test_the_presets_are_the_papers_or_its_fractions():
    problem = cifar10.problem()
    paper, gpu = problem.presets["paper"], problem.presets["gpu"]
    table = methods.PAPER[problem.paper]
    assert table.length == f"{paper.epochs} epochs" == "300 epochs"
    assert table.batch == str(paper.batch) == str(gpu.batch)
    assert (
        (table.schedule, table.seeds) == (paper.schedule, paper.seeds) == ("tenthing:150-225", 10)
    )
    assert gpu.epochs == 36
    steps = 391
    for preset, stops in ((paper, (150, 225)), (gpu, (18, 27))):
        factor = schedules.parse(preset.schedule, preset.epochs, steps)
        for tenths, stop in enumerate(stops):
            assert factor(stop * steps - 1) == 10.0**-tenths
            assert factor(stop * steps) == 10.0 ** -(tenths + 1)
        assert (preset.options["train"], preset.options["test"]) == (50_000, 10_000)
    for preset in (paper, gpu):
        for method, (lr, decay, _) in table.best.items():
            low, high = preset.lrs[method]
            assert low <= lr <= high
            assert decay in preset.decays
    assert json.loads(json.dumps(dict(gpu.options)))["stages"] == [2, 2, 2, 2]


def test_missing_data_is_reported_before_any_run(tmp_path):
    problem = cifar10.problem()
    with pytest.raises(StudyError, match="CIFAR-10 is not in"):
        problem.check_data(Setup(problem.presets["gpu"], 0, CPU, tmp_path))


@pytest.mark.training
def test_a_run_learns_and_repeats_itself(small_cifar10):
    settings = settings_of(small_cifar10, epochs=6)
    record = run(small_cifar10, settings, Place())
    assert record.status == "finished"
    assert record.curve["train_loss"][-1] < 0.9 * record.curve["train_loss"][0]
    assert set(record.curve) == {"train_loss", "loss", "accuracy"}
    assert len(record.curve["accuracy"]) == 6
    assert run(small_cifar10, settings, Place()).curve == record.curve
    assert run(small_cifar10, replace(settings, seed=1), Place()).curve != record.curve


@pytest.mark.training
def test_a_killed_run_ends_with_the_same_numbers(small_cifar10, tmp_path):
    settings, place = settings_of(small_cifar10), Place(save_every=0)
    resumed = killed_and_resumed(small_cifar10, settings, place, tmp_path / "x.pt", after=2)
    assert resumed.curve == run(small_cifar10, settings, place).curve
