"""Scenarios of test_distributed.py: one estimate of processes that hold different plain tensors."""

import copy
import io
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from ranks import on
from sharded_auto import same_everywhere
from sharded_nets import assert_close, net, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import cubegrad
from cubegrad import MADGRAD, MADGRADW


def weights(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(i + 2, 3, generator=generator, dtype=torch.float64) for i in range(count)]


def groups_of(params, rank=None):
    """Two groups; with a rank, only the parameters of that process."""
    world = dist.get_world_size()
    mine = [rank is None or i % world == rank for i in range(len(params))]
    halves = (0, 2), (2, len(params))
    return [
        {"params": [params[i] for i in range(*half) if mine[i]], "weight_decay": 0.01 * (n + 1)}
        for n, half in enumerate(halves)
    ]


def step(params, optimizer, k):
    for i, param in enumerate(params):
        param.grad = None if k == 4 and i > 1 else param.detach() - i + math.sin(k)
    optimizer.step()


@on(2, 3)
def stages_share_one_estimate():
    """In a step without gradients for the second group, too."""
    settings = {}, {"decoupled_weight_decay": True}, {"momentum": 0.0, "foreach": True}
    for cls, options in itertools.product((MADGRAD, MADGRADW), settings):
        whole, parts = ([nn.Parameter(w.clone()) for w in weights(1)] for _ in range(2))
        one = cls(groups_of(whole), lr="auto", **options)
        many = cls(groups_of(parts, dist.get_rank()), lr="auto", **options)
        many.share_estimate()
        for k in range(8):
            if k == 2 and "momentum" in options:
                many._auto.estimate.on_host = False  # as if its numbers were on a GPU
            step(whole, one, k)
            step(parts, many, k)
            assert same_everywhere(many)
            assert many.estimated_lr() == pytest.approx(one.estimated_lr(), rel=1e-9)
        for group in many.param_groups:
            for param in group["params"]:
                index = next(i for i, other in enumerate(parts) if other is param)
                torch.testing.assert_close(param, whole[index], rtol=1e-9, atol=1e-9)


@on(2, 3)
def a_parameter_whose_only_step_was_skipped_does_not_count():
    """A GradScaler found an overflow there; the other run has never had that step."""
    whole, parts = ([nn.Parameter(w.clone()) for w in weights(1)] for _ in range(2))
    one = MADGRAD(groups_of(whole), lr="auto", fused=True)
    many = MADGRAD(groups_of(parts, dist.get_rank()), lr="auto", fused=True)
    many.share_estimate()
    for k in range(6):
        for params, optimizer in ((whole, one), (parts, many)):
            if k in (2, 3) and optimizer is many:
                many._auto.estimate.on_host = k == 2  # then as if its numbers were on a GPU
                for param in params:
                    param.grad = torch.full_like(param, torch.inf)
                many.found_inf = torch.ones(1)
                many.step()
                del many.found_inf
            for i, param in enumerate(params):
                param.grad = param.detach() - i + math.sin(k) if i in (0, 3) else None
            optimizer.step()
        assert same_everywhere(many)
        assert many.estimated_lr() == pytest.approx(one.estimated_lr(), rel=1e-9)


@on(2, 3)
def a_process_without_parameters_takes_part():
    whole, parts = ([nn.Parameter(w.clone()) for w in weights(2, 3)] for _ in range(2))
    one = MADGRAD(whole, lr="auto")
    many = MADGRAD([{"params": parts if dist.get_rank() == 0 else []}], lr="auto")
    many.share_estimate()
    for k in range(8):
        step(whole, one, k)
        step(parts, many, k)
    assert same_everywhere(many)
    assert many.estimated_lr() == pytest.approx(one.estimated_lr(), rel=1e-9)


def zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of torch.jit

    return ZeroRedundancyOptimizer(model.parameters(), MADGRAD, lr="auto")


@on(2, 3)
def zero_redundancy_shares_and_resumes():
    reference, model = net(), net()
    single, optimizer = MADGRAD(reference.parameters(), lr="auto"), zero(model)
    optimizer.optim.share_estimate()
    train(reference, single, steps=range(8))
    train(model, optimizer, steps=range(5))
    optimizer.consolidate_state_dict()
    saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    again = copy.deepcopy(model)
    resumed = zero(again)
    resumed.optim.share_estimate()
    resumed.load_state_dict(copy.deepcopy(saved[0]))
    for each, its in ((model, optimizer), (again, resumed)):
        train(each, its, steps=range(5, 8))
        assert same_everywhere(its)
        assert cubegrad.estimated_lr(its) == pytest.approx(single.estimated_lr(), rel=1e-5)
    for p, q, r in zip(model.parameters(), again.parameters(), reference.parameters(), strict=True):
        assert_close(p.detach(), q.detach(), exactly=True)
        assert_close(p.detach(), r.detach(), exactly=False)


@on(2)
def a_group_added_to_zero_redundancy_has_its_defaults():
    """It puts its own default, the string "auto", into the new group."""
    model, other = net(), net(seed=3)
    optimizer = zero(model)
    train(model, optimizer, steps=range(2))
    optimizer.add_param_group({"params": list(other.parameters())})
    train(nn.Sequential(model, nn.Linear(1, 7), other), optimizer, steps=range(2, 4))
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert cubegrad.estimated_lr(optimizer) > 0


@on(2)
def fsdp1_shares_one_estimate():
    for use_orig_params in (False, True):
        reference = net()
        single = MADGRAD(reference.parameters(), lr="auto")
        train(reference, single, steps=range(6))
        model = FullyShardedDataParallel(
            net(), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        optimizer = MADGRAD(model.parameters(), lr="auto")
        optimizer.share_estimate()
        train(model, optimizer, steps=range(6))
        assert same_everywhere(optimizer)
        assert optimizer.estimated_lr() == pytest.approx(single.estimated_lr(), rel=1e-5)
        with FullyShardedDataParallel.summon_full_params(model):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert_close(p.detach().view_as(q), q.detach(), exactly=False)


@on(2)
def a_shared_estimate_is_not_part_of_a_copy():
    params = [nn.Parameter(w) for w in weights(3)]
    optimizer = MADGRAD(params, lr="auto")
    optimizer.share_estimate()
    step(params, optimizer, 0)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    alone = copy.deepcopy(optimizer)
    if dist.get_rank() == 0:  # would wait for the others for ever
        alone.step()
