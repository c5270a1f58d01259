"""Bad options, parameters and state dicts are refused before anything changes."""

import copy
import re

import pytest
import torch
from cases import no_change
from family_runs import train, two_params
from torch import nn

from cubegrad import family

NAN = float("nan")

BAD = [
    ({"lr": -1.0}, "lr=-1.0 must be finite and >= 0; each method has its own scale"),
    ({"lr": "x"}, "lr='x' (str) must be one number"),
    ({"lr": True}, "lr=True (bool) must be one number; each method has its own scale"),
    ({"weight_decay": False}, "weight_decay=False (bool) must be one number; use 0"),
    ({"grad_bound": True}, "grad_bound=True must be a real number"),
    ({"maximize": "yes"}, "maximize='yes' (str) must be True or False; pass maximize=True, or"),
    ({"maximize": 0.5}, "maximize=0.5 (float) must be True or False"),
    ({"momentum": 1.0}, "momentum=1.0 must be in [0, 1); use 0.9, or averaging='none'"),
    ({"power": NAN}, "power=nan must be finite and >= 0; use 0.5"),
    ({"r": 1.5}, "r=1.5 must be in [0, 1]; use the power of the weights"),
    ({"j": -1.0}, "j=-1.0 must be finite and >= 0; use 1"),
    ({"eps": -1e-6}, "eps=-1e-06 must be finite"),
    ({"weight_decay": float("inf")}, "weight_decay=inf must be finite and >= 0; use 0"),
    ({"weights": "two"}, "weights='two' must be one of 'one', 'lr', 'power'"),
    ({"denominator": "root"}, "denominator='root' must be one of 'one', 'sqrt_step'"),
    ({"averaging": "some"}, "averaging='some' must be one of 'none', 'constant'"),
    ({"centre": "x1"}, "centre='x1' must be one of 'x0', 'origin'"),
    ({"weights": "one", "lr": 0.5}, "lr=0.5 must be 1 with weights='one'"),
    ({"denominator": "theory"}, "grad_bound=None must be a number or one per coordinate"),
    ({"grad_bound": -1.0}, "grad_bound=-1.0 must be finite and >= 0"),
    ({"grad_bound": torch.ones(2)}, "grad_bound has shape (2,), params[0] has (3,); pass one"),
    ({"grad_bound": "x"}, "grad_bound='x' must be a real number or a dense tensor"),
    ({"grad_bound": 1j}, "grad_bound=1j must be a real number"),
    ({"grad_bound": torch.ones(3).to_sparse()}, "must be a real number or a dense tensor"),
    ({"betas": (0.9, 0.99)}, "unknown options ['betas']; a method takes lr, weights, power"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(list(o)) for o, _ in BAD])
def test_bad_options_are_refused_with_the_remedy(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        family.DualAveraging([nn.Parameter(torch.ones(3))], **options)


def test_a_bad_group_is_not_added_and_a_bad_option_moves_nothing():
    param = nn.Parameter(torch.ones(3))
    optimizer = family.DA([param])
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    param.grad = torch.ones(3)
    optimizer.param_groups[0]["grad_bound"] = torch.ones(2)
    with no_change(param), pytest.raises(ValueError, match="grad_bound has shape"):
        optimizer.step()
    optimizer.param_groups[0].update(grad_bound=None, maximize="no")
    with no_change(param), pytest.raises(TypeError, match="maximize='no'"):
        optimizer.step()
    optimizer.param_groups[0].update(maximize=False, lr=NAN)
    with no_change(param), pytest.raises(ValueError, match="lr=nan"):
        optimizer.step()
    assert not optimizer.state


def test_complex_and_sparse_are_refused_before_anything_changes():
    with pytest.raises(TypeError, match=r"params\[0\] has dtype torch.complex64.*cubegrad.MADGRAD"):
        family.DA([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    dense, rows = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    optimizer = family.MADGRAD([dense, rows])
    dense.grad, rows.grad = torch.ones(2), torch.ones(2, 2).to_sparse()
    with no_change(dense), pytest.raises(RuntimeError, match=r"params\[1\].*sparse.*to_dense"):
        optimizer.step()
    assert not optimizer.state


# name: (how a good state dict is damaged, the message)
DAMAGED = {
    "another method": (
        lambda d: d["param_groups"][0].update(denominator="sqrt_step"),
        "denominator='sqrt_step', the optimizer 'cube_root'; build the optimizer with",
    ),
    "fewer parameters": (
        lambda d: d["param_groups"][0].update(params=[0]),
        r"param groups of \[1\] parameters, the optimizer \[2\]",
    ),
    "a flag that is no boolean": (
        lambda d: d["param_groups"][0].update(maximize="no"),
        "maximize='no' .* must be True or False",
    ),
    "a bad option": (lambda d: d["param_groups"][0].update(lr=NAN), "lr=nan"),
    "a missing buffer": (
        lambda d: d["state"][1].pop("centre"),
        r"parameter 1 is .*it must have \['centre', 'grad_sq_sum'",
    ),
    "another shape": (
        lambda d: d["state"][0].update(grad_sum=torch.ones(5)),
        r"grad_sum of parameter 0 is .* of shape \(5,\), its parameter .*\(4, 3\)",
    ),
    "a buffer that is no tensor": (
        lambda d: d["state"][0].update(centre=[1.0]),
        "centre of parameter 0 is of type list",
    ),
    "no state": (lambda d: d.pop("state"), r"has no dict 'state' but \['param_groups'\]"),
    "state of no parameter": (
        lambda d: d["state"].update({7: {}}),
        "has state for 7, which is none of",
    ),
    "state that is no dict": (
        lambda d: d["state"].update({1: 3}),
        "state of parameter 1 is of type int, not a dict",
    ),
    "a group that is no dict": (
        lambda d: d.update(param_groups=[3]),
        "param group 0 .* is of type int, not a dict",
    ),
    "one key for two parameters": (
        lambda d: d["param_groups"][0].update(params=[0, 0]),
        "the state dict lists 0 for two parameters",
    ),
    "a negative sum": (
        lambda d: d["state"][0]["grad_sq_sum"][2, 1].fill_(-2.0),
        "grad_sq_sum of parameter 0 is -2.0; it must be >= 0",
    ),
    "a negative weight": (
        lambda d: d["state"][1].update(weight_sum=-1.0),
        "weight_sum of parameter 1 is -1.0; it must be >= 0, as a sum of weights is",
    ),
    "half a step": (
        lambda d: d["state"][1].update(step=torch.tensor(1.5)),
        "step of parameter 1 is 1.5; it must be one count >= 0",
    ),
    "two steps": (
        lambda d: d["state"][1].update(step=torch.ones(2)),
        r"step of parameter 1 is .*; it must be one number",
    ),
    "an lr of two numbers": (
        lambda d: d["param_groups"][0].update(lr=torch.ones(2)),
        "lr=.* must be one number",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_state_dict_that_does_not_fit_changes_nothing(damage, message):
    params, twins = two_params(), two_params()
    optimizer, saved = family.MADGRAD(params, lr=0.5), family.MADGRAD(twins)
    train(optimizer, params, 2)
    train(saved, twins, 1)
    before = copy.deepcopy(optimizer.state_dict())
    damaged = copy.deepcopy(saved.state_dict())
    damage(damaged)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(damaged)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entries in before["state"].items():
        assert all(torch.equal(entries[name], after["state"][key][name]) for name in entries)
