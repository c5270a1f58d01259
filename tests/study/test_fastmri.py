"""fastMRI's loss, batches, steps and presets; whole runs on made-up slices and volumes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from killed import killed_and_resumed
from pretend_cuda import pretend_cuda
from small_mri import SMALL, small_problem, write_slices, write_volumes
from small_runs import CPU, needs_gpu, settings_of, setup_of
from torch import nn

import cubegrad
from cubegrad.study import StudyError, methods, schedules
from cubegrad.study.models.kspace import Slices, root_sum_of_squares, to_images
from cubegrad.study.models.varnet import VarNet
from cubegrad.study.problems import fastmri
from cubegrad.study.train import Place, run


@pytest.fixture(params=["slices", "volumes"])
def small(request, tmp_path):
    """The problem on small data of either kind, and its folder."""
    (write_slices if request.param == "slices" else write_volumes)(tmp_path)
    return small_problem(request.param), tmp_path


@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_similarity_is_that_of_scikit_image(scale):
    metrics = pytest.importorskip("skimage.metrics")
    generator = np.random.default_rng(0)
    targets = scale * generator.uniform(0, 1, (3, 20, 33))
    images = targets + scale * generator.normal(0, [[[0.0]], [[0.1]], [[0.5]]], targets.shape)
    peaks = scale * np.array([1.0, 0.7, 2.0])
    found = fastmri.ssim(
        *(torch.from_numpy(array).float() for array in (images, targets)), torch.tensor(peaks)
    )
    expected = [
        metrics.structural_similarity(image, target, win_size=7, data_range=peak)
        for image, target, peak in zip(images, targets, peaks, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=2e-5)
    assert expected[0] == pytest.approx(1)
    assert expected[2] < 0.9


def test_the_slope_of_similarity_is_right():
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.rand(2, 2, 9, 8, dtype=torch.float64, generator=generator)
    peaks = torch.tensor([1.0, 0.8], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: fastmri.ssim(x, targets, peaks), images.requires_grad_()
    )


class ZeroFilled(nn.Module):
    """The image of the measured lines alone; keeps its inputs."""

    def forward(self, measurement, lines, low):
        self.inputs = measurement, lines, low
        return root_sum_of_squares(to_images(measurement))


def test_the_model_sees_a_quarter_of_the_lines_and_is_judged_on_the_crop():
    kspace = torch.randn(1, 2, 20, 24, dtype=torch.complex64)
    whole = root_sum_of_squares(to_images(kspace))
    model = ZeroFilled()
    # Some volumes have targets wider than the image: both are cropped to the common part.
    target = torch.nn.functional.pad(whole[:, 5:15], (3, 3))
    fastmri.similarity(model, Slices(kspace, target, torch.ones(1)), 4)
    measurement, lines, low = model.inputs
    # Frequencies -12 … 11: -11, -7, -3, 1, 5, 9, and the centre's -2 … 1.
    assert lines.nonzero()[:, 0].tolist() == [1, 5, 9, 10, 11, 12, 13, 17, 21]
    assert low == 4
    assert torch.equal(measurement[..., lines], kspace[..., lines])
    assert not measurement[..., ~lines].any()
    perfect = fastmri.similarity(lambda *_: whole, Slices(kspace, target, torch.ones(1)), 4)
    assert perfect.tolist() == pytest.approx([1.0])


def test_batches_are_a_function_of_seed_and_epoch(small):
    def kspace(seed, epoch):
        task = fastmri.build(setup_of(*small, seed=seed))
        slices = [one for batch in task.batches(epoch) for one in batch]
        return torch.cat([one.kspace.flatten() for one in slices])

    torch.manual_seed(1)
    first = kspace(0, 1)
    torch.manual_seed(2)
    assert torch.equal(kspace(0, 1), first)
    assert not torch.equal(kspace(0, 2), first)
    assert not torch.equal(kspace(1, 1), first)


def test_an_epoch_holds_each_slice_once(small):
    task = fastmri.build(setup_of(*small))
    batches = list(task.batches(0))
    counts = [sum(len(one.peak) for one in batch) for batch in batches]
    # Twenty slices of five subjects (a sixth is for testing), or five of three volumes.
    assert counts in ([3] * 6 + [2], [3, 2])
    assert len(batches) == task.steps_per_epoch
    brightness = [one.target.sum((1, 2)) for batch in batches for one in batch]
    assert len(set(torch.cat(brightness).tolist())) == sum(counts)


def test_a_part_is_held_out(small):
    whole = fastmri.sources(setup_of(*small))
    held = fastmri.sources(setup_of(*small, hold_out=True))
    assert len(held["train"]) + len(held["valid"]) == len(whole["train"])
    assert len(held["valid"]) in (4, 2)  # the third subject's, or the first volume's
    task = fastmri.build(setup_of(*small, hold_out=True))
    assert task.evaluate(task.model, "valid") != task.evaluate(task.model, "test")


def test_the_seed_chooses_the_test_heads_where_folds_are_asked_for(tmp_path):
    write_slices(tmp_path)  # four slices of each of six heads
    problem = small_problem()

    def tested(seed, **options):
        preset = problem.presets["cpu"]
        preset = replace(preset, options={**preset.options, **options})
        parts = fastmri.sources(setup_of(replace(problem, presets={"cpu": preset}), tmp_path, seed))
        assert len(parts["train"].places) + len(parts["test"].places) == 24
        return sorted({place // 4 for place in parts["test"].places})

    assert [tested(seed) for seed in (0, 1)] == [[4], [4]]  # as in records without the option
    heads = [tested(seed, cross_validate=True) for seed in range(6)]
    assert heads == [[4], [0, 5], [1], [2], [3], [4]]
    presets = fastmri.problem().presets
    assert presets["gpu"].options["cross_validate"]
    assert "cross_validate" not in {*presets["cpu"].options, *presets["paper"].options}


def test_one_volume_cannot_be_split(tmp_path):
    write_volumes(tmp_path)
    for name in ("file1.h5", "file2.h5"):
        (tmp_path / "multicoil_train" / name).unlink()
    with pytest.raises(StudyError, match="holds one volume, and --select valid needs two"):
        fastmri.sources(setup_of(small_problem("volumes"), tmp_path, hold_out=True))


def test_a_step_is_of_the_mean_over_slices_of_any_shape(small):
    """A step of SGD with lr 1 is the gradient of the mean loss over all slices."""
    task = fastmri.build(setup_of(*small))
    for batch in list(task.batches(0))[-2:]:
        expected = task.loss(task.model, batch)
        grads = torch.autograd.grad(expected, list(task.model.parameters()))
        before = [param.detach().clone() for param in task.model.parameters()]
        loss = task.step(torch.optim.SGD(task.model.parameters(), lr=1.0), batch)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert not loss.requires_grad
        for param, old, grad in zip(task.model.parameters(), before, grads, strict=True):
            torch.testing.assert_close(param, old - grad, rtol=1e-3, atol=1e-5)


def test_evaluation_is_the_mean_over_slices(small):
    task = fastmri.build(setup_of(*small))
    found = task.evaluate(ZeroFilled(), "test")
    source = fastmri.sources(setup_of(*small))["test"]
    each = [
        fastmri.similarity(ZeroFilled(), slices, 4).item()
        for (slices,) in source.batches([[index] for index in range(len(source))])
    ]
    assert len(each) in (4, 2)
    assert found["ssim"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    assert found["loss"] == pytest.approx(1 - found["ssim"])


def test_the_presets_are_the_papers_or_its_fractions():
    problem = fastmri.problem()
    paper, gpu = problem.presets["paper"], problem.presets["gpu"]
    table = methods.PAPER[problem.paper]
    assert table.length == f"{paper.epochs} epochs" == "50 epochs"
    assert (table.batch, paper.batch) == ("8 x 1", 8)
    assert (table.schedule, table.seeds) == (paper.schedule, paper.seeds) == ("tenthing:40", 5)
    assert (fastmri.ACCELERATION, paper.options["low"], fastmri.OFFSET) == (4, 16, 1)
    assert paper.decays == gpu.decays == (0.0,)
    for method, (lr, decay, _) in table.best.items():
        low, high = paper.lrs[method]
        assert low <= lr <= high
        assert decay in paper.decays
    for preset, steps, stop in ((paper, 4343, 40 * 4343), (gpu, 228, 1459)):
        factor = schedules.parse(preset.schedule, preset.epochs, steps)
        assert (factor(0), factor(stop - 1), factor(stop)) == (1, 1, 0.1)
        assert factor(preset.epochs * steps - 1) == 0.1


@pytest.mark.training
def test_a_run_learns_and_repeats_itself(small):
    problem, data = small
    settings = settings_of(problem, epochs=12)
    record = run(problem, settings, Place(data))
    assert record.status == "finished"
    # 0.16 to 0.80 with six seeds of either kind; after 5 epochs one of them was at 0.92.
    assert record.curve["train_loss"][-1] < 0.9 * record.curve["train_loss"][0]
    assert record.curve["ssim"][-1] > record.curve["ssim"][0]
    assert set(record.curve) == {"train_loss", "loss", "ssim"}
    assert run(problem, settings, Place(data)).curve == record.curve
    assert run(problem, replace(settings, seed=1), Place(data)).curve != record.curve


@pytest.mark.training
def test_a_killed_run_ends_with_the_same_numbers(small, tmp_path):
    problem, data = small
    settings, place = settings_of(problem, epochs=2), Place(data, save_every=0)
    resumed = killed_and_resumed(problem, settings, place, tmp_path / "x.pt")
    fastmri.scans.cache_clear()
    fastmri.simulated.cache_clear()
    assert resumed.curve == run(problem, settings, place).curve


def test_a_file_that_breaks_during_a_run_is_named(tmp_path):
    write_volumes(tmp_path)
    problem = small_problem("volumes")
    task = fastmri.build(setup_of(problem, tmp_path))
    path = tmp_path / "multicoil_train" / "file1.h5"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(StudyError, match=r"file1\.h5 cannot be read"):
        list(task.batches(0))


def losses_and_weights(step, task, epochs=2):
    optimizer = cubegrad.MADGRAD(step.model.parameters(), lr=1e-3)
    losses = [
        step(optimizer, batch).item() for epoch in range(epochs) for batch in task.batches(epoch)
    ]
    return losses, [param.detach().clone() for param in step.model.parameters()]


def graphed_and_plain(tmp_path, device, monkeypatch=None):
    write_slices(tmp_path)
    problem = small_problem()
    task = fastmri.build(setup_of(problem, tmp_path, device=device))
    torch.manual_seed(0)
    models = [VarNet(*SMALL["network"]).to(device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [fastmri.Step(models[0], 4, graphed=3), fastmri.Step(models[1], 4)]
    captures = pretend_cuda(monkeypatch, models[0]) if monkeypatch else None
    return [losses_and_weights(step, task) for step in steps], captures


def test_a_graphed_step_is_a_plain_one(tmp_path, monkeypatch):
    """The last batch of an epoch is smaller, so it is a plain step between two replays."""
    ((losses, params), (expected, others)), captures = graphed_and_plain(tmp_path, CPU, monkeypatch)
    assert len(captures) == 1
    assert losses == pytest.approx(expected, rel=1e-5)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-6)


@needs_gpu
def test_a_graphed_step_is_a_plain_one_on_a_gpu(tmp_path):
    ((losses, params), (expected, others)), _ = graphed_and_plain(tmp_path, torch.device("cuda"))
    # The two may use different kernels, in TF32.
    assert losses == pytest.approx(expected, rel=5e-3)
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-2, atol=5e-3)


@needs_gpu
def test_a_run_on_a_gpu_learns(tmp_path):
    write_slices(tmp_path)
    problem = small_problem()
    preset = problem.presets["cpu"]
    preset = replace(preset, options={**preset.options, "mixed": True, "graph": True})
    problem = replace(problem, presets={"cpu": preset})
    record = run(problem, settings_of(problem, epochs=5, device="cuda"), Place(tmp_path))
    assert record.status == "finished"
    assert record.curve["train_loss"][-1] < 0.9 * record.curve["train_loss"][0]
