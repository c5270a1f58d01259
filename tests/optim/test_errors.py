"""Bad input: an error with the value, the limit and the remedy, before anything changes."""

import re

import cases
import numpy as np
import pytest
import torch
from short_runs import advance, ones, parameters
from torch import nn

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, backends, family, options

NAN = float("nan")


BAD_OPTIONS = [
    ({"lr": -1.0}, "lr=-1.0 must be finite and >= 0; start from the default"),
    ({"lr": NAN}, "lr=nan must be finite"),
    ({"lr": torch.tensor(-0.5)}, "lr=-0.5 must be finite"),
    ({"lr": float("inf")}, "lr=inf must be finite"),
    ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\); use 0.9"),
    ({"momentum": -0.1}, "momentum=-0.1 must be finite and >= 0; use 0.9"),
    ({"momentum": NAN}, "momentum=nan must be"),
    ({"eps": -1e-6}, "eps=-1e-06 must be finite and >= 0; use the default, or 0"),
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


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
@cases.each_class
def test_bad_options_are_refused_at_construction_and_in_groups(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls([ones()], **options)
    with pytest.raises(ValueError, match=message):
        cls([{"params": [ones()], **options}])
    optimizer = cls([ones()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [ones()], **options})
    assert len(optimizer.param_groups) == 1


NUMBERS = ["lr", "momentum", "weight_decay", "eps"]


@pytest.mark.parametrize("bad", ["fast", "0.1", None, 1j, [0.1, 0.2], torch.tensor(1j)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
@cases.each_class
def test_an_option_that_is_no_number_is_refused(cls, name, bad):
    """A string too: float("0.1") is 0.1, but the first step would fail."""
    if cls is MADGRADW and name == "momentum" and bad == [0.1, 0.2]:
        return  # AdamW's betas
    with pytest.raises(TypeError, match=rf"{name}={re.escape(repr(bad))} .*must be one number"):
        cls([ones()], **{name: bad})


@pytest.mark.parametrize("bad", [torch.ones(2), torch.ones(0), np.ones(2)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD, MADGRADW, family.MADGRAD])
def test_an_option_of_several_numbers_is_a_value_error_as_in_torch(cls, name, bad):
    message = rf"{name}=.*\(shape \({len(bad)},\)\) must be one number"
    with pytest.raises(ValueError, match=message):
        cls([ones()], **{name: bad})


@pytest.mark.parametrize("bad", [True, False, np.True_, torch.tensor(True)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
@cases.each_class
def test_a_boolean_is_no_number(cls, name, bad):
    """lr=True would train at a rate of 1. False is refused as well, though it can only mean 0."""
    with pytest.raises(TypeError, match=rf"{name}={re.escape(repr(bad))} .* must be one number; "):
        cls([ones()], **{name: bad})


BAD_FLAGS = [
    (
        "decoupled_weight_decay",
        0.1,
        r"0\.1 \(float\) must be True or False; "
        "pass weight_decay=0.1, decoupled_weight_decay=True",
    ),
    ("decoupled_weight_decay", "yes", "'yes' .* pass decoupled_weight_decay=True, or leave it out"),
    ("compact", "yes", r"'yes' \(str\) must be True or False; pass compact=True, or leave it out"),
    ("fused", "no", "'no' .* must be True, False or None; pass fused=True, or leave it out"),
    ("compact", None, "None .* must be True or False; pass compact=True, or leave it out"),
    ("maximize", 2, "2 .* must be True or False"),
    ("capturable", torch.tensor(True), r"tensor\(True\) \(Tensor\) must be True or False"),
]
BAD_FLAGS += [(name, bad, "") for name in options.FLAGS for bad in (1.0, "False", [True])]


@pytest.mark.parametrize(("name", "bad", "message"), BAD_FLAGS)
@cases.each_class
def test_a_flag_that_is_no_boolean_is_refused(cls, name, bad, message):
    """decoupled_weight_decay=0.1 meant no decay at all: weight_decay was still 0."""
    message, group = f"{name}={message}", {"params": [ones()], name: bad}
    with pytest.raises(TypeError, match=message):
        cls([ones()], **{name: bad})
    optimizer = cls([ones()])
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    saved = cls([ones()]).state_dict()
    saved["param_groups"][0][name] = bad
    with pytest.raises(TypeError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][name] is optimizer.defaults[name]


@pytest.mark.parametrize("name", options.FLAGS)
@cases.each_class
def test_a_flag_that_is_changed_to_no_boolean_is_refused_in_the_next_step(cls, name):
    param = ones()
    optimizer = advance(cls([param]), [param], range(3))  # by then a step repeats the last one
    optimizer.param_groups[0][name] = "yes"
    param.grad = torch.ones_like(param)
    with cases.no_change(param), pytest.raises(TypeError, match=f"{name}='yes' .* must be True"):
        optimizer.step()


@pytest.mark.parametrize("yes", [1, np.True_])
@pytest.mark.parametrize("name", options.FLAGS)
@cases.each_class
def test_numpys_booleans_and_0_and_1_are_taken_as_booleans(cls, name, yes):
    """0 and 1 come from command lines and older checkpoints, and cannot mean anything else."""
    no = type(yes)(0)
    optimizer = cls([{"params": [ones()], name: yes}, {"params": [ones()]}], **{name: no})
    assert optimizer.defaults[name] is False
    assert [group[name] for group in optimizer.param_groups] == [True, False]
    assert all(type(group[name]) is bool for group in optimizer.param_groups)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group[name] = type(yes)(group[name])
    optimizer.load_state_dict(saved)
    assert [group[name] for group in optimizer.param_groups] == [True, False]


UNKNOWN = {
    "betas": r"has momentum \(0\.9\), not betas",
    "amsgrad": "has no amsgrad",
    "nesterov": "has no Nesterov momentum",
    "dampening": "averages weights where SGD adds up gradients; leave dampening out",
    "alpha": "weighs the squares of the gradients itself",
    "decouple": "has decoupled_weight_decay, not decouple",
    "decouple_decay": "has decoupled_weight_decay, not decouple_decay",
    "learning_rate": "has lr, not learning_rate",
    "weight_deacy": "has weight_decay, not weight_deacy",
    "colour": "has no option colour",
}


@pytest.mark.parametrize("name", UNKNOWN)
@cases.each_class
def test_an_option_that_it_does_not_have_is_refused_with_a_hint(cls, name):
    if cls is MADGRADW and name in ("betas", "amsgrad"):
        return  # test_adamw_calls.py
    message = rf"^{cls.__name__} {UNKNOWN[name]}.*\. It takes params, lr, momentum, .*compact"
    with pytest.raises(TypeError, match=message):
        cls([ones()], lr=0.1, **{name: 0.5})


@cases.each_class
def test_other_optimizers_options_in_a_group_are_refused_but_not_a_users_own_entries(cls):
    optimizer = cls([{"params": [ones()], "name": "head", "lr_scale": 0.5}])
    assert optimizer.param_groups[0]["lr_scale"] == 0.5
    message = rf"^{cls.__name__} averages weights where SGD adds up gradients; leave dampening out"
    with pytest.raises(TypeError, match=message):
        cls([{"params": [ones()], "dampening": 0.1}])
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": [ones()], "dampening": 0.1})
    assert len(optimizer.param_groups) == 1


@cases.each_class
def test_the_options_that_messages_name_are_those_it_takes(cls):
    optimizer = cls([ones()])
    taken = set(optimizer.defaults) - {"auto_lr", "rule"}
    assert taken == set(options.TAKEN)


def test_integer_parameters_are_refused():
    optimizer = MADGRAD([ones()])
    integers = torch.ones(3, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"params\[0\] has dtype torch.int64.*must be float16"):
        MADGRAD([integers])
    with pytest.raises(TypeError, match=r"params\[1\] has dtype torch.int64"):
        optimizer.add_param_group({"params": [ones(), integers]})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_cannot_be_stepped_are_refused():
    float8 = torch.ones(3).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"params\[0\] has dtype torch.float8_e4m3fn"):
        MADGRAD([float8])
    conjugated = nn.Parameter(torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(TypeError, match=r"params\[0\] is a conjugated.*resolve_conj"):
        MADGRAD([conjugated])


def test_a_decay_that_a_scheduler_makes_too_strong_is_refused_before_anything_changes():
    first, second = ones(), ones()
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
    """Pretend that the extension could not be compiled."""
    reason = "not available: No module named 'cubegrad.backends.native._native'"
    monkeypatch.setattr(backends, "_load", lambda _: reason)


@pytest.mark.usefixtures("not_built")
def test_a_backend_that_is_missing_is_refused_before_any_group_steps():
    first, second = ones(), ones()
    optimizer = MADGRAD([{"params": [first]}, {"params": [second], "fused": True}])
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    with pytest.raises(RuntimeError, match=r"fused=True, but.*leave fused unset"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


def test_a_wrong_state_is_refused_before_any_tensor_of_the_group_is_stepped():
    """Of two dtypes, which a fused step updates one after the other."""
    first, second = ones(), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = MADGRAD([first, second], fused=True)
    for _ in range(2):
        first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
        optimizer.step()
    optimizer.state[second]["grad_sum"] = torch.zeros(2, dtype=torch.float64)
    own = [first, second, *optimizer.state[first].values()]
    with cases.no_change(*own), pytest.raises(ValueError, match=r"shape \(2,\).*\(3,\)"):
        optimizer.step()


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
    param = ones()
    optimizer = advance(MADGRAD([param], fused=True), [param], range(1))
    optimizer.state[param][name] = value
    message = r"a state tensor is .* must be .* load_state_dict"
    with cases.no_change(param), pytest.raises(ValueError, match=message):
        optimizer.step()


BAD_GRADIENTS = {
    "int": lambda p: torch.ones_like(p, dtype=torch.int32),
    "bool": lambda p: torch.ones_like(p, dtype=torch.bool),
    "float8": lambda p: torch.ones_like(p).to(torch.float8_e4m3fn),
    "complex": lambda p: torch.ones_like(p, dtype=torch.complex64),
}


@cases.each_fast_backend
@pytest.mark.parametrize("bad", BAD_GRADIENTS)
@pytest.mark.parametrize("repeated", [False, True])
def test_a_gradient_of_another_dtype_is_refused_before_anything_changes(backend, bad, repeated):
    params = parameters([(4, 3), (3,)], device=backend.device)
    optimizer = MADGRAD([{"params": [param]} for param in params], lr=0.1, **backend.flags)
    if repeated:
        advance(optimizer, params, range(2))
    for param in params:
        param.grad = torch.ones_like(param)
    params[1].grad.data = BAD_GRADIENTS[bad](params[1])
    with cases.no_change(*params), pytest.raises(TypeError, match="gradient of params"):
        optimizer.step()


def test_a_parameter_without_a_gradient_may_be_on_another_device():
    """The backend is chosen for those that are stepped."""
    live, meta = ones(3), nn.Parameter(torch.ones(3, device="meta"))
    for flags in ({"fused": True}, {}):
        for rate in (0.1, "auto"):
            optimizer = MADGRAD([meta, live], lr=rate, **flags)
            live.grad = torch.ones(3)
            for _ in range(3):
                optimizer.step()
            assert optimizer._repeats.prepared
            assert optimizer._step_supports_amp_scaling
            assert meta not in optimizer.state
