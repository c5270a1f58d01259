"""Saved and resumed, a run equals the unbroken one bit for bit."""

import copy
import io

import cases
import pytest
import torch
from cases import BACKENDS, METHODS
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from cubegrad import MADGRAD, MirrorMADGRAD


def net(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).to(dtype)


def advance(params, optimizer, first, last):
    for k in range(first, last):
        for i, param in enumerate(params):
            param.grad = cases.randn(tuple(param.shape), param.dtype, 50 * k + i).to(param.device)
        optimizer.step()


def through_a_file(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_resumed_equals_unbroken(backend, method, momentum):
    for dtype in backend.dtypes:
        options = {"momentum": momentum, "weight_decay": 0.01}
        params = [cases.parameter(cases.randn((4, 3), dtype, i), backend.device) for i in range(2)]
        optimizer = cases.build(method, backend, params, options)
        advance(params, optimizer, 0, 5)
        saved = through_a_file(
            {"params": [p.detach() for p in params], "o": optimizer.state_dict()}
        )
        advance(params, optimizer, 5, 10)

        resumed = [cases.parameter(p, backend.device) for p in saved["params"]]
        again = cases.build(method, backend, resumed, {"lr": 0.123})
        again.load_state_dict(saved["o"])
        wide = torch.promote_types(dtype, torch.float32)
        assert {t.dtype for p in resumed for k, t in again.state[p].items() if k != "step"} == {
            wide
        }
        advance(resumed, again, 5, 10)
        for p, q in zip(params, resumed, strict=True):
            assert cases.same_bits(p.detach(), q.detach())
            for name, tensor in optimizer.state[p].items():
                assert torch.equal(tensor, again.state[q][name])


def test_a_loaded_state_is_a_copy_with_the_parameters_strides():
    param = nn.Parameter(torch.randn(2, 3, 4, 4))
    optimizer = MADGRAD([param])
    advance([param], optimizer, 0, 1)
    image = nn.Parameter(param.detach().to(memory_format=torch.channels_last))
    other = MADGRAD([image])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[image]["grad_sum"].stride() == image.stride()
    with cases.no_change(*optimizer.state[param].values()):
        advance([image], other, 1, 2)


def test_load_hooks_may_replace_the_state_dict():
    param = nn.Parameter(torch.ones(3))
    optimizer = MADGRAD([param])
    advance([param], optimizer, 0, 2)
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
    param = nn.Parameter(torch.ones(3))
    optimizer = MADGRAD([param], capturable=True)
    advance([param], optimizer, 0, 2)
    plain = MADGRAD([param])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["capturable"] = False
    plain.load_state_dict(state_dict)
    advance([param], plain, 2, 3)
    assert plain.state[param]["step"] == 3


def test_a_group_saved_without_the_newer_options_gets_them():
    param = nn.Parameter(torch.ones(3))
    optimizer = MADGRAD([param], lr=0.5)
    advance([param], optimizer, 0, 1)
    old = copy.deepcopy(optimizer.state_dict())
    for name in ("decoupled_lr", "reference_lr", "maximize"):
        del old["param_groups"][0][name]
    newer = MADGRAD([param], lr=0.1, weight_decay=0.1, decoupled_lr=True)
    newer.load_state_dict(old)
    assert newer.param_groups[0]["reference_lr"] == 0.5
    advance([param], newer, 1, 2)
    assert newer.state[param]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_distributed_checkpoint_state_dicts_round_trip_exactly(cls, momentum, dtype):
    model = net(dtype)
    optimizer = cls(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1)
    advance(list(model.parameters()), optimizer, 0, 4)
    saved = through_a_file(copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer)))

    fresh = net(dtype)
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
        advance(list(run.parameters()), opt, 4, 8)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert cases.same_bits(p.detach(), q.detach())
