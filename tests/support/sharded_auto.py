"""Scenarios of test_distributed.py: an estimated learning rate, the same in all processes."""

import itertools
import os
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on
from sharded_nets import assert_close, distributed, net, sharded, train, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from cubegrad import MADGRAD, MADGRADW, sharding

METHODS = [cases.MADGRAD, cases.MADGRADW]
BACKENDS = [b for b in cases.FAST_BACKENDS if "-" not in b.name]


def same_everywhere(optimizer):
    mine = optimizer.param_groups[0]["estimate"].clone()
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)


def check(method, backend, plain, params, options):
    """Steps with whole parameters equal steps with this process's parts of them."""
    one, many = (
        cases.build(method, backend, ps, {"lr": "auto", **options}) for ps in (plain, params)
    )
    for k in range(6):
        for i, (p, q) in enumerate(zip(plain, params, strict=True)):
            if k == 4 and i == 1:  # a parameter without a gradient
                p.grad = q.grad = None
                continue
            p.grad = p.detach() + cases.randn(tuple(p.shape), p.dtype, 10 * k + i)
            q.grad = distribute_tensor(
                p.grad.clone(), q.device_mesh, q.placements, src_data_rank=None
            )
        one.step()
        with CommDebugMode() as communication:
            many.step()
        # One reduction for each mesh dimension that shards something, in the first step two.
        meshes = {sharding.sharded_over(q) for q in params} - {None}
        reductions = sum(len(dims) for _, dims in meshes)
        assert communication.get_total_counts() == reductions * (2 if k == 0 else 1)
        assert same_everywhere(many)
        assert many.estimated_lr() == pytest.approx(one.estimated_lr(), rel=1e-9)
        for p, q in zip(plain, params, strict=True):
            assert_close(whole(q), p.detach(), exactly=False)


@on(2, 3)
def the_estimate_is_that_of_one_process():
    shapes = [(7, 5), (1, 4), (6, 6)]
    for method, backend in itertools.product(METHODS, BACKENDS):
        for placement, momentum in ((Shard(0), 0.9), (Shard(1), 0.0), (Replicate(), 0.9)):
            plain = [nn.Parameter(cases.randn(s, torch.float64, i)) for i, s in enumerate(shapes)]
            params = [nn.Parameter(distributed(p.detach(), placement)) for p in plain]
            check(method, backend, plain, params, {"weight_decay": 0.01, "momentum": momentum})


@on(4)
def parameters_with_several_placements_are_counted_once_each():
    mesh = init_device_mesh("cpu", (2, 2))
    ways = [(Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(1), Replicate())]
    for method, backend in itertools.product(METHODS, BACKENDS):
        plain = [nn.Parameter(cases.randn((6, 4), torch.float64, i)) for i in range(3)]
        params = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, way, src_data_rank=None))
            for p, way in zip(plain, ways, strict=True)
        ]
        check(method, backend, plain, params, {})


@on(2, 3)
def fsdp_estimates_and_resumes():
    """3 processes also resume the run of 2."""
    for cls in (MADGRAD, MADGRADW):
        _estimate_and_resume(cls)


def _estimate_and_resume(cls):
    folder, world = Path(os.environ["FOLDER"]) / cls.__name__, dist.get_world_size()
    reference = net()
    single = cls(reference.parameters(), lr="auto")
    train(reference, single, steps=range(8))
    model = sharded(net())
    optimizer = cls(model.parameters(), lr="auto")
    train(model, optimizer, steps=range(5))
    assert same_everywhere(optimizer)
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    saved = {"model": saved_model, "optimizer": saved_optimizer}
    dcp.save(saved, checkpoint_id=folder / f"auto-{world}")
    train(model, optimizer, steps=range(5, 8))
    for saved_by in range(2, world + 1):
        again, resumed = _loaded(cls, folder / f"auto-{saved_by}")
        train(again, resumed, steps=range(5, 8))
        same = saved_by == world
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert_close(whole(p), whole(q), exactly=same)
        difference = resumed.estimated_lr() / optimizer.estimated_lr() - 1
        assert abs(difference) <= (0 if same else 1e-5)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(whole(p), q.detach(), exactly=False)
    assert optimizer.estimated_lr() == pytest.approx(single.estimated_lr(), rel=1e-5)


def _loaded(cls, folder):
    model = sharded(net(seed=5))
    optimizer = cls(model.parameters(), lr="auto")
    into = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    return model, optimizer
