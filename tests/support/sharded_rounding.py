"""Scenarios of test_distributed.py: weights rounded at random are the same however sharded."""

import itertools

import torch
from ranks import on
from sharded_compact import BACKENDS, SHAPES, Weights, advance
from sharded_nets import whole
from torch.distributed.fsdp import fully_shard

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD

SETTINGS = [
    (MADGRAD, {"momentum": 0.9, "weight_decay": 0.01}, torch.bfloat16),
    (MADGRAD, {"momentum": 0.0}, torch.bfloat16),
    (MADGRAD, {"momentum": 0.9}, torch.float16),
    (MirrorMADGRAD, {"momentum": 0.9}, torch.bfloat16),
    (MADGRADW, {"momentum": 0.9}, torch.bfloat16),
]


def run(shard, backend, setting, compiled=False):
    cls, options, dtype = setting
    model = Weights(SHAPES, dtype, 0)
    model = fully_shard(model) if shard else model
    optimizer = cls(
        model.parameters(), lr=0.05, stochastic_rounding=True, **options, **backend.flags
    )
    if compiled:
        optimizer.step = torch.compile(optimizer.step)
    advance(model, optimizer, 0, 5)
    return model, optimizer


def assert_same(sharded, single):
    (model, optimizer), (reference, one) = sharded, single
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(p), q.detach())
        for name, tensor in one.state[q].items():
            assert torch.equal(whole(optimizer.state[p][name]), tensor)


@on(2, 3)
def fsdp2_rounds_as_one_process():
    for backend, setting in itertools.product(BACKENDS, SETTINGS):
        assert_same(*(run(shard, backend, setting) for shard in (True, False)))


@on(2)
def a_step_over_shards_is_not_traced():
    """The compiler does not know where a shard lies in the whole parameter."""
    backend = BACKENDS[0]
    assert_same(run(True, backend, SETTINGS[0], compiled=True), run(False, backend, SETTINGS[0]))
