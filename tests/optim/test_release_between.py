"""Gradient release between backward() and step(): what changes gradients, or needs a whole step."""

import copy
import io
import pickle

import cases
import pytest
import released_runs
import torch
from released_runs import Net, loss_of, train, two_groups
from short_runs import ones
from torch import nn

from cubegrad import MADGRAD
from cubegrad.optim import release

each_rate = pytest.mark.parametrize("lr", [0.01, "auto"])


@pytest.fixture(autouse=True)
def _small_line(monkeypatch):
    monkeypatch.setattr(release.GradientRelease, "held_bytes", released_runs.HELD_BYTES)


def released(**options):
    model = Net()
    optimizer = MADGRAD(model.parameters(), **options)
    optimizer.release_gradients()
    return model, optimizer


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: setattr(model.norm.weight, "grad", torch.ones(released_runs.WIDTH)),
    ],
    ids=["norm", "value", "replaced"],
)
def test_gradients_changed_after_backward(change):
    """Seen at the parameters whose gradients are held."""
    model, optimizer = released()
    loss_of(model, 0).backward()
    change(model)
    with (
        cases.no_change(*model.parameters()),
        pytest.raises(RuntimeError, match=r"changed after backward.*register_hook"),
    ):
        optimizer.step()


def large_only(**options):
    """All are stepped during backward, but one that waits."""
    params = [ones(400), ones(300), ones(500)]
    optimizer = MADGRAD(params, **options)
    optimizer.release_gradients()
    return params, optimizer


@each_rate
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_clipping_is_noticed_without_a_small_parameter(max_norm, lr):
    """Also where no gradient exceeds the norm."""
    params, optimizer = large_only(lr=lr)
    sum(p.sum() for p in params).backward()
    optimizer.step()
    optimizer.zero_grad()
    sum(p.sum() for p in params).backward()
    nn.utils.clip_grad_norm_(params, max_norm)
    with cases.no_change(*params), pytest.raises(RuntimeError, match="changed after backward"):
        optimizer.step()


def test_clipping_is_noticed_once_the_smallest_parameter_has_been_without_a_gradient():
    params, optimizer = large_only()
    for k in range(2):
        sum(p.sum() for p in params[::2]).backward()
        assert [p.grad is None for p in params] == [k == 0, True, True]
        if k:
            nn.utils.clip_grad_value_(params, 1.0)
            with pytest.raises(RuntimeError, match="changed after backward"):
                optimizer.step()
        else:
            optimizer.step()


def test_clipping_is_noticed_where_large_parameters_take_turns():
    """From the second time on that each of them is alone."""
    params, optimizer = large_only()
    for k, param in enumerate([*params, *params]):
        param.sum().backward()
        nn.utils.clip_grad_norm_(params, 1e-3)
        if k < len(params) and param.grad is None:
            optimizer.step()
            continue
        with pytest.raises(RuntimeError, match="changed after backward"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


def test_one_gradient_waits_however_many_have_been_chosen():
    params, optimizer = large_only()
    for alone in params:
        alone.sum().backward()
        optimizer.step()
    sum(p.sum() for p in params).backward()
    assert sum(p.grad is not None for p in params) == 1
    optimizer.step()


def test_a_sparse_gradient_set_to_0_before_step():
    table = nn.Embedding(50, 8, sparse=True)
    optimizer = MADGRAD(table.parameters(), momentum=0.0)
    optimizer.release_gradients()
    table(torch.tensor([1])).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="was set to 0 after backward"):
        optimizer.step()


def test_gradients_set_to_0_before_step():
    """zero_grad() would give them the remedy that they have just tried."""
    model, optimizer = released()
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    with (
        cases.no_change(*model.parameters()),
        pytest.raises(RuntimeError, match=r"set to 0 .*Call step\(\) before .*set_to_none=True\)"),
    ):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with cases.no_change(*model.parameters()):
        optimizer.step()
    train(model, optimizer, range(2))


def test_a_gradient_that_comes_after_its_step():
    model, optimizer = released()
    loss_of(model, 0).backward()
    model.last.weight.grad = torch.ones(64, 64)
    with (
        cases.no_change(*model.parameters()),
        pytest.raises(RuntimeError, match=r"got another gradient.*zero_grad"),
    ):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


ACTIONS = {
    "state_dict()": lambda optimizer, _: optimizer.state_dict(),
    "load_state_dict()": lambda optimizer, saved: optimizer.load_state_dict(saved),
    "deepcopy": lambda optimizer, _: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, _: pickle.dumps(optimizer),
    "save": lambda optimizer, _: torch.save(optimizer, io.BytesIO()),
    "add_param_group()": lambda optimizer, _: optimizer.add_param_group({"params": [ones(3)]}),
    "edit_weights()": lambda optimizer, _: optimizer.edit_weights().__enter__(),
    "restart()": lambda optimizer, _: optimizer.restart(),
    "remove()": lambda optimizer, _: optimizer._release.remove(),
}


@each_rate
@pytest.mark.parametrize("name", ACTIONS)
def test_what_needs_a_whole_step_is_refused(name, lr):
    """Between backward() and step() some parameters have been stepped and others have not."""
    model, optimizer = released(lr=lr)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    loss_of(model, 2).backward()
    state = [value for entries in optimizer.state.values() for value in entries.values()]
    with (
        cases.no_change(*model.parameters(), *state),
        pytest.raises(
            RuntimeError, match=r"between backward\(\) and step\(\).*call step\(\) first"
        ),
    ):
        ACTIONS[name](optimizer, saved)
    optimizer.step()
    assert all(entries["step"] == 3 for entries in optimizer.state.values())
    optimizer.zero_grad()
    ACTIONS[name](optimizer, saved)


@each_rate
def test_torchs_checkpoints_work_between_two_steps(lr):
    pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    runs = []
    for resumes in (False, True):
        model = Net()
        optimizer = MADGRAD(two_groups(model), lr=lr)
        optimizer.release_gradients()
        get_state_dict(model, optimizer)  # makes a step with gradients of 0
        train(model, optimizer, range(3))
        saved = copy.deepcopy(get_state_dict(model, optimizer))
        loss_of(model, 3).backward()
        with pytest.raises(RuntimeError, match=r"state_dict\(\) comes between"):
            get_state_dict(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if resumes:
            set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
            train(model, optimizer, [3])
        train(model, optimizer, range(4, 6))
        runs.append((model, optimizer))
    released_runs.assert_same(*runs)
