"""Scenarios of test_distributed.py: gradient release over several processes."""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import cases
import pytest
import torch
import torch.distributed as dist
from ranks import on
from sharded_nets import batch, net, sharded, train
from short_runs import tanh_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, sharding
from cubegrad.optim.release import GradientRelease

WIDTH = 128
HELD_BYTES = 1000  # less than any layer's gradients but the last one's


@contextmanager
def small_line() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientRelease, "held_bytes", HELD_BYTES)
        yield


def both(build, steps=range(6), **kinds):
    """The same sharded model, trained with ordinary steps and with gradient release."""
    runs = []
    for released in (False, True):
        model = sharded(tanh_net(7, WIDTH, WIDTH, 1), **kinds)
        optimizer = build(model.parameters())
        if released:
            optimizer.release_gradients()
        train(model, optimizer, dist.get_rank(), steps)
        runs.append((model, optimizer))
    return runs


def assert_same(runs):
    (one, ordinary), (other, released) = runs
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert cases.same_bits(sharding.local(p.detach()), sharding.local(q.detach()))
        for name, value in ordinary.state[p].items():
            its = released.state[q][name]
            assert cases.same_bits(sharding.local(value), sharding.local(its))


@on(2, 3)
def fsdp2_releases_the_gradients_of_its_shards():
    """Those of a layer are views of one buffer, so even its bias is stepped during backward."""
    for cls, compact in itertools.product((MADGRAD, MirrorMADGRAD, MADGRADW), (False, True)):
        options = {"lr": 0.05, "compact": compact, "weight_decay": 0.01}
        with small_line():
            runs = both(lambda params, cls=cls, options=options: cls(params, **options))
            assert_same(runs)
            model, optimizer = runs[1]
            model(batch(9, dist.get_rank())).square().mean().backward()
            left = [p for p in model.parameters() if p.grad is not None]
            assert len(left) <= 2
            for param in left:
                assert param.grad._local_tensor.untyped_storage().nbytes() < HELD_BYTES
            assert optimizer._release._slots[id(model[2].weight)].prepared is not None
            optimizer.step()


@on(2)
def fsdp2_releases_in_its_other_forms():
    kinds = [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
    ]
    for kind in kinds:
        with small_line():
            assert_same(both(lambda params: MADGRAD(params, lr=0.05), **kind))


@on(4)
def hsdp_releases_after_the_reduction_over_the_replicas():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with small_line():
        assert_same(both(lambda params: MADGRAD(params, lr=0.05), mesh=mesh))


@on(2, 3)
def fsdp2_releases_with_an_estimated_rate():
    for cls in (MADGRAD, MADGRADW):
        with small_line():
            runs = both(functools.partial(cls, lr="auto"), steps=range(8))
        (one, ordinary), (other, released) = runs
        assert released.estimated_lr() == pytest.approx(ordinary.estimated_lr(), rel=1e-6)
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            local = (sharding.local(p.detach()), sharding.local(q.detach()))
            torch.testing.assert_close(*local, rtol=1e-5, atol=1e-6)


@on(2)
def fsdp2_accumulates_what_it_has_not_reduced():
    """Hooks run when the last of several backward passes reduces the sum."""
    runs = []
    for released in (False, True):
        model = sharded(tanh_net(7, WIDTH, WIDTH, 1))
        optimizer = MADGRAD(model.parameters(), lr=0.05)
        if released:
            optimizer.release_gradients()
        for k in range(0, 6, 2):
            for j in (k, k + 1):
                model.set_requires_gradient_sync(j > k)
                model(batch(j, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_same(runs)


@on(2)
def clipping_after_backward_finds_nothing_to_clip():
    """It cannot be noticed, but the norm that it returns is 0."""
    model = fully_shard(tanh_net(7, WIDTH, WIDTH, 1))
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    optimizer.release_gradients()
    with small_line():
        model(batch(0)).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) == 0


@on(2)
def wrappers_that_reduce_after_the_hooks_are_refused():
    for wrap in (DistributedDataParallel, FullyShardedDataParallel):
        options = {"device_id": torch.device("cpu")} if wrap is FullyShardedDataParallel else {}
        model = wrap(net(), **options)
        optimizer = MADGRAD(model.parameters(), lr=0.05)
        with pytest.raises(RuntimeError, match=f"{wrap.__name__}.*fully_shard"):
            optimizer.release_gradients()
        assert optimizer._release is None
    plain = net()
    optimizer = MADGRAD(plain.parameters(), lr=0.05)
    optimizer.release_gradients()
    late = DistributedDataParallel(plain)
    with (
        cases.no_change(*plain.parameters()),
        pytest.raises(RuntimeError, match=r"DistributedDataParallel.*fully_shard"),
    ):
        late(batch(0)).sum().backward()
