"""Gradient release with lr="auto": the sums of a step are added up over the backward pass."""

import math

import cases
import pytest
import released_runs
import torch
from cases import each_fast_backend
from released_runs import Net, assert_same, decaying, loss_of, pair, train, two_groups
from short_runs import through_a_file
from torch import nn

from cubegrad import MADGRAD, MADGRADW
from cubegrad.optim import release

each_class = pytest.mark.parametrize("cls", [MADGRAD, MADGRADW])
each_form = pytest.mark.parametrize("compact", [False, True], ids=["sums", "compact"])


@pytest.fixture(autouse=True)
def _small_line(monkeypatch):
    monkeypatch.setattr(release.GradientRelease, "held_bytes", released_runs.HELD_BYTES)


def build(cls=MADGRAD, **options):
    return lambda model: cls(two_groups(model), lr="auto", **options)


def assert_close(one, other):
    """Sums of float64 in another order move the rate by its last bits, and x by those of x."""
    (model, optimizer), (again, released) = one, other
    assert released.estimated_lr() == pytest.approx(optimizer.estimated_lr(), rel=1e-5)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    for mine, its in zip(optimizer.param_groups, released.param_groups, strict=True):
        torch.testing.assert_close(mine["estimate"], its["estimate"], rtol=1e-5, atol=0.0)


@each_fast_backend
@each_class
def test_the_estimate_is_that_of_ordinary_steps(cls, backend):
    one, other = pair(build(cls, **backend.flags), torch.float32, backend.device)
    for run in (one, other):
        train(*run, scheduler=decaying(run[1]))
    assert_close(one, other)


@each_form
@each_class
def test_an_estimate_that_grows(cls, compact):
    """From weights of 1e-3 to a solution of about 1: the distance grows to that, with the rate."""
    shapes = [(64, 64), (5,), (64, 128), (64, 64), (7,)]
    targets = [cases.randn(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    ends = []
    for released in (False, True):
        params = [nn.Parameter(torch.full(shape, 1e-3)) for shape in shapes]
        optimizer = cls(params, lr="auto", compact=compact)
        if released:
            optimizer.release_gradients()
        rates = []
        for _ in range(40):
            pairs = zip(params, targets, strict=True)
            sum((p - target).square().sum() for p, target in pairs).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.append(optimizer.estimated_lr())
        assert rates[-1] > 100 * rates[0]
        ends.append((params, rates))
    (params, ordinary), (others, released) = ends
    # The last bit of a rate may flip the rounding of a code, one of 256 in its block.
    assert released == pytest.approx(ordinary, rel=1e-3 if compact else 1e-6)
    for p, q in zip(params, others, strict=True):
        if not compact:
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@each_form
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_class
def test_one_step_adds_the_same_sums(cls, momentum, compact):
    """From the same state, so that nothing but the order of the sums differs."""
    one, other = pair(build(cls, momentum=momentum, compact=compact))
    train(*one, steps=range(3))
    other[0].load_state_dict(one[0].state_dict())
    other[1].load_state_dict(through_a_file(one[1].state_dict()))
    for run in (one, other):
        train(*run, steps=[3])
    sums = [optimizer._auto.estimate.sums for _, optimizer in (one, other)]
    torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-15)
    for mine, its in zip(one[1].param_groups, other[1].param_groups, strict=True):
        torch.testing.assert_close(mine["estimate"], its["estimate"], rtol=1e-12, atol=0.0)
    assert_same(one, other)  # the step was made at the rate before it


def test_gradients_are_kept_until_there_is_an_estimate():
    one, other = pair(lambda model: MADGRAD(model.parameters(), lr="auto"))
    model, optimizer = other
    (0 * loss_of(model, 0)).backward()  # nothing to begin with
    assert model.last.weight.grad is not None
    with cases.no_change(*model.parameters()):
        optimizer.step()
    assert math.isnan(optimizer.estimated_lr())
    assert model.last.weight.grad is None
    loss_of(model, 1).backward()
    assert model.last.weight.grad is not None
    optimizer.step()
    assert optimizer.estimated_lr() > 0
    loss_of(model, 2).backward()
    assert model.last.weight.grad is None
    optimizer.step()

    (0 * loss_of(one[0], 0)).backward()
    one[1].step()
    one[1].zero_grad()
    train(*one, steps=[1, 2])
    assert_close(one, other)


def test_a_resumed_run_releases_at_once():
    _, (model, optimizer) = pair(build())
    train(model, optimizer, steps=range(3))
    again = Net()
    again.load_state_dict(model.state_dict())
    resumed = build()(again)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    resumed.release_gradients()
    loss_of(again, 3).backward()
    assert again.last.weight.grad is None
    resumed.step()
    train(model, optimizer, steps=[3])
    train(again, resumed, steps=range(4, 7))
    train(model, optimizer, steps=range(4, 7))
    assert_same((model, optimizer), (again, resumed))
    assert resumed.estimated_lr() == optimizer.estimated_lr()


@each_class
def test_idle_parameters_and_late_groups_are_counted(cls):
    """A parameter that was stepped and has no gradient this time, and one that joins."""
    one, other = pair(lambda model: cls(model.twice.parameters(), lr="auto"))
    for model, optimizer in (one, other):
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": list(model.last.parameters())})
        train(model, optimizer, range(2, 4))
        model.twice(torch.ones(2, released_runs.WIDTH)).square().sum().backward()
        optimizer.step()  # `last` is idle
        optimizer.zero_grad()
        train(model, optimizer, range(4, 6))
    assert_close(one, other)
    assert [count for _, opt in (one, other) for count in opt._auto.estimate.counts] == [
        64 * 65
    ] * 4


@each_class
def test_a_group_without_gradients_adds_no_weight(cls):
    """As in an ordinary step."""
    runs = []
    for released in (False, True):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(300, 300)) for _ in range(2)]
        optimizer = cls([{"params": [param]} for param in params], lr="auto")
        handle = optimizer.release_gradients() if released else None
        for k in range(6):
            some = params if k < 3 else params[:1]
            sum((p - 1).square().sum() for p in some).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append([group["estimate"].tolist() for group in optimizer.param_groups])
        assert (handle is not None) == released
    for plain, other in zip(*runs, strict=True):
        assert other == pytest.approx(plain, rel=1e-12)
