"""Scenarios of test_distributed.py: every way to distribute a model equals one process alone."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import on
from sharded_nets import (
    assert_equal,
    batch,
    net,
    reference_run,
    same_batch_is_exact,
    sharded,
    train,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, sharding


@on(2, 3)
def ddp_accumulates_and_agrees():
    for cls in (MADGRAD, MirrorMADGRAD, MADGRADW):
        reference, single = reference_run(cls)
        model = DistributedDataParallel(net())
        optimizer = cls(model.parameters(), lr=0.05)
        train(reference, single)
        train(model, optimizer, dist.get_rank())
        assert_equal(model.module, reference, exactly=False)
    if same_batch_is_exact():
        reference, single = reference_run()
        model = DistributedDataParallel(net())
        train(reference, single)
        train(model, MADGRAD(model.parameters(), lr=0.05))
        assert_equal(model.module, reference, exactly=True)

    reference, single = reference_run()
    model = DistributedDataParallel(net())
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    for k in range(0, 6, 2):
        optimizer.zero_grad()
        single.zero_grad()
        with model.no_sync():
            model(batch(k, dist.get_rank())).square().mean().backward()
        model(batch(k + 1, dist.get_rank())).square().mean().backward()
        for j in (k, k + 1):
            reference(batch(j)).square().mean().backward()
        optimizer.step()
        single.step()
    assert_equal(model.module, reference, exactly=False)


@on(2, 3)
def fsdp2_with_uneven_shards():
    for cls, momentum in itertools.product((MADGRAD, MirrorMADGRAD, MADGRADW), (0.0, 0.9)):
        reference, single = reference_run(cls, momentum=momentum)
        model = sharded(net())
        assert any(p._local_tensor.numel() == 0 for p in model.parameters()) or dist.get_rank() == 0
        optimizer = cls(model.parameters(), lr=0.05, momentum=momentum)
        train(reference, single)
        train(model, optimizer, dist.get_rank())
        assert_equal(model, reference, exactly=False)
        assert optimizer._backend(optimizer.param_groups[0]).NAME == "cpu"
        assert optimizer._repeats.prepared
    if same_batch_is_exact():
        reference, single = reference_run()
        model = sharded(net())
        train(reference, single)
        train(model, MADGRAD(model.parameters(), lr=0.05))
        assert_equal(model, reference, exactly=True)


@on(2, 3)
def fsdp2_accumulates_without_sync():
    reference, single = reference_run()
    model = sharded(net())
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    for k in range(0, 6, 2):
        for j in (k, k + 1):
            model.set_requires_gradient_sync(j == k + 1)
            model(batch(j, dist.get_rank())).square().mean().backward()
            reference(batch(j)).square().mean().backward()
        for its in (optimizer, single):
            its.step()
            its.zero_grad()
    assert_equal(model, reference, exactly=False)


@on(2)
def fsdp2_mixed_precision_keeps_float32_masters():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference, single = reference_run()
    model = sharded(net(), mp_policy=policy)
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    for k in range(6):
        single.zero_grad()
        halves = {name: p.bfloat16() for name, p in reference.named_parameters()}
        functional_call(reference, halves, batch(k).bfloat16()).square().mean().backward()
        single.step()
    train(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_equal(model, reference, exactly=True)


@on(2, 3)
def fsdp2_offloaded_runs_the_fused_cpu_backend():
    reference, single = reference_run()
    model = sharded(net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = MADGRAD(model.parameters(), lr=0.05, fused=True)
    train(reference, single)
    train(model, optimizer, dist.get_rank())
    assert optimizer._backend(optimizer.param_groups[0]).NAME == "cpu"
    assert_equal(model, reference, exactly=False)


@on(2, 3, 4)
def hsdp_meshes():
    world = dist.get_world_size()
    for shape in [(2, 2)] if world == 4 else [(world, 1), (1, world)]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        reference, single = reference_run()
        model = sharded(net(), mesh=mesh)
        train(reference, single)
        train(model, MADGRAD(model.parameters(), lr=0.05), dist.get_rank())
        assert_equal(model, reference, exactly=False)


class Block(nn.Module):
    """Its norm gets a part of the sequence, so the gradients of the norm are partial sums."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 12)
        self.down = nn.Linear(12, 7)

    def forward(self, x):
        # The product makes a new tensor: FSDP2 warns of views.
        return 2.0 * self.down(torch.tanh(self.up(self.norm(x))))


@on(2, 3)
def tensor_parallel():
    torch.manual_seed(0)
    reference = Block()
    model = parallelize_module(
        copy.deepcopy(reference),
        init_device_mesh("cpu", (dist.get_world_size(),)),
        {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        },
    )
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    single = MADGRAD(reference.parameters(), lr=0.05)
    for k in range(5):
        for its, run, part in ((optimizer, model, dist.get_rank()), (single, reference, None)):
            its.zero_grad()
            run(batch(k, part)).square().mean().backward()
        assert any(place.is_partial() for place in model.norm.weight.grad.placements)
        optimizer.step()
        single.step()
    assert_equal(model, reference, exactly=False)
    assert optimizer.state[model.up.weight]["grad_sum"].placements == (Shard(0),)


@on(4)
def fsdp2_over_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    reference = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(reference), mesh["tensor"], plan)
    model = fully_shard(model, mesh=mesh["data"])
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    single = MADGRAD(reference.parameters(), lr=0.05)
    half = dist.get_rank() // 2
    for k in range(5):
        for its, run, x in (
            (optimizer, model, batch(k).chunk(2)[half]),
            (single, reference, batch(k)),
        ):
            its.zero_grad()
            run(x).square().mean().backward()
            its.step()
    assert_equal(model, reference, exactly=False)
    assert len(model.up.weight.placements) == 2
    assert optimizer.state[model.up.weight]["grad_sum"].placements == model.up.weight.placements
    optimizer.load_state_dict(single.state_dict())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        for name, tensor in optimizer.state[p].items():
            assert torch.equal(whole(tensor), single.state[q][name])


@on(2, 3)
def zero_redundancy_optimizer():
    # Imported here: it warns of torch.jit, which is an error in pytest.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for cls in (MADGRAD, MADGRADW):
        reference, single = reference_run(cls)
        model = DistributedDataParallel(net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), cls, lr=0.05)
        train(reference, single, steps=range(3))
        train(model, optimizer, dist.get_rank(), steps=range(3))
        for k in range(dist.get_world_size()):
            optimizer.consolidate_state_dict(to=k)
            if k == dist.get_rank():
                saved = copy.deepcopy(optimizer.state_dict())
        assert {float(state["step"]) for state in saved["state"].values()} == {3.0}
        again = ZeroRedundancyOptimizer(model.parameters(), cls, lr=0.5)
        again.load_state_dict(saved)
        train(reference, single, steps=range(3, 6))
        train(model, again, dist.get_rank(), steps=range(3, 6))
        assert_equal(model.module, reference, exactly=False)


@on(2, 3)
def clipping_over_shards():
    reference, single = reference_run()
    model = sharded(net())
    norms = []

    def clipped(run):
        norm = nn.utils.clip_grad_norm_(run.parameters(), 0.1)
        norms.append(float(whole(norm)))

    train(reference, single, before_step=lambda: clipped(reference))
    optimizer = MADGRAD(model.parameters(), lr=0.05)
    train(model, optimizer, dist.get_rank(), before_step=lambda: clipped(model))
    assert max(norms[:3]) > 0.1
    assert norms[6:] == pytest.approx(norms[:6], rel=1e-5)
    assert_equal(model, reference, exactly=False)


@on(2, 3)
def an_overflow_anywhere_skips_the_step_everywhere():
    for fused in (None, False):  # in the kernel, and by GradScaler itself
        reference, single = reference_run(fused=fused)
        model = sharded(net())
        optimizer = MADGRAD(model.parameters(), lr=0.05, fused=fused)
        scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
        for k in range(6):
            runs = ((reference, single, None), (model, optimizer, dist.get_rank()))
            for (run, its, part), scaler in zip(runs, scalers, strict=True):
                its.zero_grad()
                scaler.scale(run(batch(k, part)).square().mean()).backward()
                # The first rows, which the first process alone holds.
                shard = sharding.local(run[0].weight.grad)
                if k == 3 and (part is None or part == 0):
                    shard[0, 0] = float("inf")
                before = [sharding.local(p.detach()).clone() for p in run.parameters()]
                scaler.step(its)
                scaler.update()
                after = [sharding.local(p.detach()) for p in run.parameters()]
                assert all(map(torch.equal, before, after)) == (k == 3)
                assert scaler.get_scale() == (512.0 if k >= 3 else 1024.0)
        assert optimizer.state[model[0].weight]["step"] == 5
        assert_equal(model, reference, exactly=False)
