"""fastMRI's step on a GPU: U-Nets in bfloat16 in a CUDA graph, beside the plain step."""

import copy
from dataclasses import replace

import pytest
import torch
from small_mri import discs, small_problem, write_slices
from small_runs import needs_gpu, settings_of, setup_of

import cubegrad
from cubegrad.study import Setup
from cubegrad.study.models.kspace import Slices
from cubegrad.study.problems import fastmri
from cubegrad.study.train import Place, run

pytestmark = needs_gpu


def problem_with(**options):
    """Three cascades with U-Nets of two poolings."""
    problem = small_problem()
    preset = problem.presets["cpu"]
    network = {"network": (3, 8, 2, 4, 1)}
    preset = replace(preset, options={**preset.options, **network, **options})
    return replace(problem, presets={"cpu": preset})


FAST = problem_with(mixed=True, graph=True)


def task_of(problem, folder):
    torch.manual_seed(0)
    return fastmri.build(setup_of(problem, folder, device=torch.device("cuda")))


def loss_and_gradients(task, batch):
    still = torch.optim.SGD(task.model.parameters(), lr=0.0)
    loss = task.step(still, batch)
    return loss.item(), torch.cat([param.grad.flatten() for param in task.model.parameters()])


def test_the_graphed_step_has_the_loss_and_gradients_of_the_plain_one(tmp_path):
    write_slices(tmp_path)
    exact, plain, fast = (
        task_of(problem, tmp_path) for problem in (problem_with(), problem_with(mixed=True), FAST)
    )
    batch = next(exact.batches(0))
    (expected, right), (_, eager), (found, graphed) = (
        loss_and_gradients(task, batch) for task in (exact, plain, fast)
    )
    assert fast.step.captured is not None
    assert plain.step.captured is None
    assert found == pytest.approx(expected, rel=0.02)
    # Both are wrong by bfloat16's rounding alone.
    assert (graphed - right).norm() < 2 * (eager - right).norm()
    assert torch.cosine_similarity(graphed, right, dim=0) > 0.95


def test_a_replay_is_of_the_batch_and_the_weights_it_is_given(tmp_path):
    write_slices(tmp_path)
    plain, fast = (task_of(problem, tmp_path) for problem in (problem_with(mixed=True), FAST))
    optimizers = [cubegrad.MADGRAD(task.model.parameters(), lr=1e-3) for task in (plain, fast)]
    for batch in list(plain.batches(0)) + list(plain.batches(1)):
        expected, found = (
            task.step(optimizer, batch).item()
            for task, optimizer in zip((plain, fast), optimizers, strict=True)
        )
        # On a CPU, bfloat16 was within 0.022 of float32 with four seeds.
        assert found == pytest.approx(expected, rel=0.05)


def test_steps_lower_the_loss_of_a_batch(tmp_path):
    write_slices(tmp_path)
    task = task_of(FAST, tmp_path)
    batch = next(task.batches(0))
    optimizer = cubegrad.MADGRAD(task.model.parameters(), lr=1e-2)
    losses = [task.step(optimizer, batch).item() for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]


def test_a_graphed_run_learns(tmp_path):
    write_slices(tmp_path)
    record = run(FAST, settings_of(FAST, epochs=5, device="cuda"), Place(tmp_path))
    assert record.status == "finished"
    assert record.curve["train_loss"][-1] < 0.9 * record.curve["train_loss"][0]


def exact_gradients(model, slices, low):
    model = copy.deepcopy(model).double()
    doubled = Slices(
        slices.kspace.to(torch.complex128), slices.target.double(), slices.peak.double()
    )
    (1 - fastmri.similarity(model, doubled, low)).mean().backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def test_gradients_of_the_whole_network_are_those_of_float64(tmp_path, monkeypatch):
    """At the size of preset gpu, in float32, after replays with other batches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    write_slices(tmp_path, discs(24, 256))
    preset = fastmri.problem().presets["gpu"]
    options = {**preset.options, "mixed": False}
    torch.manual_seed(0)
    setup = Setup(replace(preset, options=options), 0, torch.device("cuda"), tmp_path)
    task = fastmri.build(setup)
    full = [batch for epoch in (0, 1) for batch in task.batches(epoch) if len(batch[0].peak) == 8]
    for batch in full:
        _, found = loss_and_gradients(task, batch)
        expected = exact_gradients(task.model, batch[0], options["low"])
        # On a CPU 0.02 to 0.07 with four seeds: the network magnifies roundings.
        assert (found - expected).norm() < 0.3 * expected.norm()
