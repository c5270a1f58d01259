"""State dicts that do not fit are refused before anything changes."""

import copy

import pytest
import torch
from short_runs import advance, ones

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD

NAN = float("nan")
CLASSES = [MADGRAD, MirrorMADGRAD, MADGRADW]


def trained(cls=MADGRAD, shape=(3,), **options):
    param = ones(*shape)
    return advance(cls([param], **options), [param], range(1))


def broken(change, **options):
    state_dict = copy.deepcopy(trained(**options).state_dict())
    change(state_dict)
    return state_dict


REFUSED = {
    "another shape": (
        lambda: trained(shape=(4,)).state_dict(),
        r"grad_sum of parameter 0 is torch.float32 of shape \(4,\), its parameter.*\(3,\)",
    ),
    "Adam": (
        lambda: trained(torch.optim.Adam).state_dict(),
        "lacks .*momentum.*it has .*betas.*of Adam or a relative, whose state cannot be converted.*"
        r"load its weights and build a new optimizer over them: MADGRAD\(model.parameters\(\)",
    ),
    "SGD": (
        lambda: trained(torch.optim.SGD).state_dict(),
        "lacks .*eps.*it is of SGD or a relative, whose state cannot be converted",
    ),
    "RMSprop": (
        lambda: torch.optim.RMSprop([ones()]).state_dict(),
        "lacks .*decoupled_weight_decay.*it is of RMSprop",
    ),
    "an unknown optimizer": (
        lambda: broken(lambda d: d["param_groups"][0].pop("eps")),
        "lacks .*eps.*another MADGRAD package through cubegrad.interop.convert",
    ),
    "the mirror form": (
        lambda: trained(MirrorMADGRAD).state_dict(),
        "the state of parameter 0 is .*'z'.*madgrad keeps .*grad_sum.*it is mirror_madgrad's",
    ),
    "no state": (lambda: broken(lambda d: d.pop("state")), "has no dict 'state' but"),
    "no groups": (
        lambda: broken(lambda d: d.pop("param_groups")),
        "has no list 'param_groups' but",
    ),
    "cut short": (
        lambda: broken(lambda d: d["state"][0].pop("grad_sq_sum")),
        "the state of parameter 0 is .*'grad_sum', 'initial_param', 'step'",
    ),
    "fewer parameters": (
        lambda: broken(lambda d: d["param_groups"][0].update(params=[])),
        r"param groups of \[0\] parameters, the optimizer \[1\]",
    ),
    "more groups": (
        lambda: broken(lambda d: d["param_groups"].append(d["param_groups"][0])),
        r"param groups of \[1, 1\] parameters",
    ),
    "state of no parameter": (
        lambda: broken(lambda d: d["state"].update({7: {}})),
        "state for 7, which is none of the parameters that its groups list",
    ),
    "state under a parameter's name": (
        lambda: broken(lambda d: d["state"].update(weight=d["state"][0])),
        "state for 'weight', which is none of the parameters",
    ),
    "a group that is no dict": (
        lambda: broken(lambda d: d.update(param_groups=[3])),
        "param group 0 of the state dict is of type int, not a dict",
    ),
    "a group without parameters": (
        lambda: broken(lambda d: d["param_groups"][0].update(params=None)),
        "param group 0 of the state dict has no list 'params' but",
    ),
    "a parameter that is no key": (
        lambda: broken(lambda d: d["param_groups"][0].update(params=[[0]])),
        "param group 0 of the state dict has \\[0\\] among its 'params'",
    ),
    "a buffer without values": (
        lambda: broken(lambda d: d["state"][0].update(grad_sum=torch.ones(3, device="meta"))),
        "grad_sum of parameter 0 is on the meta device and has no values",
    ),
    "an entry that is no dict": (
        lambda: broken(lambda d: d["state"].update({0: torch.ones(3)})),
        "the state of parameter 0 is of type Tensor, not a dict",
    ),
    "an lr of two numbers": (
        lambda: broken(lambda d: d["param_groups"][0].update(lr=torch.ones(2))),
        "lr=.* must be one number",
    ),
    "no dict": (lambda: None, "the state dict is of type NoneType, not a dict"),
    "a list": (lambda: [{}], "the state dict is of type list, not a dict"),
    "a negative sum of squares": (
        lambda: broken(lambda d: d["state"][0]["grad_sq_sum"][1].fill_(-0.25)),
        "the smallest value of grad_sq_sum of parameter 0 is -0.25; it must be >= 0.*FSDP1",
    ),
    "minus infinity": (
        lambda: broken(lambda d: d["state"][0]["grad_sq_sum"][1].fill_(-float("inf"))),
        "grad_sq_sum of parameter 0 is -inf",
    ),
    "a sparse buffer": (
        lambda: broken(lambda d: d["state"][0].update(grad_sum=torch.ones(3).to_sparse())),
        "grad_sum of parameter 0 has layout torch.sparse_coo; it must be dense",
    ),
    "no initial_param": (
        lambda: broken(lambda d: d["state"][0].pop("initial_param")),
        r"parameter 0 has no initial_param, which its group's momentum=0\.9 needs",
    ),
    "no initial_param for a tensor": (
        lambda: broken(lambda d: d["state"][0].pop("initial_param"), momentum=torch.tensor(0.0)),
        r"parameter 0 has no initial_param, which its group's momentum=0\.0 needs",
    ),
    "an estimated lr": (
        lambda: trained(lr="auto").state_dict(),
        r"saved with lr='auto', and the optimizer was built with lr=0\.5; build it with lr='auto'",
    ),
    **{
        f"a last_eps of {value!r}": (
            lambda value=value: broken(lambda d: d["param_groups"][0].update(last_eps=value)),
            r"last_eps=.* must be .*; load what state_dict\(\) returned, whole",
        )
        for value in (NAN, -1.0, float("inf"), True, "a", None, torch.ones(2))
    },
    **{
        f"an auto_lr of {value!r}": (
            lambda value=value: broken(lambda d: d["param_groups"][0].update(auto_lr=value)),
            r"auto_lr=.* must be True or False; load what state_dict\(\) returned, whole",
        )
        for value in (NAN, "a", None, torch.ones(2))
    },
    "a NaN lr": (lambda: broken(lambda d: d["param_groups"][0].update(lr=NAN)), "lr=nan"),
    "a step that is no count": (
        lambda: broken(lambda d: d["state"][0].update(step=torch.tensor(NAN))),
        "step of parameter 0 is nan; it must be one count >= 0",
    ),
    "a step that is no number": (
        lambda: broken(lambda d: d["state"][0].update(step="x")),
        "step of parameter 0 is 'x'",
    ),
    "a negative step": (
        lambda: broken(lambda d: d["state"][0].update(step=torch.tensor(-1.0))),
        "step of parameter 0 is -1.0; it must be one count >= 0",
    ),
    "two steps": (
        lambda: broken(lambda d: d["state"][0].update(step=torch.ones(2))),
        r"step of parameter 0 is tensor\(\[1., 1.\]\); it must be one number",
    ),
    "half a step": (
        lambda: broken(lambda d: d["state"][0].update(step=2.5)),
        "step of parameter 0 is 2.5",
    ),
    "a state that is no dict": (
        lambda: broken(lambda d: d.update(state=[])),
        "has no dict 'state' but",
    ),
    "a buffer that is no tensor": (
        lambda: broken(lambda d: d["state"][0].update(grad_sum=[1.0, 2.0, 3.0])),
        "grad_sum of parameter 0 is of type list",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_dict_that_does_not_fit_changes_nothing(name):
    make, message = REFUSED[name]
    optimizer = trained(lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.load_state_dict(make())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, tensor in before["state"][0].items():
        assert torch.equal(tensor, after["state"][0][key])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("compact", [False, True], ids=["sums", "codes"])
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("other", CLASSES)
def test_the_state_of_another_rule_changes_nothing(cls, other, compact, momentum):
    """Without momentum the buffers of one rule are among those of another."""
    if cls is other:
        return
    options = {"compact": compact, "momentum": momentum}
    saved = trained(other, (64, 64), **options).state_dict()
    optimizer = trained(cls, (64, 64), **options)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"load it there|load it with the optimizer that saved it"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for name, tensor in before["state"][0].items():
        assert torch.equal(tensor, after["state"][0][name])
