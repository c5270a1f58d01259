"""restart(): from the weights as they are, as a new optimizer would."""

import cases
import edits
import pytest
import torch
from cases import each_fast_backend
from compact_runs import same_runs
from edits import FORMS, build
from short_runs import advance, cloned, ones, parameters, same_bits
from torch import nn

from cubegrad import MADGRAD

RATES = [0.1, "auto"]


def is_possible(form, lr):
    return lr != "auto" or not form.startswith(("mirror", "madgradw"))


CASES = [(form, lr) for form in FORMS for lr in RATES if is_possible(form, lr)]


@pytest.mark.parametrize(("form", "lr"), CASES)
@each_fast_backend
def test_it_is_a_new_optimizer_over_the_weights(backend, form, lr):
    shapes = [edits.SHAPE, (5, 7), (3,)]
    params = parameters(shapes, device=backend.device)

    def groups(of):
        return [{"params": of[:1]}, {"params": of[1:], "weight_decay": 0.1}]

    old = build(form, groups(params), backend, lr=lr)
    advance(old, params, range(6))
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)
    old.restart()
    others = cloned(params)
    new = build(form, groups(others), backend, lr=lr)
    for param in (params[2], others[2]):  # one that was stepped before, and is frozen now
        param.requires_grad_(False)
        param.grad = None
    advance(old, params[:2], range(6, 12))
    advance(new, others[:2], range(6, 12))
    if backend.flags.get("capturable") and lr != "auto":  # it keeps its state, for a graph
        assert same_bits(params, others)
    else:
        assert same_runs(params, old, others, new)
    if lr == "auto":
        assert old.estimated_lr() == new.estimated_lr()
        assert float(old.param_groups[0]["estimate"][4]) == 6


@pytest.mark.parametrize("lr", RATES)
def test_with_gradient_release(lr):
    def step(net, optimizer, k):
        net(cases.randn((8, 300), torch.float32, k)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    runs = []
    for restarts in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
        optimizer = MADGRAD(net.parameters(), lr=lr)
        handle = optimizer.release_gradients()
        for k in range(4):
            step(net, optimizer, k)
        if restarts:
            optimizer.restart()
        else:
            handle.remove()
            optimizer = MADGRAD(net.parameters(), lr=lr)
            optimizer.release_gradients()
        for k in range(4, 8):
            step(net, optimizer, k)
        runs.append(list(net.parameters()))
    assert same_bits(*runs)


def test_between_backward_and_step_it_is_refused_with_gradient_release():
    param = nn.Parameter(torch.ones(300, 300))
    optimizer = MADGRAD([param], lr=0.1)
    optimizer.release_gradients()
    param.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"restart\(\) comes between backward\(\) and step\(\)"):
        optimizer.restart()
    optimizer.step()
    optimizer.restart()


def test_weights_loaded_after_it_are_the_start():
    (param,) = parameters([(5, 7)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(3))
    optimizer.restart()
    with torch.no_grad():
        param.fill_(2.0)
    advance(optimizer, [param], range(1))
    assert (optimizer.state[param]["initial_param"] == 2).all()


def test_some_parameters_only():
    params = parameters([(5, 7)] * 2)
    optimizer = advance(MADGRAD(params, lr=0.1), params, range(3))
    kept = list(optimizer.state[params[0]].values())
    with cases.no_change(*kept):
        optimizer.restart([params[1]])
    assert params[1] not in optimizer.state
    advance(optimizer, params, range(3, 5))
    assert [int(optimizer.state[param]["step"]) for param in params] == [5, 2]
    optimizer.restart(params[1])
    assert params[1] not in optimizer.state


def test_parameters_that_it_cannot_restart_are_refused():
    params = parameters([(5, 7)] * 2)
    fixed = advance(MADGRAD(params, lr=0.1), params, range(2))
    with pytest.raises(TypeError, match=r"got tuple .* tensors only, as of model\.parameters\(\)"):
        fixed.restart([("weight", params[0])])
    with pytest.raises(ValueError, match=r"1 parameters .* none of the param groups.*\(3,\)"):
        fixed.restart([params[0], ones(3)])
    assert params[0] in fixed.state
    auto = advance(MADGRAD(params, lr="auto"), params, range(2))
    with pytest.raises(ValueError, match="of 1 parameters leaves the estimate of lr='auto'"):
        auto.restart([params[0]])


def test_what_others_keep_in_the_state_stays():
    (param,) = parameters([(5, 7)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(2))
    optimizer.state[param]["ema"] = torch.ones(5, 7)
    optimizer.state["wrapper"] = {"count": 3}
    optimizer.restart()
    assert list(optimizer.state[param]) == ["ema"]
    assert optimizer.state["wrapper"] == {"count": 3}
    advance(optimizer, [param], range(2))
    assert int(optimizer.state[param]["step"]) == 2


def test_options_and_schedulers_stay():
    (param,) = parameters([(5, 7)])
    optimizer = MADGRAD([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for k in range(5):
        advance(optimizer, [param], [k])
        scheduler.step()
    optimizer.restart()
    assert optimizer.param_groups[0]["lr"] == 0.025
    advance(optimizer, [param], range(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.0125


def test_a_run_that_became_nan_starts_over():
    (param,) = parameters([(5, 7)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(2))
    best = param.detach().clone()
    param.grad = torch.full_like(param, torch.nan)
    optimizer.step()
    assert param.isnan().all()
    with torch.no_grad():
        param.copy_(best)
    optimizer.restart()
    advance(optimizer, [param], range(2, 5))
    assert param.isfinite().all()
