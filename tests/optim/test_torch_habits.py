"""What users do with any torch optimizer: closures, hooks, copies, schedulers, clipping."""

import copy
import importlib.metadata

import pytest
import torch
from cases import each_class
from short_runs import ones, peak_of, same_bits, tanh_net, through_pickle
from torch import nn

import cubegrad
from cubegrad import MADGRAD
from cubegrad.backends import foreach

# torch 2.11's profiler warns so once in each process.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")


def net():
    return tanh_net(6, 8, 3)


def train(model, optimizer, after_backward=None):
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        if after_backward:
            after_backward()
        optimizer.step()


@each_class
def test_closure_runs_with_gradients_enabled_and_its_loss_is_returned(cls):
    param = ones(3)
    optimizer = cls([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()
    assert optimizer.step() is None


@each_class
def test_a_profiler_sees_the_step_as_it_sees_torchs(cls):
    param = ones(3)
    param.grad = torch.ones(3)
    optimizer = cls([param])
    optimizer.step()
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert f"Optimizer.step#{cls.__name__}.step" in {event.name for event in profile.events()}


@each_class
def test_pickle_and_deepcopy_go_on_bit_for_bit(cls):
    model = net()
    optimizer = cls(model.parameters(), lr=0.1)
    train(model, optimizer)
    for copied in (copy.deepcopy, through_pickle):
        net_copy, optimizer_copy = copied((model, optimizer))
        reference, optimizer_reference = copy.deepcopy((model, optimizer))
        train(net_copy, optimizer_copy)
        train(reference, optimizer_reference)
        assert same_bits(net_copy.parameters(), reference.parameters())
        assert not same_bits(net_copy.parameters(), model.parameters())


def test_a_scheduler_stepped_too_early_still_warns():
    optimizer = MADGRAD(net().parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("slice_bytes", [2**17, 2**60], ids=["cpu", "as-on-a-gpu"])
@each_class
def test_foreach_peak_is_at_most_one_copy_of_the_parameters(cls, slice_bytes, monkeypatch):
    monkeypatch.setattr(foreach, "CPU_SLICE_BYTES", slice_bytes)
    decoupled = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"momentum": 0.0}, {"weight_decay": 0.1}, decoupled):
            params = [nn.Parameter(torch.randn(n, 300).to(dtype)) for n in (1000, 10, 3000, 1)]
            optimizer = cls(params, foreach=True, **options)
            for param in params:
                param.grad = torch.randn(param.shape).to(dtype)
            optimizer.step()
            size = sum(p.numel() * p.element_size() for p in params)
            peak = peak_of(optimizer.step)
            assert (0.2 if slice_bytes == 2**60 else 0.01) * size < peak <= size


def test_the_version_is_the_distributions():
    try:
        installed = importlib.metadata.version("cubegrad")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this checkout is not installed")
    assert installed == cubegrad.__version__


def test_bfloat16_matrices_beside_float32_norms_and_buffers():
    """The lines of docs/memory.md."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.GroupNorm(8, 64)
    )
    model.extend([nn.Flatten(), nn.Linear(1024, 64), nn.LayerNorm(64), nn.Linear(64, 4)])
    for param in model.parameters():
        param.data = param.data.to(torch.bfloat16) if param.dim() > 1 else param.data
    optimizer = MADGRAD(model.parameters(), lr=1e-3, compact=True)
    images, labels, losses = torch.randn(16, 3, 4, 4), torch.arange(16) % 4, []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert {p.dtype for p in model.parameters() if p.dim() > 1} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.dim() == 1} == {torch.float32}
    assert all(b.dtype == torch.float32 for b in model.buffers() if b.is_floating_point())
