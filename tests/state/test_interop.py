"""Checkpoints of other MADGRAD packages, and the runs that continue from them."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from other_packages import (
    EPS,
    FLAGS,
    INSTALLED,
    LAYOUTS,
    LR,
    MIRROR,
    Real,
    Simulated,
    continued,
    saved,
    step,
    tensors,
)

from cubegrad.interop import convert

GOLDEN = Path(__file__).parents[1] / "support" / "golden"


def assert_same(params, expected, atol):
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), other.detach(), rtol=0, atol=atol)


def assert_continues(peer, layout, change=(), **flags):
    for k in range(10):  # the second parameter gets its first gradient late
        first, second = tensors(k + 1)
        peer.step([first, second if k > 3 else None])
    peer.group.update(change)
    optimizer, params = continued(peer.state_dict(), peer.params, layout, **flags)
    for k in range(10, 20):
        peer.step(tensors(k + 1))
        step(optimizer, params, tensors(k + 1))
        assert_same(params, peer.params, atol=1e-12)


def plain(value):
    """The same value with tensors as lists, so that == compares all of it."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.tolist())
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def test_the_authors_checkpoint_continues_as_in_their_package():
    golden = torch.load(GOLDEN / "madgrad_checkpoint.pt")
    optimizer, params = continued(golden["optimizer"], golden["params"])
    assert golden["optimizer"]["state"]["k"] == len(golden["grads"][0]) == 25
    for grads in zip(*golden["grads"], strict=True):
        step(optimizer, params, grads)
    # |x| < 4, so one operation rounds x by up to 2^-23. Theirs rounds it twice a step, ours once,
    # and momentum 0.9 keeps ten steps' worth: 3.6e-6 at worst. Half of that is allowed and 3.6e-7
    # was measured; with an lr without eps the difference would be 4.6e-5.
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
def test_a_run_of_timm_continues_as_it_did_there(run, goes_on):
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
def test_a_run_continues_as_in_its_package(kind, layout, momentum, weight_decay, lr):
    assert_continues(kind(layout, momentum, weight_decay), layout, {"lr": lr})


@pytest.mark.parametrize("layout", ["madgrad", "pytorch_optimizer"])
def test_momentum_lowered_to_zero_drops_x0_as_the_packages_do(layout):
    assert_continues(Real(layout), layout, {"momentum": 0.0})


@pytest.mark.parametrize("lr", [LR, 0.0])
def test_pytorch_optimizer_may_have_a_tensor_lr_and_maximize(lr):
    first, then = (torch.tensor(value, dtype=torch.float64) for value in (LR, lr))
    peer = Real("pytorch_optimizer", lr=first, maximize=True)
    assert_continues(peer, "pytorch_optimizer", {"lr": then}, maximize=True)


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
    before["param_groups"][0]["momentum"] = 0.0  # x0 is still there, and ignored
    assert "initial_param" not in convert(before)["state"][0]


def test_groups_keep_foreign_entries_and_lose_the_packages_own():
    before = saved("pytorch_optimizer")
    added = {"initial_lr": 0.4, "lr_scale": 0.5, "param_names": ["weight", "bias"]}
    before["param_groups"][0] |= added
    optimizer, _ = continued(before, tensors(0), foreach=False, maximize=True, decoupled_lr=True)
    group = optimizer.param_groups[0]
    assert {name: group[name] for name in added} == added
    assert group.keys().isdisjoint({"weight_decouple", "step"})
    assert (group["lr"], group["reference_lr"], group["decoupled_lr"]) == (LR + EPS, 0.4, False)
    assert (group["foreach"], group["maximize"]) == (False, True)  # not from the checkpoint


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
def test_decoupled_decay_is_converted_with_a_warning(layout):
    before = saved(layout, weight_decay=0.1)
    before["param_groups"][0][FLAGS[layout]] = True
    message = rf"groups \[0\] .*{layout.split(',')[0]} shrinks x alone .*cubegrad shrinks x and z"
    with pytest.warns(UserWarning, match=message) as caught:
        group = convert(before)["param_groups"][0]
    assert [warning.filename for warning in caught] == [__file__]
    assert (group["decoupled_weight_decay"], group["weight_decay"]) == (True, 0.1)
    before["param_groups"][0]["weight_decay"] = 0.0  # no warning now: it would be an error
    assert convert(before)["param_groups"][0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_of_a_wrapper_are_kept(layout):
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
