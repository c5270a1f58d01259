"""What convert refuses: state dicts that are damaged, mixed, or of another optimizer."""

import re

import pytest
import torch
from other_packages import LAYOUTS, LR, MIRROR, continued, saved, step, tensors

from cubegrad.interop import convert


def assert_refused(state_dict, problem, expected):
    with pytest.raises(ValueError, match="pass the whole state_dict") as error:
        convert(state_dict)
    before, after = str(error.value).split("; expected ")
    assert problem in before
    assert expected in after


@pytest.mark.parametrize(
    ("layout", "damage", "problem", "expected"),
    [
        ("madgrad", lambda d: d.pop("state"), "but the keys ['param_groups']", "'state' and"),
        ("madgrad", lambda d: d.pop("param_groups"), "no list 'param_groups'", "'state' and"),
        ("madgrad", lambda d: d["param_groups"].clear(), "groups of []", "of one package"),
        ("madgrad", lambda d: d["param_groups"][0].pop("lr"), "['decouple_decay', 'eps'", "['lr'"),
        ("madgrad", lambda d: d["param_groups"][0].update(weight_decouple=0), "couple']", "one of"),
        ("timm", lambda d: d["param_groups"][0].pop("decoupled_decay"), "['eps', 'lr'", "one of"),
        (
            "madgrad",
            lambda d: d["param_groups"].extend(saved("pytorch_optimizer")["param_groups"]),
            "groups of ['madgrad', 'pytorch_optimizer']",
            "of one package",
        ),
        ("timm", lambda d: d["state"].update(k=3), "['timm'] with a count 'k'", "no 'k' with timm"),
        ("madgrad", lambda d: d["state"].pop("k"), "madgrad's groups and no count 'k'", "'k'"),
        ("pytorch_optimizer", lambda d: d["state"].pop("k"), "r's groups and no count 'k'", "'k'"),
        ("madgrad", lambda d: d["state"].update({7: {"s": 0}}), "state for 7", "of parameters"),
        ("madgrad", lambda d: d["state"][0].pop("s"), "['grad_sum_sq', 'x0'] for", "'s', 'x0']"),
        ("timm", lambda d: d["state"][0].pop("x0"), "['grad_sum_sq', 's', 'step']", "'x0']"),
        ("timm", lambda d: d["state"][0].pop("step"), "['grad_sum_sq', 's', 'x0']", "'step'"),
        ("madgrad", lambda d: d["state"][0].update(step=3), "'s', 'step', 'x0']", "'s', 'x0']"),
        ("timm", lambda d: d["state"][0].update(z=0), "'x0', 'z']", "'step', 'x0']"),
        (MIRROR, lambda d: d["state"][0].update(x0=0), "'x0', 'z']", "['grad_sum_sq', 'z']"),
        ("madgrad", lambda d: d["state"].update({0: 3}), "type int for parameter 0", "a dict"),
        ("timm", lambda d: d["state"].update({0: tensors(0)[0]}), "type Tensor for par", "a dict"),
        ("timm", lambda d: d["state"].update(x=d["state"][0]), "state for 'x'", "of parameters"),
        ("madgrad", lambda d: d["param_groups"].append(3), "3 as param group 1", "a dict"),
        ("timm", lambda d: d["param_groups"][0].update(params=2), "2 as 'params'", "a list of"),
        ("timm", lambda d: d["param_groups"][0].update(params=[[]]), "[[]] as 'params'", "of keys"),
        (
            "madgrad",
            lambda d: d["state"].update({1: saved(MIRROR)["state"][1]}),
            "MADGRAD and of MirrorMADGRAD together",
            "one of the two",
        ),
    ],
)
def test_a_state_dict_cut_short_or_mixed_is_refused(layout, damage, problem, expected):
    state_dict = saved(layout)
    damage(state_dict)
    assert_refused(state_dict, problem, expected)


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        ("madgrad", lambda d: d["state"].update(k="x"), "step count of parameter 0 is 'x'"),
        ("timm", lambda d: d["state"][0].update(step=torch.ones(2)), "must be one number"),
        ("timm", lambda d: d["param_groups"][0].update(lr=torch.ones(2)), r"shape \(2,\)"),
        ("timm", lambda d: d["param_groups"][0].update(momentum=torch.ones(2)), r"shape \(2,\)"),
    ],
)
def test_what_must_be_one_number_is_refused_otherwise(layout, damage, message):
    state_dict = saved(layout)
    damage(state_dict)
    with pytest.raises(ValueError, match=message):
        convert(state_dict)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_negative_sum_of_squares_is_refused_when_it_is_loaded(layout):
    before = saved(layout)
    before["state"][1]["grad_sum_sq"][2] = -1.0
    with pytest.raises(ValueError, match=r"grad_sq_sum of parameter 1 is -1\.0"):
        continued(before, tensors(0), layout)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_another_optimizer_is_refused(name, stepped):
    params = [torch.nn.Parameter(x) for x in tensors(0)]
    optimizer = getattr(torch.optim, name)(params, lr=LR)
    if stepped:
        step(optimizer, params, tensors(1))
    problem = f"{sorted(optimizer.state_dict()['param_groups'][0])} in param group 0"
    remedy = f"it is of {name} or a relative, whose state cannot be converted"
    with pytest.raises(ValueError, match=re.escape(f"{problem}; {remedy}")) as refusal:
        convert(optimizer.state_dict())
    assert "load its weights and build a new optimizer over them" in str(refusal.value)


def test_cubegrads_own_state_dict_is_sent_to_load_state_dict():
    optimizer, _ = continued(saved(), tensors(0))
    with pytest.raises(ValueError, match=r"so cubegrad wrote it; .*load_state_dict as it is"):
        convert(optimizer.state_dict())


@pytest.mark.parametrize(("layout", "other"), [("madgrad", MIRROR), (MIRROR, "madgrad")])
def test_load_state_dict_refuses_the_other_form(layout, other):
    with pytest.raises(ValueError, match="madgrad keeps"):
        continued(saved(layout), tensors(0), other)
