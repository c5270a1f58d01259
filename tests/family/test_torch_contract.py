"""The methods of the derivation are torch optimizers: groups, schedules, checkpoints."""

import copy
import io
import pickle

import pytest
import torch
from cases import no_change
from family_runs import build, each_method, same_values, set_grads, train, two_params
from torch import nn

from cubegrad import family
from cubegrad.family.checks import BUFFERS, SCALARS

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@each_method
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(method, dtype):
    params, twins = two_params(dtype), two_params(dtype)
    unbroken = build(method, params, lr=0.05, weight_decay=0.1)
    train(unbroken, params, 12)
    saved = build(method, twins, lr=0.05, weight_decay=0.1)
    train(saved, twins, 7)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    resumed = build(method, twins, lr=1.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    expected = torch.promote_types(dtype, torch.float32)
    for param in twins:
        assert {resumed.state[param][name].dtype for name in BUFFERS} == {expected}
    train(resumed, twins, 5, first=7)
    assert same_values(params, twins)


@each_method
def test_loading_copies(method):
    params, twins = two_params(), two_params()
    optimizer, other = build(method, params), build(method, twins)
    train(optimizer, params, 2)
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train(other, twins, 2)
    for key, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, before[key][name])


@each_method
def test_pickled_and_deepcopied_optimizers_continue_alike(method):
    params = two_params()
    optimizer = build(method, params)
    train(optimizer, params, 3)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    train(optimizer, params, 2, first=3)
    for other in copies:
        copied_params = other.param_groups[0]["params"]
        train(other, copied_params, 2, first=3)
        assert same_values(params, copied_params)


@each_method
def test_gradients_are_never_modified(method):
    params = two_params()
    optimizer = build(method, params, maximize=True, weight_decay=0.3)
    set_grads(params, 0)
    with no_change(*[param.grad for param in params]):
        optimizer.step()


@each_method
def test_a_parameter_starts_at_its_first_gradient(method):
    early, late = two_params()
    optimizer = build(method, [early, late], lr=0.1)
    early.grad = torch.ones_like(early)
    with no_change(late):
        optimizer.step()
    assert late not in optimizer.state
    with torch.no_grad():
        late.fill_(3.0)
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert optimizer.state[late]["centre"].item() == 3.0
    assert [optimizer.state[param]["step"].item() for param in (early, late)] == [2, 1]


@each_method
def test_maximize_and_weight_decay_change_the_gradient(method):
    params, twins = two_params(torch.float64), two_params(torch.float64)
    optimizer = build(method, params, lr=0.1, maximize=True, weight_decay=0.3)
    plain = build(method, twins, lr=0.1)
    for step in range(5):
        set_grads(params, step)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = -param.grad + 0.3 * twin.detach()
        optimizer.step()
        plain.step()
    assert same_values(params, twins)


@each_method
def test_groups_have_their_own_options_and_follow_a_schedule(method):
    params, twins = two_params(), two_params()
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.3, "eps": 0.1}]
    optimizer = build(method, groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    apart = [build(method, twins[:1], lr=0.1), build(method, twins[1:], lr=0.3, eps=0.1)]
    for step in range(5):
        set_grads(params, step)
        set_grads(twins, step)
        optimizer.step()
        scheduler.step()
        for single in apart:
            single.step()
            if step % 2:
                single.param_groups[0]["lr"] *= 0.1
    assert same_values(params, twins)


def test_lr_can_be_a_tensor():
    params, twins = two_params(), two_params()
    train(family.MADGRAD(params, lr=torch.tensor(0.125)), params, 3)
    train(family.MADGRAD(twins, lr=0.125), twins, 3)
    assert same_values(params, twins)


@each_method
def test_a_closure_runs_with_gradients_enabled_and_its_loss_is_returned(method):
    param = nn.Parameter(torch.ones(3))
    optimizer = build(method, [param], lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()
    assert optimizer.step() is None


def test_load_state_dict_calls_its_hooks():
    params = two_params()
    optimizer = family.MADGRAD(params)
    train(optimizer, params, 1)
    calls = []

    def set_lr(_, state_dict):
        calls.append("before")
        group = state_dict["param_groups"][0] | {"lr": 0.5}
        return state_dict | {"param_groups": [group]}

    optimizer.register_load_state_dict_pre_hook(set_lr)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5


@each_method
def test_zero_gradients_and_zero_rates_move_nothing(method):
    """With ε = 0 most denominators are 0 here: a coordinate without a gradient stays."""
    params = two_params()
    optimizer = build(method, params, lr=0.1, eps=0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    with no_change(*params):
        optimizer.step()
    zero_lr = build(method, params, lr=0.0, eps=0.0)
    set_grads(params, 0)
    with no_change(*params):
        zero_lr.step()


@each_method
@pytest.mark.parametrize("device", ["meta", *(["cuda"] if torch.cuda.is_available() else [])])
def test_state_and_steps_stay_on_the_parameters_device(method, device):
    """A step on a meta tensor, which has no values, shows that it reads none from the device."""
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer = build(method, [param], lr=0.1)
    train(optimizer, [param], 2)
    devices = {name: value.device.type for name, value in optimizer.state[param].items()}
    assert devices == dict.fromkeys(SCALARS, "cpu") | dict.fromkeys(BUFFERS, device)
    if device == "cuda":
        twin = nn.Parameter(torch.ones(3))
        train(build(method, [twin], lr=0.1), [twin], 2)
        torch.testing.assert_close(param.detach().cpu(), twin.detach())


def test_grad_bound_can_be_one_number_per_coordinate():
    params = two_params(torch.bfloat16)
    bounds = [torch.full((4, 3), 2.0), torch.tensor(2.0)]
    groups = [{"params": [p], "grad_bound": g} for p, g in zip(params, bounds, strict=True)]
    train(family.TheoreticalMADGRAD(groups, grad_bound=1.0), params, 3)
    twins = two_params(torch.bfloat16)
    train(family.TheoreticalMADGRAD(twins, grad_bound=2.0), twins, 3)
    assert same_values(params, twins)


def test_a_wrapper_can_write_into_the_state_before_the_first_step():
    params, twins = two_params(), two_params()
    optimizer, plain = family.MADGRAD(params), family.MADGRAD(twins)
    optimizer.state[params[0]]["ema"] = torch.ones(4, 3)
    train(optimizer, params, 2)
    train(plain, twins, 2)
    assert same_values(params, twins)
    assert torch.equal(optimizer.state[params[0]]["ema"], torch.ones(4, 3))
