"""CIFAR-10's step as a CUDA graph, imitated where there is no GPU, and compiled."""

from dataclasses import replace

import pytest
import torch
from pretend_cuda import pretend_cuda
from small_cifar import made_up_images
from small_runs import CPU, needs_gpu, settings_of, setup_of
from torch._dynamo.testing import CompileCounter

import cubegrad
from cubegrad.study.graphs import GraphedStep
from cubegrad.study.models.preact import PreActResNet
from cubegrad.study.problems import cifar10
from cubegrad.study.train import Place, run


def two_tasks(small_cifar10, device, loss=cifar10.mean_loss):
    """The same model twice, and a captured step for the first."""
    tasks = []
    for _ in range(2):
        torch.manual_seed(0)
        tasks.append(cifar10.build(setup_of(small_cifar10, device=device)))
    return *tasks, GraphedStep(tasks[0].model, loss, 16, cifar10.mean_loss)


def two_epochs(graphed, plain, step):
    """Each batch's loss with captured steps, and with zero_grad, loss, backward and step."""
    optimizers = [cubegrad.MADGRAD(task.model.parameters(), lr=1e-3) for task in (graphed, plain)]
    losses = []
    for epoch in range(2):
        for batch in plain.batches(epoch):
            optimizers[1].zero_grad()
            expected = plain.loss(plain.model, batch)
            expected.backward()
            optimizers[1].step()
            losses.append((step(optimizers[0], batch), expected.detach()))
    return losses


def test_a_graphed_step_is_a_step(small_cifar10, monkeypatch):
    """Also its running means, the smaller last batch, and losses that are kept."""
    sizes = set()

    def loss(model, images, labels):
        sizes.add(len(labels))
        return cifar10.mean_loss(model, images, labels)

    graphed, plain, step = two_tasks(small_cifar10, CPU, loss)
    graphs = pretend_cuda(monkeypatch, graphed.model)
    benchmark = torch.backends.cudnn.benchmark
    losses = two_epochs(graphed, plain, step)
    assert torch.backends.cudnn.benchmark == benchmark
    assert sorted(step.graphs.captured) == [6, 16]
    assert sizes == {16}  # only this size would be compiled
    assert len(graphs) == 2  # one for each size, in two epochs
    assert len(losses) == 10
    for value, expected in losses:
        assert torch.equal(value, expected)
    for name, value in graphed.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name]), name
    assert graphed.model.state_dict()["blocks.0.norms.0.num_batches_tracked"] == 10


@needs_gpu
def test_a_graphed_step_is_a_step_on_a_gpu(small_cifar10):
    graphed, plain, step = two_tasks(small_cifar10, torch.device("cuda"))
    assert isinstance(graphed.step, GraphedStep)
    for loss, expected in two_epochs(graphed, plain, step):
        torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)  # bfloat16
    assert sorted(step.graphs.captured) == [6, 16]
    assert graphed.model.state_dict()["blocks.0.norms.0.num_batches_tracked"] == 10
    for name, value in graphed.model.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=5e-2, atol=5e-2)


@needs_gpu
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_runs_learn_on_a_gpu(small_cifar10):
    preset = small_cifar10.presets["cpu"]
    preset = replace(preset, options={**preset.options, "compile": True})
    problem = replace(small_cifar10, presets={"cpu": preset})
    for seed in range(2):
        settings = settings_of(problem, epochs=6, device="cuda", seed=seed)
        losses = run(problem, settings, Place()).curve["train_loss"]
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # the compiler's own
def test_models_of_one_shape_are_compiled_once():
    torch._dynamo.reset()
    counter = CompileCounter()
    loss = torch.compile(cifar10.mean_loss, backend=counter, dynamic=False, fullgraph=True)
    images, labels = made_up_images(8)
    images = images.permute(0, 2, 3, 1).contiguous()
    for seed in range(3):
        torch.manual_seed(seed)
        model = PreActResNet((1, 1), False, 4)
        expected = cifar10.mean_loss(model, images, labels)
        assert loss(model, images, labels).item() == pytest.approx(expected.item())
    assert counter.frame_count == 1
