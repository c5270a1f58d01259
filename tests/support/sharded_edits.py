"""Scenarios of test_distributed.py: weights edited, averaged and restarted over processes."""

import pytest
import torch
import torch.distributed as dist
from edits import Noisy, build, editing
from ranks import on
from sharded_auto import same_everywhere
from sharded_compact import SETTINGS, advance, assert_same_runs
from sharded_compact import build as weights
from sharded_nets import assert_equal, net, sharded, train
from sharded_shared import groups_of, step
from sharded_shared import weights as plain_weights
from torch import nn

from cubegrad import MADGRAD


def edit(model, optimizer, momentum=True):
    with optimizer.edit_weights(keep_momentum=momentum):
        for param in model.parameters():
            param.clamp_(-0.5, 0.7)
            param.mul_(1.1)


@on(2, 3)
def shards_are_edited_as_the_whole_is():
    for setting in SETTINGS:
        runs = [weights(setting, shard) for shard in (True, False)]
        for model, optimizer in runs:
            advance(model, optimizer, 0, 3)
            edit(model, optimizer)
            advance(model, optimizer, 3, 5)
            edit(model, optimizer, momentum=False)
            advance(model, optimizer, 5, 7)
        assert_same_runs(*runs[0], *runs[1])


@on(2, 3)
def an_estimate_follows_edits_of_shards():
    reference = net()
    model = sharded(reference)
    single = MADGRAD(reference.parameters(), lr="auto")
    optimizer = MADGRAD(model.parameters(), lr="auto")
    for steps in (range(3), range(3, 6)):
        for one, own in ((model, optimizer), (reference, single)):
            train(one, own, steps=steps)
            edit(one, own)
        assert same_everywhere(optimizer)
        mine, other = (own.param_groups[0]["estimate"] for own in (optimizer, single))
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-9)
    assert_equal(model, reference, exactly=False)


@on(2, 3)
def a_shared_estimate_follows_edits():
    whole, parts = ([nn.Parameter(w.clone()) for w in plain_weights(1)] for _ in range(2))
    one = MADGRAD(groups_of(whole), lr="auto")
    many = MADGRAD(groups_of(parts, dist.get_rank()), lr="auto")
    many.share_estimate()
    for k in range(6):
        for params, optimizer in ((whole, one), (parts, many)):
            step(params, optimizer, k)
            with optimizer.edit_weights():
                for param in params:
                    param.clamp_(-0.5, 0.7)
        assert same_everywhere(many)
        assert many.estimated_lr() == pytest.approx(one.estimated_lr(), rel=1e-9)


@on(2, 3)
def shards_start_over():
    for lr in (0.05, "auto"):
        model = sharded(net())
        old = MADGRAD(model.parameters(), lr=lr)
        train(model, old, steps=range(3))
        old.restart()
        copy = sharded(net())
        with torch.no_grad():
            for param, other in zip(copy.parameters(), model.parameters(), strict=True):
                param.copy_(other)
        new = MADGRAD(copy.parameters(), lr=lr)
        for one, optimizer in ((model, old), (copy, new)):
            train(one, optimizer, steps=range(3, 6))
        pairs = zip(model.parameters(), copy.parameters(), strict=True)
        assert all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs)


@on(2)
def processes_that_average_their_weights_stay_together():
    """Local steps on data of their own, 10 between two averages; Adam has 0.06."""
    last = {}
    for edits in (False, True):
        problem = Noisy()
        problem.generator.manual_seed(dist.get_rank())
        problem.minimum += dist.get_rank() - 0.5
        param = problem.parameter()
        optimizer = build("sums", [param])
        for _ in range(8):
            problem.step(optimizer, param, 10)
            mean = param.detach().clone()
            dist.all_reduce(mean)
            mean /= 2
            spread = 2 * (param.detach() - mean).square().mean().sqrt()
            with torch.no_grad(), editing(optimizer, edits):
                param.copy_(mean)
        last[edits] = spread.item()
    assert last[True] < 0.11  # 0.067
    assert last[False] > 0.18  # 0.24
