"""MADGRAD(lr="auto") under what wrappers and schedulers do to an optimizer, imitated."""

import math
import warnings

import cases
import pytest
import torch
from auto_classifier import Classifier
from short_runs import ones, parameters
from torch.optim import lr_scheduler

from cubegrad import MADGRAD


def set_gradients(params, k, only=None):
    """Those of |x - 3|² / 2 with noise; None for the parameters that `only` leaves out."""
    for i, param in enumerate(params):
        noise = cases.randn(tuple(param.shape), param.dtype, 10 * k + i).to(param.device)
        param.grad = param.detach() - 3 + 0.1 * noise if only is None or i in only else None


def train(params, optimizer, steps, after=lambda: None):
    for k in range(steps):
        set_gradients(params, k)
        optimizer.step()
        after()


def two(backend=cases.BACKENDS[0]):
    return parameters([(6, 5), (7,)], torch.float64, device=backend.device)


def loss(params):
    return sum(float((param.detach() - 3).square().mean()) for param in params) / len(params)


# Parameters that come and go


@cases.each_fast_backend
def test_a_group_that_gets_its_first_parameter_is_as_one_that_is_added(backend):
    runs = []
    for added in (False, True):
        params = two(backend)
        groups = [{"params": params[:1]}] + [{"params": []}] * (not added)
        optimizer = MADGRAD(groups, lr="auto", **backend.flags)
        for k in range(20):
            if k == 3 and added:
                optimizer.add_param_group({"params": params[1:]})
            elif k == 3:
                optimizer.param_groups[1]["params"].append(params[1])
            set_gradients(params, k)
            optimizer.step()
        runs.append((*params, optimizer.param_groups[1]["estimate"]))
    for got, expected in zip(*runs, strict=True):
        assert torch.equal(got, expected)


def test_groups_that_are_empty_between_steps():
    """DeepSpeed ZeRO-3 with one sub-group puts the parameter there for each step."""
    runs = []
    for swaps in (False, True):
        params = two()
        optimizer = MADGRAD([{"params": [] if swaps else params}], lr="auto")
        for k in range(20):
            if swaps:
                optimizer.param_groups[0]["params"] = list(params)
            set_gradients(params, k)
            optimizer.step()
            if swaps:
                optimizer.param_groups[0]["params"] = []
        runs.append((*params, optimizer.param_groups[0]["estimate"]))
    for got, expected in zip(*runs, strict=True):
        assert torch.equal(got, expected)


def step_in_turns(params, optimizer, k):
    for i, param in enumerate(params):
        set_gradients(params, k)
        optimizer.param_groups[i]["params"] = [param]
        optimizer.step()
        optimizer.param_groups[i]["params"] = []


def test_parameters_that_are_put_there_in_turns_are_refused():
    params = two()
    optimizer = MADGRAD([{"params": []}, {"params": []}], lr="auto")
    step_in_turns(params, optimizer, 0)
    with pytest.raises(RuntimeError, match="sub_group_size"), cases.no_change(*params):
        step_in_turns(params, optimizer, 1)


def test_they_are_refused_before_a_weight_moves_if_their_state_is_made_first():
    """DeepSpeed makes it by steps with gradients of 0."""
    params = two()
    optimizer = MADGRAD([{"params": []}, {"params": []}], lr="auto")
    for i, param in enumerate(params):
        param.grad = torch.zeros_like(param)
        optimizer.param_groups[i]["params"] = [param]
        optimizer.step()
        optimizer.param_groups[i]["params"] = []
    with pytest.raises(RuntimeError, match="1 parameters that had left"), cases.no_change(*params):
        step_in_turns(params, optimizer, 0)


def test_parameters_may_be_replaced_or_dropped():
    params = two()
    optimizer = MADGRAD([{"params": params[:1]}, {"params": params[1:]}], lr="auto")
    train(params, optimizer, 3)
    dropped = optimizer.param_groups.pop()
    train(params, optimizer, 3)
    optimizer.param_groups.append(dropped)
    train(params, optimizer, 3)
    new = torch.nn.Parameter(params[1].detach().clone())
    dropped["params"] = [new]
    train([params[0], new], optimizer, 100)
    assert loss([params[0], new]) < 0.5


@pytest.mark.training
@cases.each_fast_backend
@pytest.mark.parametrize("decoupled", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_groups_with_gradients_in_turns(backend, decoupled):
    """The estimate advances at every step(), but a group's sums only when it has gradients."""
    results = []
    for in_turns in (False, True):
        params = two(backend)
        groups = [{"params": [param]} for param in params]
        options = {"weight_decay": 1e-3, "decoupled_weight_decay": decoupled}
        optimizer = MADGRAD(groups, lr="auto", **options, **backend.flags)
        for k in range(300):
            for only in ([0], [1]) if in_turns else ([0, 1],):
                set_gradients(params, k, only)
                optimizer.step()
        results.append((loss(params), optimizer.estimated_lr()))
    (joint, rate), (in_turns, its_rate) = results
    assert in_turns < 2 * joint + 0.02  # both 0.04 to 0.06 for four seeds
    assert 1 <= its_rate / rate < 1.2  # 1.08 to 1.09: the estimate counts two steps for one


# A learning rate that somebody overwrites


def test_auto_set_again_is_a_factor_of_1():
    plain, again = Classifier(), Classifier()
    again.optimizer.param_groups[0]["lr"] = "auto"
    assert torch.equal(again.train(range(5)), plain.train(range(5)))
    assert again.optimizer.param_groups[0]["lr"] == 1.0


def test_auto_set_for_a_fixed_rate_is_refused():
    param = ones(3)
    optimizer = MADGRAD([param], lr=0.1)
    param.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = "auto"
    refused = pytest.raises(TypeError, match=r"build the optimizer with it: MADGRAD\(params, lr='")
    with refused, cases.no_change(param):
        optimizer.step()
    with pytest.raises(TypeError, match="build the optimizer with it"):
        MADGRAD([ones(3)], lr=0.1).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("when", ["built", "added", "later"])
def test_auto_times_a_ratio_is_refused(when):
    params, lr = [ones(3), ones(2)], "auto" * 16
    optimizer = MADGRAD(params[:1], lr="auto")
    group = {"params": params[1:], "lr": lr}
    params[0].grad = torch.ones(3)
    if when == "later":
        optimizer.param_groups[0]["lr"] = lr
    act = {
        "built": lambda: MADGRAD([group], lr="auto"),
        "added": lambda: optimizer.add_param_group(group),
        "later": optimizer.step,
    }[when]
    with pytest.raises(TypeError, match=r"lr='autoautoautoauto\.\.\.'.*give that group the ratio"):
        act()


def test_it_warns_of_a_learning_rate_finder():
    params = two()
    optimizer = MADGRAD(params, lr="auto")
    optimizer.param_groups[0]["lr"] = 1e-7
    with pytest.warns(UserWarning, match=r"it is 1e-07 .* learning-rate finder") as caught:
        train(params, optimizer, 150)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@cases.each_fast_backend
@pytest.mark.parametrize("as_tensor", [False, True])
def test_it_warns_of_a_schedule_for_another_optimizer(backend, as_tensor):
    params = two(backend)
    optimizer = MADGRAD(params, lr="auto", **backend.flags)
    if as_tensor:
        optimizer.param_groups[0]["lr"] = torch.tensor(1.0)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=300)
    expected = r"it is 0\.0004 now and at most 0\.01, .*OneCycleLR\(max_lr=1\.0\)"
    with pytest.warns(UserWarning, match=expected) as caught:
        train(params, optimizer, 1, schedule.step)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(params, optimizer, 150, schedule.step)


def test_it_warns_of_a_small_peak_once_the_factor_no_longer_rises():
    params = two()
    optimizer = MADGRAD(params, lr="auto")
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda k: min(0.01, (k + 1) / 5000))
    with pytest.warns(UserWarning, match=r"it is 0\.01 now and at most 0\.01,") as caught:
        train(params, optimizer, 200, scheduler.step)
    assert len(caught) == 1


def test_it_does_not_warn_of_one_cycle_with_a_peak_of_1():
    params = two()
    optimizer = MADGRAD([{"params": params[:1]}, {"params": params[1:]}], lr="auto")
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[1.0, 0.01], total_steps=5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(params, optimizer, 150, scheduler.step)


SCHEDULES = {
    "none": lambda _: 1.0,
    "cosine": lambda k: 0.5 * (1 + math.cos(math.pi * min(k / 50, 1))),
    "long warm-up": lambda k: k / 10_000,
    "tenth": lambda _: 0.1,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_does_not_warn_of_a_schedule_of_factors(schedule):
    params = two()
    optimizer = MADGRAD([{"params": params[:1]}, {"params": params[1:], "lr": 0.01}], lr="auto")
    scheduler = lr_scheduler.LambdaLR(optimizer, SCHEDULES[schedule])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(params, optimizer, 250, scheduler.step)


def test_it_does_not_warn_at_the_end_of_a_resumed_run():
    first, second = Classifier(), Classifier()
    first.train(range(3))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.optimizer.param_groups[0]["lr"] = 1e-7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.train(range(3, 120))
