"""DoG and L-DoG: against the authors' package, their average, odd gradients, resuming."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn

from cubegrad.study.dog import DoG

each_form = pytest.mark.parametrize("layerwise", [False, True])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model, optimizer, steps=30):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


@each_form
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_it_takes_the_steps_and_the_average_of_its_authors_package(layerwise, decay):
    package = pytest.importorskip("dog")
    ours, theirs = net(), net()
    optimizer = DoG(ours.parameters(), weight_decay=decay, first_distance=1e-4, layerwise=layerwise)
    kind = package.LDoG if layerwise else package.DoG
    reference = kind(theirs.parameters(), reps_rel=1e-4, weight_decay=decay)
    averager = package.PolynomialDecayAverager(theirs)
    reference.register_step_post_hook(lambda *_: averager.step())
    train(ours, optimizer)
    train(theirs, reference)
    # 30 steps in float32; the two sum in different orders.
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)
    optimizer.eval()
    average = averager.averaged_model.state_dict()
    torch.testing.assert_close(ours.state_dict(), average, rtol=1e-4, atol=1e-6)


@each_form
def test_the_average_is_put_in_and_taken_out(layerwise):
    model = net()
    optimizer = DoG(model.parameters(), layerwise=layerwise)
    optimizer.eval()  # nothing to average yet
    optimizer.train()
    train(model, optimizer, 5)
    before = [param.clone() for param in model.parameters()]
    optimizer.eval()
    optimizer.eval()
    with pytest.raises(RuntimeError, match="call train"):
        optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    optimizer.train()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@each_form
def test_a_resumed_run_takes_the_same_steps(layerwise):
    whole, model = net(), net()
    one = DoG(whole.parameters(), layerwise=layerwise)
    train(whole, one, 5)
    one.eval()
    kept = deepcopy({"model": whole.state_dict(), "optimizer": one.state_dict()})
    other = DoG(model.parameters(), layerwise=layerwise)
    model.load_state_dict(kept["model"])
    other.load_state_dict(kept["optimizer"])
    for trained, optimizer in ((whole, one), (model, other)):
        optimizer.train()
        train(trained, optimizer, 5)
    assert all(map(torch.equal, whole.parameters(), model.parameters()))
    assert one.estimated_lr() == other.estimated_lr()


@each_form
def test_parameters_without_a_gradient_stay(layerwise):
    used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = DoG([unused, used], weight_decay=0.1, layerwise=layerwise)
    assert math.isnan(optimizer.estimated_lr())
    optimizer.step()  # no gradient at all
    for _ in range(3):
        used.grad = torch.ones(3)
        optimizer.step()
    assert (used < 1).all()
    assert (unused == 1).all()
    assert optimizer.estimated_lr() > 0
    used.grad, unused.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert used.isfinite().all()
    assert unused.isfinite().all()


def test_a_closure_gives_the_loss():
    param = nn.Parameter(torch.ones(1))
    optimizer = DoG([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1
    assert param < 1
