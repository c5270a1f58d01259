"""Checkpoints of other MADGRAD packages, and the runs that go on from them."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

import cubegrad
from cubegrad.interop import convert

GOLDEN = Path(__file__).parents[1] / "support" / "golden"
LR, EPS = 0.05, 1e-3  # an eps that shows wherever it is added
MIRROR, FLAGLESS = "madgrad, mirror", "madgrad, no flag"
FLAGS = {
    "madgrad": "decouple_decay",
    MIRROR: "decouple_decay",
    "timm": "decoupled_decay",
    "pytorch_optimizer": "weight_decouple",
}
LAYOUTS = [*FLAGS, FLAGLESS]
INSTALLED = [layout for layout in LAYOUTS if layout != "timm"]  # timm needs torchvision


class Simulated:
    """What the packages compute, in float64, and the state dict that each makes of it."""

    def __init__(self, layout, momentum=0.9, weight_decay=0.0):
        self.layout, self.params, self.k, self.state = layout, tensors(0), 0, {}
        self.group = {"lr": LR, "eps": EPS, "momentum": momentum, "weight_decay": weight_decay}
        self.group["params"] = [0, 1]
        if layout in FLAGS:
            self.group[FLAGS[layout]] = False
        if layout == "pytorch_optimizer":
            self.group |= {"foreach": None, "step": 0}

    def step(self, grads):
        for index, grad in enumerate(grads):
            if grad is not None:
                self._move(index, grad + self.group["weight_decay"] * self.params[index])
        self.k += 1

    def _move(self, index, grad):
        x, lr, momentum = self.params[index], self.group["lr"], self.group["momentum"]
        fresh = {"step": 0, "s": torch.zeros_like(x), "nu": torch.zeros_like(x), "x0": x, "z": x}
        at = self.state.setdefault(index, fresh)
        n = 1 + (at["step"] if self.layout == "timm" else self.k)
        lr = lr + EPS if lr or self.layout == "timm" else 0.0
        if self.layout == MIRROR:
            at["nu"] = at["nu"] * (1 - 1 / n) ** 0.5 + grad**2
            at["z"] = at["z"] - lr * n ** (1 / 3) * grad / (at["nu"] ** (1 / 3) + EPS)
        else:
            at["s"] = at["s"] + lr * n**0.5 * grad
            at["nu"] = at["nu"] + lr * n**0.5 * grad**2
            at["z"] = at["x0"] - at["s"] / (at["nu"] ** (1 / 3) + EPS)
        at["step"] += 1
        self.params[index] = momentum * x + (1 - momentum) * at["z"]

    def state_dict(self):
        names = {"z": "z"} if self.layout == MIRROR else {"s": "s"}
        names |= {"nu": "grad_sum_sq"}
        if self.layout != MIRROR and self.group["momentum"]:
            names["x0"] = "x0"
        if self.layout == "timm":
            names["step"] = "step"
        state = {i: {new: at[name] for name, new in names.items()} for i, at in self.state.items()}
        if self.layout != "timm" and self.k:
            state["k"] = torch.tensor([self.k])
        return deepcopy({"state": state, "param_groups": [self.group]})


class Real:
    """The package itself, where it is installed."""

    def __init__(self, layout, momentum=0.9, weight_decay=0.0, **options):
        self.params = [torch.nn.Parameter(x) for x in tensors(0)]
        options = {"lr": LR, "momentum": momentum, "weight_decay": weight_decay} | options
        self.optimizer = package_class(layout)(self.params, eps=EPS, **options)
        self.state_dict, self.group = self.optimizer.state_dict, self.optimizer.param_groups[0]
        if layout == FLAGLESS:
            del self.group["decouple_decay"]

    def step(self, grads):
        step(self.optimizer, self.params, grads)


def package_class(layout):
    module = pytest.importorskip(layout.split(",")[0], exc_type=ImportError)
    return module.MirrorMADGRAD if layout == MIRROR else module.MADGRAD


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in [(3, 4), (5,)]]


def step(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def continued(state_dict, params, layout="madgrad", **flags):
    """cubegrad, built with settings that the checkpoint must replace."""
    params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer = cubegrad.MirrorMADGRAD if layout == MIRROR else cubegrad.MADGRAD
    optimizer = optimizer(params, lr=0.7, momentum=0.3, weight_decay=0.2, eps=0.1, **flags)
    optimizer.load_state_dict(convert(state_dict))
    return optimizer, params


def assert_same(params, expected, atol):
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=0, atol=atol)


def assert_goes_on(peer, layout, change=(), **flags):
    for k in range(10):  # the second parameter gets its first gradient late
        first, second = tensors(k + 1)
        peer.step([first, second if k > 3 else None])
    peer.group.update(change)
    optimizer, params = continued(peer.state_dict(), peer.params, layout, **flags)
    for k in range(10, 20):
        peer.step(tensors(k + 1))
        step(optimizer, params, tensors(k + 1))
        assert_same(params, peer.params, atol=1e-12)


def saved(layout="madgrad", **options):
    peer = Simulated(layout, **options)
    for k in range(3):
        peer.step(tensors(k + 1))
    return peer.state_dict()


def plain(value):
    """The same nest with tensors as lists, so that == compares all of it."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.tolist())
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def test_the_authors_checkpoint_goes_on_to_where_it_went_in_their_package():
    golden = torch.load(GOLDEN / "madgrad_checkpoint.pt")
    optimizer, params = continued(golden["optimizer"], golden["params"])
    assert golden["optimizer"]["state"]["k"] == len(golden["grads"][0]) == 25
    for grads in zip(*golden["grads"], strict=True):
        step(optimizer, params, grads)
    # |x| < 4, so one operation rounds x by up to 2^-23. Theirs rounds it twice a step, ours once,
    # and momentum 0.9 keeps ten steps' worth: 3.6e-6 at worst. Half of that holds the measured
    # 3.6e-7; an lr without eps would end 4.6e-5 away.
    assert_same(params, golden["after"], atol=1.8e-6)


TIMM = torch.load(GOLDEN / "timm.pt")
TIMM_RUNS = [
    pytest.param(
        run,
        goes_on,
        id=f"{group['momentum']}-{group['weight_decay']}-{run['saved_at']}-{goes_on['change']}",
    )
    for run in TIMM["runs"]
    for group in run["optimizer"]["param_groups"]
    for goes_on in run["goes_on"]
]


@pytest.mark.parametrize(("run", "goes_on"), TIMM_RUNS)
def test_a_run_of_timm_goes_on_as_it_did_there(run, goes_on):
    state_dict = deepcopy(run["optimizer"])
    state_dict["param_groups"][0].update(goes_on["change"])
    optimizer, params = continued(state_dict, run["params"], "timm")
    assert len(optimizer.state) == (2 if run["saved_at"] else 0)
    for k, expected in enumerate(zip(*goes_on["after"], strict=True), run["saved_at"]):
        step(optimizer, params, [grad[k] for grad in TIMM["grads"]])
        assert_same(params, expected, atol=1e-12)
    assert k == 19


KINDS = [(Simulated, layout) for layout in LAYOUTS] + [(Real, layout) for layout in INSTALLED]


@pytest.mark.parametrize("lr", [LR, 0.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_a_run_goes_on_as_it_would_have(kind, layout, momentum, weight_decay, lr):
    assert_goes_on(kind(layout, momentum, weight_decay), layout, {"lr": lr})


@pytest.mark.parametrize("layout", ["madgrad", "pytorch_optimizer"])
def test_momentum_lowered_to_zero_forgets_x0_as_the_packages_do(layout):
    assert_goes_on(Real(layout), layout, {"momentum": 0.0})


@pytest.mark.parametrize("lr", [LR, 0.0])
def test_pytorch_optimizer_may_have_a_tensor_lr_and_maximize(lr):
    first, then = (torch.tensor(value, dtype=torch.float64) for value in (LR, lr))
    peer = Real("pytorch_optimizer", lr=first, maximize=True)
    assert_goes_on(peer, "pytorch_optimizer", {"lr": then}, maximize=True)


@pytest.mark.parametrize(("kind", "layout"), [pair for pair in KINDS if pair[1] in FLAGS])
def test_a_state_dict_from_before_the_first_step_starts_a_run(kind, layout):
    peer = kind(layout)
    optimizer, params = continued(peer.state_dict(), peer.params, layout)
    assert not optimizer.state
    for k in range(10):
        peer.step(tensors(k + 1))
        step(optimizer, params, tensors(k + 1))
    assert_same(params, peer.params, atol=1e-12)


@pytest.mark.parametrize("entry", [None, {}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_without_a_gradient_so_far_has_no_state(layout, entry):
    peer = Simulated(layout)
    peer.step([tensors(1)[0], None])
    before = peer.state_dict()
    if entry is not None:
        before["state"][1] = entry
    optimizer, params = continued(before, peer.params, layout)
    assert [param in optimizer.state for param in params] == [True, False]


def test_the_converted_state_has_cubegrads_names():
    before = saved()
    entry = convert(before)["state"][1]
    assert sorted(entry) == ["grad_sq_sum", "grad_sum", "initial_param", "step"]
    assert plain(entry["step"]) == (torch.float32, 3.0)
    for ours, name in [("grad_sum", "s"), ("grad_sq_sum", "grad_sum_sq"), ("initial_param", "x0")]:
        assert torch.equal(entry[ours], before["state"][1][name])
    assert sorted(convert(saved(MIRROR))["state"][0]) == ["grad_sq_sum", "step", "z"]
    assert "initial_param" not in convert(saved(momentum=0.0))["state"][0]
    before["param_groups"][0]["momentum"] = 0.0  # x0 is there still, and unread
    assert "initial_param" not in convert(before)["state"][0]


def test_groups_keep_what_others_added_and_lose_the_packages_own():
    before = saved("pytorch_optimizer")
    added = {"initial_lr": 0.4, "lr_scale": 0.5, "param_names": ["weight", "bias"]}
    before["param_groups"][0] |= added
    optimizer, _ = continued(before, tensors(0), foreach=False, maximize=True, decoupled_lr=True)
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in added} == added
    assert group.keys().isdisjoint({"weight_decouple", "step"})
    assert (group["lr"], group["reference_lr"], group["decoupled_lr"]) == (LR + EPS, 0.4, False)
    assert (group["foreach"], group["maximize"]) == (False, True)  # no business of a checkpoint


def test_low_precision_state_becomes_float32():
    before = saved()
    for entry in (before["state"][0], before["state"][1]):
        entry.update({name: value.bfloat16() for name, value in entry.items()})
    optimizer, params = continued(before, [x.bfloat16() for x in tensors(0)])
    state = optimizer.state[params[0]]
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert torch.equal(state["grad_sum"], before["state"][0]["s"].float())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_input_is_not_modified(layout):
    before = saved(layout, weight_decay=0.1)
    before["param_groups"][0] |= {"initial_lr": 0.4, "lr": torch.tensor(LR)}
    copy = deepcopy(before)
    optimizer, params = continued(before, tensors(0), layout)
    step(optimizer, params, tensors(9))
    assert plain(before) == plain(copy)


@pytest.mark.parametrize("layout", FLAGS)
def test_decoupled_decay_is_taken_over_with_a_warning(layout):
    before = saved(layout, weight_decay=0.1)
    before["param_groups"][0][FLAGS[layout]] = True
    says = rf"groups \[0\] .*{layout.split(',')[0]} shrinks x alone .*cubegrad shrinks x and z"
    with pytest.warns(UserWarning, match=says) as caught:
        group = convert(before)["param_groups"][0]
    assert [warning.filename for warning in caught] == [__file__]
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)
    before["param_groups"][0]["weight_decay"] = 0.0  # warns no more, and a warning is an error
    assert convert(before)["param_groups"][0]["decoupled_weight_decay"] is True


def assert_refused(state_dict, found, expected):
    with pytest.raises(ValueError, match="pass the whole state_dict") as error:
        convert(state_dict)
    before, after = str(error.value).split("; expected ")
    assert found in before
    assert expected in after


@pytest.mark.parametrize(
    ("layout", "spoil", "found", "expected"),
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
def test_a_state_dict_cut_short_or_mixed_is_refused(layout, spoil, found, expected):
    state_dict = saved(layout)
    spoil(state_dict)
    assert_refused(state_dict, found, expected)


@pytest.mark.parametrize(
    ("layout", "spoil", "message"),
    [
        ("madgrad", lambda d: d["state"].update(k="x"), "step count of parameter 0 is 'x'"),
        ("timm", lambda d: d["state"][0].update(step=torch.ones(2)), "must be one number"),
        ("timm", lambda d: d["param_groups"][0].update(lr=torch.ones(2)), r"shape \(2,\)"),
        ("timm", lambda d: d["param_groups"][0].update(momentum=torch.ones(2)), r"shape \(2,\)"),
    ],
)
def test_what_must_be_one_number_is_refused_otherwise(layout, spoil, message):
    state_dict = saved(layout)
    spoil(state_dict)
    with pytest.raises(ValueError, match=message):
        convert(state_dict)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_negative_sum_of_squares_is_refused_when_it_is_loaded(layout):
    before = saved(layout)
    before["state"][1]["grad_sum_sq"][2] = -1.0
    with pytest.raises(ValueError, match=r"grad_sq_sum of parameter 1 is -1\.0"):
        continued(before, tensors(0), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_wrapper_has_added_comes_along(layout):
    before = saved(layout)
    before["state"][0]["slow_buffer"] = tensors(5)[0]
    before["state"]["note"] = {"kept": 3}
    optimizer, params = continued(before, tensors(0), layout)
    assert torch.equal(optimizer.state[params[0]]["slow_buffer"], tensors(5)[0])
    assert "slow_buffer" not in optimizer.state[params[1]]
    assert optimizer.state["note"] == {"kept": 3}
    before["state"][1] = {"slow_buffer": tensors(5)[1]}  # of a parameter that never stepped
    optimizer, params = continued(before, tensors(0), layout)
    assert optimizer.state[params[1]].keys() == {"slow_buffer"}


def test_a_momentum_of_0_that_was_a_tensor_still_needs_no_x0():
    before = saved(momentum=0.0)
    before["param_groups"][0]["momentum"] = torch.tensor(0.0)
    optimizer, params = continued(before, tensors(0))
    assert optimizer.param_groups[0]["momentum"] == 0
    assert "initial_param" not in optimizer.state[params[0]]


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop"])
def test_another_optimizer_is_refused(name, stepped):
    params = [torch.nn.Parameter(x) for x in tensors(0)]
    optimizer = getattr(torch.optim, name)(params, lr=LR)
    if stepped:
        step(optimizer, params, tensors(1))
    found = f"{sorted(optimizer.state_dict()['param_groups'][0])} in param group 0"
    assert_refused(optimizer.state_dict(), found, "one of ['decouple_decay', 'decoupled_decay'")


def test_cubegrads_own_state_dict_is_sent_to_load_state_dict():
    optimizer, _ = continued(saved(), tensors(0))
    with pytest.raises(ValueError, match=r"so cubegrad wrote it; .*load_state_dict as it is"):
        convert(optimizer.state_dict())


@pytest.mark.parametrize(("layout", "other"), [("madgrad", MIRROR), (MIRROR, "madgrad")])
def test_load_state_dict_refuses_the_other_form(layout, other):
    with pytest.raises(ValueError, match="madgrad keeps"):
        continued(saved(layout), tensors(0), other)
