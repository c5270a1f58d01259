"""Scenarios of test_distributed.py: saved at one number of processes, resumed at another.

The gradients are random, but the same at any number of processes, so that every run must equal the
unbroken one of a single process bit for bit.
"""

import copy
import os
import shutil
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on
from sharded_nets import distributed, net, sharded, whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD
from cubegrad.sharding import local

FOLDER = Path(os.environ.get("FOLDER", "."))  # set for the processes by ranks.run
SETTINGS = {
    "madgrad": (MADGRAD, 0.9, torch.float32),
    "no-momentum": (MADGRAD, 0.0, torch.float32),
    "bfloat16": (MADGRAD, 0.0, torch.bfloat16),
    "mirror": (MirrorMADGRAD, 0.9, torch.bfloat16),
    "madgradw": (MADGRADW, 0.9, torch.bfloat16),
    "schedule-free": (cases.ScheduleFreeMADGRADW, 0.9, torch.float32),
}


def build(setting, shard, seed=0, lr=0.05):
    cls, momentum, dtype = SETTINGS[setting]
    model = net(seed).to(dtype)
    model = sharded(model) if shard else model
    return model, cls(model.parameters(), lr=lr, momentum=momentum, weight_decay=0.01)


def advance(model, optimizer, first, last):
    for k in range(first, last):
        for i, param in enumerate(model.parameters()):
            grad = cases.randn(tuple(param.shape), param.dtype, 50 * k + i)
            shard = isinstance(param, DTensor)
            param.grad = distributed(grad, *param.placements) if shard else grad
        optimizer.step()
    optimizer.zero_grad()


def unbroken(setting):
    model, optimizer = build(setting, shard=False)
    advance(model, optimizer, 0, 8)
    return model, optimizer


def contents(model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def resume(setting, shard, checkpoint, **options):
    """Start with other weights and another lr: the checkpoint must replace them."""
    model, optimizer = build(setting, shard, seed=1, lr=0.7)
    before = [whole(p).clone() for p in model.parameters()]
    target = contents(model, optimizer)
    for old, param in zip(before, model.parameters(), strict=True):
        assert cases.same_bits(old, whole(param)), "the dry step moved a weight"
    dcp.load(target, checkpoint_id=checkpoint, **options)
    set_state_dict(
        model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    for param in model.parameters():
        assert optimizer.state[param]["step"] == 4
        for name, tensor in optimizer.state[param].items():
            assert tensor.dtype == torch.float32
            assert isinstance(tensor, DTensor) == (shard and name != "step")
    return model, optimizer


def check(setting, model, optimizer):
    """Continue to step 8 and compare every weight and buffer with the unbroken run."""
    advance(model, optimizer, 4, 8)
    reference, single = unbroken(setting)
    assert optimizer.param_groups[0]["lr"] == single.param_groups[0]["lr"]
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert cases.same_bits(whole(p), q.detach())
        assert set(optimizer.state[p]) == set(single.state[q])
        for name, tensor in optimizer.state[p].items():
            assert torch.equal(whole(tensor), single.state[q][name]), name


@on(2)
def from_one_plain_process_to_two_sharded():
    for setting in SETTINGS:
        if dist.get_rank() == 0:
            model, optimizer = build(setting, shard=False)
            advance(model, optimizer, 0, 4)
            saved = contents(model, optimizer)
            dcp.save(saved, checkpoint_id=FOLDER / f"one-{setting}", no_dist=True)
        dist.barrier()
        check(setting, *resume(setting, True, FOLDER / f"one-{setting}"))


@on(2)
def from_two_sharded_processes_to_one_plain():
    for setting in SETTINGS:
        model, optimizer = build(setting, shard=True)
        advance(model, optimizer, 0, 4)
        dcp.save(contents(model, optimizer), checkpoint_id=FOLDER / f"two-{setting}")
        if dist.get_rank() == 0:
            check(setting, *resume(setting, False, FOLDER / f"two-{setting}", no_dist=True))
        dist.barrier()


@on(3)
def from_two_sharded_processes_to_three():
    for setting in SETTINGS:
        check(setting, *resume(setting, True, FOLDER / f"two-{setting}"))


@on(2)
def an_asynchronous_save_has_the_state_at_its_call():
    for setting in SETTINGS:
        model, optimizer = build(setting, shard=True)
        advance(model, optimizer, 0, 4)
        place = FOLDER / f"async-{setting}"
        writing = dcp.async_save(contents(model, optimizer), checkpoint_id=place)
        advance(model, optimizer, 4, 6)  # while it is being written
        writing.result()
        check(setting, *resume(setting, True, place))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)


@on(2)
def a_full_state_dict_is_cut_into_shards_again():
    full = StateDictOptions(full_state_dict=True)
    for setting in SETTINGS:
        model, optimizer = build(setting, shard=True)
        advance(model, optimizer, 0, 4)
        weights, state = get_state_dict(model, optimizer, options=full)
        tensors = [t for entries in state["state"].values() for t in entries.values()]
        assert not any(isinstance(t, DTensor) for t in (*weights.values(), *tensors))
        again, other = build(setting, shard=True, seed=1)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state, options=full)
        check(setting, again, other)


@on(2)
def a_negative_sum_is_refused_by_the_rank_that_holds_it():
    model, optimizer = build("madgrad", shard=True)
    advance(model, optimizer, 0, 2)
    for rank in range(2):
        saved = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == rank:
            saved["state"][0]["grad_sq_sum"].to_local().fill_(-1.0)
        before = copy.deepcopy(optimizer.state_dict())
        if dist.get_rank() == rank:
            with pytest.raises(ValueError, match=r"grad_sq_sum of parameter 0 is -1\.0"):
                optimizer.load_state_dict(saved)
        else:
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        for key, entries in before["state"].items():
            for name, tensor in entries.items():
                assert torch.equal(local(tensor), local(after["state"][key][name]))


@on(2)
def momentum_raised_before_saving_is_saved_with_the_shards_of_x_0():
    model, optimizer = build("no-momentum", shard=True)
    starts = [local(param).detach().clone() for param in model.parameters()]
    advance(model, optimizer, 0, 3)
    optimizer.param_groups[0]["momentum"] = 0.9
    saved = optimizer.state_dict()["state"]
    for key, (start, param) in enumerate(zip(starts, model.parameters(), strict=True)):
        start_shard = saved[key]["initial_param"]
        assert start_shard.placements == param.placements
        torch.testing.assert_close(local(start_shard), start, rtol=0, atol=1e-6)
        assert "initial_param" not in optimizer.state[param]


@on(2)
def entries_of_a_wrapper_are_loaded_with_the_shards():
    model, optimizer = build("bfloat16", shard=True)
    advance(model, optimizer, 0, 1)
    for param in model.parameters():
        optimizer.state[param]["slow"] = param.detach().clone()
    other = build("bfloat16", shard=True)[1]
    other.load_state_dict(optimizer.state_dict())
    pairs = zip(model.parameters(), other.param_groups[0]["params"], strict=True)
    for param, twin in pairs:
        slow = other.state[twin]["slow"]
        assert slow.placements == param.placements
        assert torch.equal(local(slow), local(param))
