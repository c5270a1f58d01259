"""ImageNet's batches, evaluation and presets; whole runs on made-up images."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from command_line import refused
from killed import killed_and_resumed
from small_cifar import FirstValues
from small_images import small_problem, write_images
from small_runs import CPU, settings_of, setup_of
from torch import Generator
from torch.utils._python_dispatch import TorchDispatchMode

from cubegrad.study import Setup, StudyError, cli, methods, schedules
from cubegrad.study.data import decoding, image_batches
from cubegrad.study.data.decoding import Batch
from cubegrad.study.problems import imagenet
from cubegrad.study.train import Place, run

WORKERS, MEMORY = {"longest": None}, {"longest": 64}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "imagenet").parent


def test_memory_and_workers_give_the_same_crops(images):
    """Except for Pillow's rounding to bytes after each axis."""
    tasks = [
        imagenet.build(setup_of(small_problem(**options), images, seed=3))
        for options in (MEMORY, WORKERS)
    ]
    assert tasks[0].steps_per_epoch == tasks[1].steps_per_epoch == 4  # 60 images in batches of 16
    for one, other in zip(*(task.batches(2) for task in tasks), strict=True):
        assert one.labels.tolist() == other.labels.tolist()
        assert one.images.shape == other.images.shape
        assert (one.images - other.images.float()).abs().max() <= 1.01
    first, second = (task.evaluate(tasks[0].model.eval(), "test") for task in tasks)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-2)


@pytest.mark.parametrize("options", [MEMORY, WORKERS])
def test_batches_are_a_function_of_seed_and_epoch(images, options):
    def epoch(seed, number):
        task = imagenet.build(setup_of(small_problem(**options), images, seed=seed))
        return torch.cat([batch.images for batch in task.batches(number)])

    torch.manual_seed(1)
    first = epoch(0, 1)
    torch.manual_seed(2)
    assert torch.equal(epoch(0, 1), first)
    assert not torch.equal(epoch(0, 2), first)
    assert not torch.equal(epoch(1, 1), first)


def test_an_epoch_holds_each_image_once_and_no_batch_has_one():
    plan = image_batches.shuffled(50, 16, Generator().manual_seed(0))
    assert [len(batch) for batch in plan] == [16, 16, 16, 2]
    assert sorted(chain(*plan)) == list(range(50))
    assert [*chain(*plan)] != list(range(50))
    plans = [image_batches.shuffled(49, 16, Generator().manual_seed(seed)) for seed in range(9)]
    assert {len(plan) for plan in plans} == {3}
    left_out = {(set(range(49)) - set(chain(*plan))).pop() for plan in plans}
    assert len(left_out) > 1  # another one each time


def test_images_are_normalised_as_the_paper_says():
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    images[1] = 255
    model = FirstValues(2)
    imagenet.mean_loss(model, images, torch.zeros(2, dtype=torch.long))
    assert model.images.is_contiguous(memory_format=torch.channels_last)
    means, deviations = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for channel, (mean, deviation) in enumerate(zip(means, deviations, strict=True)):
        assert model.images[0, channel].unique().item() == pytest.approx(-mean / deviation)
        assert model.images[1, channel].unique().item() == pytest.approx((1 - mean) / deviation)


@pytest.mark.parametrize("classes", [3, 7])
def test_evaluation_by_hand(classes):
    places = torch.arange(classes)
    images = torch.zeros(classes, 3, 8, 8)
    # Image i scores most for class i; of the others, a later class scores a little more.
    images[:, 0, 0, :classes] = places / 10.0
    images[places, 0, 0, places] = 255
    labels = places.clone()
    labels[0] = 1  # scores lowest in image 0, so of seven classes it is not in the top 5
    batches = [Batch(images[:2], labels[:2]), Batch(images[2:], labels[2:])]
    judged = imagenet.metrics(FirstValues(classes), iter(batches), classes)
    assert judged["accuracy"] == pytest.approx(100 * (classes - 1) / classes)
    assert judged.get("top5") == (pytest.approx(600 / 7) if classes == 7 else None)
    scores = (images[:, 0, 0, :classes].double() / 255 - 0.485) / 0.229
    expected = -scores.log_softmax(1)[places, labels].mean()
    assert judged["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_part_is_held_out(images):
    held = imagenet.build(setup_of(small_problem(**MEMORY), images, hold_out=True))
    assert sum(len(batch.labels) for batch in held.batches(0)) == 54  # 18 of 20 of each class
    held.model.eval()
    assert held.evaluate(held.model, "valid") != held.evaluate(held.model, "test")


def test_the_presets_are_the_papers_or_its_thirds():
    problem = imagenet.problem()
    paper, gpu, cpu = (problem.presets[name] for name in ("paper", "gpu", "cpu"))
    table = methods.PAPER[problem.paper]
    assert table.length == f"{paper.epochs} epochs" == "90 epochs"
    assert table.batch == "8 x 32"
    assert paper.batch == 8 * 32
    assert (
        (table.schedule, table.seeds)
        == (paper.schedule, paper.seeds)
        == (
            "tenthing:30-60-90",
            5,
        )
    )
    assert paper.options == {
        "stages": (3, 4, 6, 3),
        "width": 64,
        "side": 224,
        "short": 256,
        "classes": None,
        "train": None,
        "test": None,
        "longest": None,  # decoded in workers, not kept in memory
    }
    assert schedules.parse(gpu.schedule, gpu.epochs, 98)(40 * 98 // 3) == 0.1
    for preset, third in ((paper, 30), (replace(gpu, epochs=100), 33), (cpu, 4)):
        factor = schedules.parse(preset.schedule, preset.epochs, 100)
        steps = (0, third * 100 - 1, third * 100, 2 * third * 100 + 100, 3 * third * 100 - 1)
        assert [factor(step) for step in steps] == [1, 1, 0.1, 0.01, 0.01]
    for method, (lr, decay, _) in table.best.items():
        low, high = paper.lrs[method]
        assert low <= lr <= high
        assert decay in paper.decays
    options = json.loads(json.dumps(dict(gpu.options)))
    assert (options["stages"], options["stem"]) == ([2, 2, 2, 2], [3, 1, True])


@pytest.mark.parametrize(
    ("name", "classes", "parameters"), [("cpu", 10, 129_562), ("gpu", 50, 11_194_482)]
)
def test_the_nets_have_the_documented_sizes(images, name, classes, parameters):
    """`images` have 3 classes, and the classifier 512 or 256 inputs."""
    preset = imagenet.problem().presets[name]
    model = imagenet.build(Setup(preset, 0, CPU, images)).model
    missing = (classes - 3) * (model.classifier.in_features + 1)
    assert sum(param.numel() for param in model.parameters()) + missing == parameters
    assert f"{parameters:,} parameters" in preset.size


class Operations(TorchDispatchMode):
    """Notes the names of what torch computes, but not of views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "view" not in function.overloadpacket.__name__ and not function.is_view:
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_batch_from_memory_is_made_in_few_kernels_without_the_host(images):
    """On a GPU each is a launch, in an epoch whose numbers are all on the device."""
    task = imagenet.build(setup_of(small_problem(**MEMORY), images))
    batches = task.batches(0)
    assert next(batches).images.is_floating_point()
    with Operations() as operations:
        next(batches)
    assert len(operations.names) <= 60  # 52 with torch 2.13
    assert operations.names.count("index") == 5  # images, labels, boxes, bounds, mirrored
    assert operations.names.count("_to_copy") == 1  # the bytes of the batch to floats
    assert not {"_local_scalar_dense", "nonzero", "lift_fresh"} & set(operations.names)


@pytest.mark.training
@pytest.mark.parametrize("options", [MEMORY, WORKERS])
def test_a_run_learns_and_repeats_itself(images, options):
    problem = small_problem(**options)
    settings, place = settings_of(problem, epochs=5), Place(images)
    record = run(problem, settings, place)
    assert record.status == "finished"
    assert record.curve["accuracy"][-1] > 80  # a third by chance
    assert set(record.curve) == {"train_loss", "loss", "accuracy"}
    assert run(problem, settings, place).curve == record.curve
    assert run(problem, replace(settings, seed=1), place).curve != record.curve


@pytest.mark.training
@pytest.mark.parametrize("options", [MEMORY, WORKERS])
def test_a_killed_run_ends_with_the_same_numbers(images, tmp_path, options):
    problem = small_problem(**options)
    settings, place = settings_of(problem), Place(images, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, tmp_path / "x.pt")
    assert len(resumed.curve["accuracy"]) == 3
    assert resumed.curve == run(problem, settings, place).curve


@pytest.mark.processes
@pytest.mark.parametrize("options", [MEMORY, WORKERS])
def test_worker_processes_change_no_number(images, monkeypatch, options):
    problem = small_problem(**options)
    settings, place = settings_of(problem, epochs=2), Place(images)
    alone = run(problem, settings, place)
    imagenet.stored.cache_clear()
    counts = []

    def always(count):
        counts.append(count)
        return 1

    for module in (decoding, imagenet):
        monkeypatch.setattr(module, "worker_count", always)
    assert run(problem, settings, place).curve == alone.curve
    assert counts


def test_unusable_data_is_reported_in_one_line(tmp_path, capsys):
    words = f"train imagenet --epochs 1 --out {tmp_path / 'runs'} --data"
    assert "there is no folder of images" in refused(f"{words} {tmp_path / 'nowhere'}", capsys)
    assert not (tmp_path / "runs").exists()  # no run had started
    write_images(tmp_path / "imagenet", train=3, val=2)
    damaged = tmp_path / "imagenet" / "val" / "red" / "001.JPEG"
    damaged.write_bytes(damaged.read_bytes()[:-200])
    message = refused(f"{words} {tmp_path}", capsys)
    assert f"{damaged} cannot be decoded (image file is truncated" in message
    damaged.unlink()
    assert cli.main(f"{words} {tmp_path}".split()) == 0
    assert "imagenet, madgrad, lr 0.001, decay 2.5e-05" in capsys.readouterr().out
    (tmp_path / "imagenet" / "val" / "red").rename(tmp_path / "imagenet" / "val" / "rot")
    assert "has no folder 'red'" in refused(f"{words} {tmp_path}", capsys)


def test_too_many_images_for_memory_are_refused(images, monkeypatch):
    problem = small_problem(longest=128)
    imagenet.check_data(setup_of(problem, images))
    monkeypatch.setattr(imagenet, "MOST_BYTES", 2**21)
    with pytest.raises(StudyError, match=r"78 may take .* use fewer images, or --preset paper"):
        imagenet.check_data(setup_of(problem, images))
    imagenet.check_data(setup_of(small_problem(**WORKERS), images))


def test_a_batch_of_one_is_refused(images):
    problem = small_problem(**MEMORY)
    preset = replace(problem.presets["cpu"], batch=1)
    with pytest.raises(StudyError, match=r"--batch 1 .* use 2 or more"):
        imagenet.build(Setup(preset, 0, CPU, images))
