"""Scenarios of test_distributed.py: codes saved at one number of processes, resumed at another."""

import copy
import itertools
import os
import shutil
import warnings
from pathlib import Path

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on
from sharded_compact import SETTINGS, SHAPES, advance, assert_same_runs, build
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from cubegrad import MADGRAD

FOLDER = Path(os.environ.get("FOLDER", "."))  # set for the processes by ranks.run


def contents(model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def resume(setting, shard, checkpoint, **options):
    model, optimizer = build(setting, shard, seed=9, lr=0.7)
    target = contents(model, optimizer)
    dcp.load(target, checkpoint_id=checkpoint, **options)
    set_state_dict(
        model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    return model, optimizer


def check(setting, model, optimizer):
    advance(model, optimizer, 3, 6)
    reference, single = build(setting, shard=False)
    advance(reference, single, 0, 6)
    assert_same_runs(model, optimizer, reference, single)


@on(2)
def compact_from_one_process_to_two():
    for setting in SETTINGS:
        if dist.get_rank() == 0:
            run = build(setting, shard=False)
            advance(*run, 0, 3)
            dcp.save(contents(*run), checkpoint_id=FOLDER / f"codes-1-{setting}", no_dist=True)
        dist.barrier()
        check(setting, *resume(setting, True, FOLDER / f"codes-1-{setting}"))


@on(2)
def compact_from_two_processes_to_one():
    for setting in SETTINGS:
        run = build(setting, shard=True)
        advance(*run, 0, 3)
        dcp.save(contents(*run), checkpoint_id=FOLDER / f"codes-2-{setting}")
        if dist.get_rank() == 0:
            check(setting, *resume(setting, False, FOLDER / f"codes-2-{setting}", no_dist=True))
        dist.barrier()


@on(3)
def compact_from_two_processes_to_three_and_back():
    for setting in SETTINGS:
        model, optimizer = resume(setting, True, FOLDER / f"codes-2-{setting}")
        again = FOLDER / f"codes-3-{setting}"
        dcp.save(contents(model, optimizer), checkpoint_id=again)
        check(setting, model, optimizer)
        if dist.get_rank() == 0:
            check(setting, *resume(setting, False, again, no_dist=True))
        dist.barrier()


@on(2)
def a_checkpoint_on_disk_has_the_bytes_of_the_state():
    limits = {"madgrad": 4.2, "no-momentum": 3.2, "bfloat16": 4.2, "mirror": 2.2}
    for setting, limit in limits.items():
        model, optimizer = build(setting, shard=True, shapes=[(1025, 512)])
        advance(model, optimizer, 0, 2)
        place = FOLDER / f"bytes-{setting}"
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=place)
        size = sum(file.stat().st_size for file in place.iterdir())
        assert size < (limit + 0.1) * 1025 * 512
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place)


@on(2)
def codes_in_a_full_state_dict_are_cut_into_shards_again():
    for setting, broadcast in itertools.product(SETTINGS, (False, True)):
        full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        model, optimizer = build(setting, shard=True)
        advance(model, optimizer, 0, 3)
        saved = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        entries = [t for state in saved["state"].values() for t in state.values()]
        assert not any(isinstance(tensor, DTensor) for tensor in entries)
        options = {"momentum": SETTINGS[setting][1], "compact": True}
        other = type(optimizer)(model.parameters(), lr=0.3, **options)
        mine = saved if dist.get_rank() == 0 or not broadcast else {}
        set_optimizer_state_dict(model, other, mine, options=full)
        check(setting, model, other)


@on(2)
def zero_redundancy_keeps_codes():
    # Imported here: it warns of torch.jit, which is an error in pytest.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    full = [cases.randn(shape, torch.float32, i) for i, shape in enumerate(SHAPES)]
    plain, zero = ([nn.Parameter(x.clone()) for x in full] for _ in range(2))
    single = MADGRAD(plain, lr=0.05, compact=True)
    options = {"optimizer_class": MADGRAD, "lr": 0.05, "compact": True}
    optimizer = ZeroRedundancyOptimizer(zero, **options)

    def steps(params, one, ks):
        for k, (i, param) in itertools.product(ks, enumerate(params)):
            param.grad = cases.randn(tuple(param.shape), torch.float32, 50 * k + i)
            if i == len(params) - 1:
                one.step()

    steps(plain, single, range(3))
    steps(zero, optimizer, range(3))
    optimizer.consolidate_state_dict(to=0)
    saved = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved, src=0)
    again = ZeroRedundancyOptimizer(zero, **{**options, "lr": 0.3})
    again.load_state_dict(saved[0])
    steps(plain, single, range(3, 6))
    steps(zero, again, range(3, 6))
    for p, q in zip(plain, zero, strict=True):
        assert cases.same_bits(p.detach(), q.detach())
        for name, tensor in again.optim.state.get(q, {}).items():
            assert cases.same_bits(tensor, single.state[p][name])


@on(2)
def fsdp1_saves_the_sums_that_codes_stand_for():
    """It gathers state tensors of the parameter's shape only, so that scales cannot be saved."""

    def built(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 64))
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        return model, MADGRAD(model.parameters(), lr=0.01, compact=True)

    def train(model, optimizer, steps):
        for k in steps:
            optimizer.zero_grad()
            model(cases.randn((8, 384), torch.float32, k)).square().mean().backward()
            optimizer.step()

    model, optimizer = built(0)
    train(model, optimizer, range(3))
    assert all("root_code" in state for state in optimizer.state.values())
    # torch's own, of which some appear only where CUDA is built in.
    torch_own = "`_get_pg_default_device`|Multiple backends are reg|Please use DTensor|.*FSDP"
    warnings.filterwarnings("ignore", torch_own)
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    assert saved["state"]["0.weight"]["grad_sq_sum"].shape == (384, 384)
    again, resumed = built(1)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(again, resumed, saved)
    )
    before = [param.detach().clone() for param in model.parameters()]
    train(model, optimizer, range(3, 6))
    train(again, resumed, range(3, 6))
    assert all("root_code" in state for state in resumed.state.values())
    for start, p, q in zip(before, model.parameters(), again.parameters(), strict=True):
        # Scales that differ in the last bit may round a number to the next code, which x takes in.
        off, code = (p - q).abs(), optimizer.state[p]["offset_scale"].max()
        assert off.max() < 2 * code  # 0.98 to 1.0 of a code
        assert off.mean() < 0.01 * (p - start).abs().max()  # 1e-4 to 3e-4
