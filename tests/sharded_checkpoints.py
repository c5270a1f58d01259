"""Scenarios of test_distributed.py: saved at one number of processes, resumed at another.

The gradients are made up, the same at any number of processes, so that every run must end at the
bits of the unbroken one in a single process.
"""

import os
import shutil
from pathlib import Path

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on
from sharded_nets import net, sharded, spread, whole
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from cubegrad import MADGRAD, MirrorMADGRAD

FOLDER = Path(os.environ.get("FOLDER", "."))  # set for the processes by ranks.run
SETTINGS = {
    "madgrad": (MADGRAD, 0.9, torch.float32),
    "no-momentum": (MADGRAD, 0.0, torch.float32),
    "bfloat16": (MADGRAD, 0.0, torch.bfloat16),
    "mirror": (MirrorMADGRAD, 0.9, torch.bfloat16),
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
            is_spread = isinstance(param, DTensor)
            param.grad = spread(grad, *param.placements) if is_spread else grad
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
    """From other weights and another lr: all that counts comes from the checkpoint."""
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
    """Go on to step 8 and compare every weight and buffer with the unbroken run."""
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
def an_asynchronous_save_holds_the_moment_it_was_called():
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
