"""Saved and resumed, a run equals the unbroken one bit for bit."""

import copy

import cases
import pytest
import torch
from short_runs import advance, ones, parameters, same_bits, tanh_net, through_a_file
from torch.distributed.checkpoint import state_dict as dcp

from cubegrad import MADGRAD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@cases.each_method
@cases.each_backend_of_a_long_test
def test_resumed_equals_unbroken(backend, method, momentum):
    for dtype in backend.dtypes:
        options = {"momentum": momentum, "weight_decay": 0.01}
        params = parameters([(4, 3)] * 2, dtype, backend.device)
        optimizer = advance(cases.build(method, backend, params, options), params, range(5))
        saved = through_a_file(
            {"params": [p.detach() for p in params], "o": optimizer.state_dict()}
        )
        advance(optimizer, params, range(5, 10))

        resumed = [cases.parameter(p, backend.device) for p in saved["params"]]
        again = cases.build(method, backend, resumed, {"lr": 0.123})
        again.load_state_dict(saved["o"])
        wide = torch.promote_types(dtype, torch.float32)
        assert {t.dtype for p in resumed for k, t in again.state[p].items() if k != "step"} == {
            wide
        }
        advance(again, resumed, range(5, 10))
        assert same_bits(params, resumed)
        for p, q in zip(params, resumed, strict=True):
            for name, tensor in optimizer.state[p].items():
                assert torch.equal(tensor, again.state[q][name])


def test_load_hooks_may_replace_the_state_dict():
    param = ones(3)
    optimizer = advance(MADGRAD([param]), [param], range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    renamed = copy.deepcopy(saved)
    renamed["state"][0]["s"] = renamed["state"][0].pop("grad_sum")
    called = []

    def rename(_, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["grad_sum"] = state_dict["state"][0].pop("s")
        return state_dict

    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_post_hook(lambda _: called.append(True))
    optimizer.load_state_dict(renamed)
    assert called
    assert torch.equal(optimizer.state[param]["grad_sum"], saved["state"][0]["grad_sum"])


def test_a_checkpoint_of_a_capturable_run_loads_into_a_plain_one_and_back():
    param = ones(3)
    optimizer = advance(MADGRAD([param], capturable=True), [param], range(2))
    plain = MADGRAD([param])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["capturable"] = False
    plain.load_state_dict(state_dict)
    advance(plain, [param], range(2, 3))
    assert plain.state[param]["step"] == 3


def test_a_group_saved_without_the_newer_options_gets_them():
    param = ones(3)
    optimizer = advance(MADGRAD([param], lr=0.5), [param], range(1))
    old = copy.deepcopy(optimizer.state_dict())
    for name in ("decoupled_lr", "reference_lr", "maximize"):
        del old["param_groups"][0][name]
    newer = MADGRAD([param], lr=0.1, weight_decay=0.1, decoupled_lr=True)
    newer.load_state_dict(old)
    assert newer.param_groups[0]["reference_lr"] == 0.5
    advance(newer, [param], range(1, 2))
    assert newer.state[param]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@cases.each_class
def test_distributed_checkpoint_state_dicts_round_trip_exactly(cls, momentum, dtype):
    model = tanh_net(4, 5, 2).to(dtype)
    optimizer = cls(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1)
    advance(optimizer, model.parameters(), range(4))
    saved = through_a_file(copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer)))

    fresh = tanh_net(4, 5, 2).to(dtype)
    fresh.load_state_dict(model.state_dict())
    other = cls(fresh.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1)
    with cases.no_change(*fresh.parameters()):
        dcp.set_optimizer_state_dict(fresh, other, saved)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert set(optimizer.state[p]) == set(other.state[q])
        for name, tensor in optimizer.state[p].items():
            assert torch.equal(tensor, other.state[q][name])
            assert tensor.dtype == other.state[q][name].dtype
    for run, opt in ((model, optimizer), (fresh, other)):
        advance(opt, run.parameters(), range(4, 8))
    assert same_bits(model.parameters(), fresh.parameters())
