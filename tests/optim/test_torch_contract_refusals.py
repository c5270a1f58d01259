"""What torch's tests ask of every optimizer in torch.optim: what it takes and what it refuses."""

import re

import pytest
import torch
from contract import CLASSES, DEFAULTS, give_grads
from torch import nn

each_class = pytest.mark.parametrize("cls", CLASSES)
each_default = pytest.mark.parametrize("case", DEFAULTS, ids=str)


def param(*shape):
    return nn.Parameter(torch.ones(shape or (3,)))


def duplicate():
    one = param()
    return [one, one]


def across():
    one = param()
    return [{"params": [one]}, {"params": [one]}]


ERRORS = {
    "no list": (param, TypeError, "should be an iterable of Tensors"),
    "not tensors": (lambda: [[1.0]], TypeError, "optimizer can only optimize Tensors"),
    "a generator of nothing": (lambda: iter(()), ValueError, "empty parameter list"),
    "twice in a group": (duplicate, UserWarning, "duplicate parameters"),
    "in two groups": (across, ValueError, "more than one parameter group"),
    "not a leaf": (lambda: [param() * 2], ValueError, "can't optimize a non-leaf Tensor"),
    "names for some": (lambda: [("a", param()), param()], ValueError, "with/without names"),
    "names for some groups": (
        lambda: [{"params": [param()]}, {"params": [("a", param())]}],
        ValueError,
        "with/without names",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@each_class
def test_parameters_are_refused_as_torch_refuses_them(cls, name):
    make, error, message = ERRORS[name]
    for optimizer in (torch.optim.Adam, cls):
        if error is UserWarning:
            with pytest.warns(error, match=message):
                optimizer(make())
        else:
            with pytest.raises(error, match=message):
                optimizer(make())


@each_class
def test_an_lr_of_two_numbers_is_a_value_error(cls):
    with pytest.raises(ValueError, match="lr="):
        cls([param()], lr=torch.tensor([1e-3, 1e-3]))


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "eps"])
@pytest.mark.parametrize("cls", CLASSES[:2])
def test_a_string_is_no_number(cls, name):
    """float("0.1") is 0.1, and the first step would fail."""
    with pytest.raises(TypeError, match=f"{name}='0.1' .*must be one number"):
        cls([param()], **{name: "0.1"})


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({"lr": 0.1}, KeyError),
        ([param()], TypeError),
        ({"params": {param()}}, TypeError),
    ],
    ids=["no params", "no dict", "a set"],
)
@each_class
def test_groups_are_refused_as_torch_refuses_them(cls, group, error):
    for optimizer in (torch.optim.Adam([param()]), cls([param()])):
        with pytest.raises(error):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


@each_class
def test_fused_refuses_meta_and_steps_what_is_real(cls):
    model = nn.Linear(2, 3, device="meta")
    optimizer = cls(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    with pytest.raises(RuntimeError, match=re.escape("fused=True, but the fused backend is not")):
        optimizer.step()
    model.to_empty(device="cpu").reset_parameters()
    optimizer = cls(model.parameters(), fused=True)
    give_grads(list(model.parameters()), 0)
    optimizer.step()
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


@each_class
def test_fused_does_nothing_on_meta_without_gradients(cls):
    optimizer = cls(nn.Linear(2, 3, device="meta").parameters(), fused=True)
    optimizer.step()
    assert not optimizer.state


@each_default
def test_lazy_parameters_are_taken_before_they_have_a_shape(case):
    """As long as they have one at the first step."""
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))
    optimizer = case.build(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
