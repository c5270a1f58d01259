"""For scenarios in several processes: a small network, its shards, its training."""

import copy

import cases
import torch
import torch.distributed as dist
from short_runs import tanh_net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from cubegrad import MADGRAD

BATCH = 12


def distributed(full, *placements):
    """A DTensor of which each process takes its own part; nothing is sent."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def net(seed=0):
    """5 and 3 rows leave uneven shards, and 1 row empty ones."""
    return tanh_net(7, 5, 3, 1, seed=seed)


def sharded(model, **options):
    model = copy.deepcopy(model)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(k, part=None):
    """The whole batch, or one process's part of it."""
    x = torch.randn(BATCH, 7, generator=torch.Generator().manual_seed(k))
    if part is None:
        return x
    return x.chunk(dist.get_world_size())[part]


def train(model, optimizer, part=None, steps=range(6), before_step=lambda: None):
    for k in steps:
        optimizer.zero_grad()
        model(batch(k, part)).square().mean().backward()
        before_step()
        optimizer.step()


def assert_close(tensor, expected, exactly):
    if exactly:
        assert cases.same_bits(tensor, expected), (tensor - expected).abs().max()
    else:
        rounding = torch.finfo(tensor.dtype).eps if tensor.dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(tensor, expected, rtol=1e-6 + rounding, atol=1e-6)


def assert_equal(model, reference, exactly):
    """Bit for bit, or to 1e-6 if processes add up gradients in another order."""
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(whole(p), q.detach(), exactly)


def reference_run(cls=MADGRAD, **options):
    reference = net()
    return reference, cls(reference.parameters(), lr=0.05, **options)


# (g + g) / 2 is g to the last bit, (g + g + g) / 3 is not.
def same_batch_is_exact():
    return dist.get_world_size() == 2
