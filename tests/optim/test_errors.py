"""Bad input: an error with the value, the limit and the remedy, before anything changes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from cubegrad import MADGRAD, MirrorMADGRAD, backends, family

NAN = float("nan")


def param(*shape):
    return nn.Parameter(torch.ones(shape or (3,)))


BAD = [
    ({"lr": -1.0}, "lr=-1.0 must be finite and >= 0; 1e-2 is the default"),
    ({"lr": NAN}, "lr=nan must be finite"),
    ({"lr": torch.tensor(-0.5)}, "lr=-0.5 must be finite"),
    ({"lr": float("inf")}, "lr=inf must be finite"),
    ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\); use 0.9"),
    ({"momentum": -0.1}, "momentum=-0.1 must be finite and >= 0; use 0.9"),
    ({"momentum": NAN}, "momentum=nan must be"),
    ({"eps": -1e-6}, "eps=-1e-06 must be finite and >= 0; use 1e-6, or 0"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0 must be finite and >= 0; use 0"),
    ({"foreach": True, "fused": True}, "foreach=True and fused=True exclude each other"),
    ({"foreach": True, "differentiable": True}, "differentiable=True runs on the eager backend"),
    ({"lr": 0.0, "decoupled_lr": True}, "lr=0 must be > 0 with decoupled_lr=True"),
    ({"weight_decay": 1.5, "decoupled_lr": True}, "weight_decay=1.5 must be <= 1"),
    (
        {"lr": 2.0, "weight_decay": 0.6, "decoupled_weight_decay": True},
        r"lr\*weight_decay=1.2 must be <= 1",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_bad_options_are_refused_at_construction_and_in_groups(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls([param()], **options)
    with pytest.raises(ValueError, match=message):
        cls([{"params": [param()], **options}])
    optimizer = cls([param()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [param()], **options})
    assert len(optimizer.param_groups) == 1


NUMBERS = ["lr", "momentum", "weight_decay", "eps"]


@pytest.mark.parametrize("bad", ["fast", None, 1j, [0.1, 0.2], torch.tensor(1j)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_an_option_that_is_no_number_is_refused(name, bad):
    with pytest.raises(TypeError, match=rf"{name}=.*must be one number"):
        MADGRAD([param()], **{name: bad})


@pytest.mark.parametrize("bad", [torch.ones(2), torch.ones(0), np.ones(2)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_an_option_of_several_numbers_is_a_value_error_as_in_torch(name, bad):
    message = rf"{name}=.*\(shape \({len(bad)},\)\) must be one number"
    with pytest.raises(ValueError, match=message):
        MADGRAD([param()], **{name: bad})
    with pytest.raises(ValueError, match=message):
        family.MADGRAD([param()], **{name: bad})


def test_an_empty_parameter_list_is_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        MADGRAD([])


def test_integer_parameters_are_refused():
    optimizer = MADGRAD([param()])
    integers = torch.ones(3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"params\[0\] has dtype torch.int64.*must be float16"):
        MADGRAD([integers])
    with pytest.raises(TypeError, match=r"params\[1\] has dtype torch.int64"):
        optimizer.add_param_group({"params": [param(), integers]})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_cannot_be_stepped_are_refused():
    eighths = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"params\[0\] has dtype torch.float8_e4m3fn"):
        MADGRAD([eighths])
    conjugated = nn.Parameter(torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(TypeError, match=r"params\[0\] is a conjugated.*resolve_conj"):
        MADGRAD([conjugated])


def test_a_decay_that_a_scheduler_makes_too_strong_is_refused_before_anything_changes():
    first, second = param(), param()
    options = {"weight_decay": 0.1, "decoupled_lr": True, "lr": 1e-3}
    optimizer = MADGRAD([{"params": [first]}, {"params": [second], **options}])
    optimizer.param_groups[1]["lr"] = 0.1
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    with pytest.raises(ValueError, match=r"weight_decay=0.1 at lr=0.1 multiplies .* peak lr"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))
    assert not optimizer.state


@pytest.fixture
def not_built(monkeypatch):
    """As where the extension could not be compiled."""
    reason = "not available: No module named 'cubegrad.backends.native._native'"
    monkeypatch.setattr(backends, "_load", lambda _: reason)


@pytest.mark.usefixtures("not_built")
def test_a_backend_that_is_missing_is_refused_before_any_group_steps():
    first, second = param(), param()
    optimizer = MADGRAD([{"params": [first]}, {"params": [second], "fused": True}])
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    with pytest.raises(RuntimeError, match="fused=True, but"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


def trained(cls=MADGRAD, shape=(3,), **options):
    p = param(*shape)
    optimizer = cls([p], **options)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def adam():
    p = param()
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


def broken(change, **options):
    state_dict = copy.deepcopy(trained(**options).state_dict())
    change(state_dict)
    return state_dict


REFUSED = {
    "another shape": (
        lambda: trained(shape=(4,)).state_dict(),
        r"grad_sum of parameter 0 is torch.float32 of shape \(4,\), its parameter.*\(3,\)",
    ),
    "Adam": (adam, "lacks .*momentum.*it has .*betas.*cubegrad.interop.convert"),
    "RMSprop": (
        lambda: torch.optim.RMSprop([param()]).state_dict(),
        "lacks .*decoupled_weight_decay",
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
    "state of nobody": (
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
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make())
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, tensor in before["state"][0].items():
        assert torch.equal(tensor, after["state"][0][key])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grad_sum", torch.zeros(2)),
        ("grad_sq_sum", torch.zeros(3, dtype=torch.float64)),
        ("step", torch.tensor(1)),
        ("step", torch.ones(1)),
    ],
)
def test_a_fused_step_refuses_a_state_that_it_would_read_beyond(name, value):
    optimizer = trained(fused=True)
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.state[p][name] = value
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"a state tensor is .* must be .* load_state_dict"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.usefixtures("not_built")
def test_fused_without_a_fused_backend_says_so():
    optimizer = MADGRAD([p := param()], fused=True)
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"fused=True, but.*leave fused unset"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))
