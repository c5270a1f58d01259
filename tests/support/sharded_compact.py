"""Scenarios of test_distributed.py: compact=True over shards has the codes of one process."""

import itertools

import cases
import pytest
import torch
import torch.distributed as dist
from ranks import on
from sharded_nets import assert_close, distributed, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, memory, sharding

BACKENDS = [backend for backend in cases.FAST_BACKENDS if "-" not in backend.name]
# Rows that leave uneven shards, padded blocks, a rank without rows, one without codes, and a vector
# whose shards have whole blocks.
SHAPES = [(65, 64), (15, 300), (1, 4096), (2, 3000), (7, 5), (67584,)]
SETTINGS = {
    "madgrad": (MADGRAD, 0.9, torch.float32),
    "no-momentum": (MADGRAD, 0.0, torch.float32),
    "bfloat16": (MADGRAD, 0.9, torch.bfloat16),
    "mirror": (MirrorMADGRAD, 0.9, torch.float32),
    "madgradw": (MADGRADW, 0.9, torch.float32),
    "schedule-free": (cases.ScheduleFreeMADGRADW, 0.9, torch.float32),
}


class Weights(nn.Module):
    """Parameters of these shapes, without a use for them: gradients come from `advance`."""

    def __init__(self, shapes, dtype, seed):
        super().__init__()
        values = (cases.randn(shape, dtype, seed + i) for i, shape in enumerate(shapes))
        self.all = nn.ParameterList(map(nn.Parameter, values))


def build(setting, shard, seed=0, lr=0.05, shapes=SHAPES, compact=True, **options):
    cls, momentum, dtype = SETTINGS[setting]
    model = Weights(shapes, dtype, seed)
    model = fully_shard(model) if shard else model
    options = {"momentum": momentum, "weight_decay": 0.01, **options}
    return model, cls(model.parameters(), lr=lr, compact=compact, **options)


def placed(value, param):
    if not isinstance(param, DTensor):
        return value
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def advance(model, optimizer, first, last):
    for k in range(first, last):
        for i, param in enumerate(model.parameters()):
            grad = cases.randn(tuple(param.shape), param.dtype, 50 * k + i)
            param.grad = placed(grad, param)
        optimizer.step()
    optimizer.zero_grad()


def assert_same_runs(model, optimizer, reference, single):
    """Bit for bit where the state is in codes; of other states see `sharded_steps`."""
    # In a state dict there is no int16, which gloo does not send.
    states = [o.state_dict()["state"] for o in (optimizer, single)]
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for key, (p, q) in enumerate(pairs):
        assert list(optimizer.state[p]) == list(single.state[q])
        exactly = "root_code" in single.state[q]
        assert_close(whole(p), q.detach(), exactly)
        for name, tensor in states[1][key].items():
            assert_close(whole(states[0][key][name]), tensor, exactly)


@on(2, 3)
def fsdp2_has_the_codes_of_one_process():
    for backend, setting in itertools.product(BACKENDS, SETTINGS):
        runs = [build(setting, shard, **backend.flags) for shard in (True, False)]
        for model, optimizer in runs:
            advance(model, optimizer, 0, 5)
        assert_same_runs(*runs[0], *runs[1])
        model, optimizer = runs[0]
        for param in model.parameters():
            for name, tensor in optimizer.state[param].items():
                assert isinstance(tensor, DTensor) == (name != "step")
        rows = [len(sharding.local(param)) for param in model.parameters()]
        assert rows[2] == (dist.get_rank() == 0)  # the others have none


@on(2, 3)
def a_process_keeps_what_is_estimated():
    names = {
        "madgrad": "MADGRAD compact",
        "no-momentum": "MADGRAD compact, momentum 0",
        "bfloat16": "MADGRAD compact",
        "mirror": "MirrorMADGRAD compact",
        "madgradw": "MADGRADW compact",
    }
    for setting, name in names.items():
        sharded, optimizer = build(setting, shard=True)
        advance(sharded, optimizer, 0, 1)
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        held = sum(sharding.local(tensor).nbytes for tensor in tensors)
        estimates = {
            "whole": memory.estimate(build(setting, shard=False)[0], gpus=dist.get_world_size()),
            "own": memory.estimate(sharded),
        }
        kept = {
            key: next(row.state for row in estimate.rows if row.optimizer == name)
            for key, estimate in estimates.items()
        }
        assert held == kept["own"]
        if dist.get_rank() == 0:  # which has the most rows of each
            assert held == kept["whole"]
    with pytest.raises(ValueError, match=r"gpus=2 with a module whose all\.0 is sharded"):
        memory.estimate(sharded, gpus=2)


@on(2, 3)
def options_may_change_over_shards():
    """Momentum, and the form of the state: sums are recovered in another order, so to 1e-5."""
    for setting in ("madgrad", "mirror", "madgradw"):
        runs = [build(setting, shard) for shard in (True, False)]
        for model, optimizer in runs:
            group = optimizer.param_groups[0]
            for k, (momentum, compact) in enumerate(
                [(0.9, True), (0.0, True), (0.0, True), (0.9, True), (0.9, False), (0.0, True)]
            ):
                group["momentum"], group["compact"] = momentum, compact
                advance(model, optimizer, k, k + 1)
        assert_same_runs(*runs[0], *runs[1])


@on(4)
def hsdp_has_the_codes_of_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for setting in SETTINGS:
        reference, single = build(setting, shard=False)
        cls, momentum, dtype = SETTINGS[setting]
        model = fully_shard(Weights(SHAPES, dtype, 0), mesh=mesh)
        optimizer = cls(
            model.parameters(), lr=0.05, compact=True, momentum=momentum, weight_decay=0.01
        )
        advance(reference, single, 0, 4)
        advance(model, optimizer, 0, 4)
        assert_same_runs(model, optimizer, reference, single)


def by_columns(shapes, placements, mesh):
    full = [cases.randn(shape, torch.float32, i) for i, shape in enumerate(shapes)]
    model = nn.Module()
    values = (distribute_tensor(x, mesh, placements, src_data_rank=None) for x in full)
    model.all = nn.ParameterList(map(nn.Parameter, values))
    return model


def dual_point(x, state):
    """z, in either form."""
    names = ("offset_code", "offset_scale")
    if names[0] in state:
        code, scale = (whole(state[name]) for name in names)
        scale = scale.repeat_interleave(256, 1)[:, : x[0].numel()]
        return x + (code >> 1) * scale.reshape(x.shape)
    names = ("grad_sum", "grad_sq_sum", "initial_param")
    grad_sum, grad_sq_sum, start = (whole(state[name]) for name in names)
    return start - grad_sum / (grad_sq_sum ** (1 / 3) + 1e-6)


@on(2, 4)
def shards_of_columns_keep_codes_of_whole_blocks():
    world = dist.get_world_size()
    mesh, placements = init_device_mesh("cpu", (world,)), [Shard(1)]
    if world == 4:
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)]
    shapes = [(9, 512), (6, 4, 16, 16), (9, 500), (4, 64, 8, 8)]
    coded = [True, True, False, True]
    model = by_columns(shapes, placements, mesh)
    reference = Weights(shapes, torch.float32, 0)
    runs = [(m, MADGRAD(m.parameters(), lr=0.05, compact=True)) for m in (model, reference)]
    for run in runs:
        advance(*run, 0, 6)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for i, (p, q) in enumerate(pairs):
        state, own = runs[0][1].state[p], runs[1][1].state[q]
        assert ("root_code" in state) == coded[i]
        # Other random bits, so other roundings. x takes in those of z - x; z was up to 0.5 % of the
        # way apart.
        z, other = dual_point(whole(p), state), dual_point(q.detach(), own)
        way = (z - cases.randn(tuple(q.shape), torch.float32, i)).square().mean()
        assert (z - other).square().mean() < 0.02**2 * way
        if coded[i]:
            assert cases.same_bits(whole(state["initial_scale"]), own["initial_scale"])
    # A plain optimizer takes the state over, bit for bit.
    single = MADGRAD(reference.parameters(), compact=True)
    full = {name: whole(p) for name, p in model.named_parameters()}
    reference.load_state_dict(full)
    single.load_state_dict(runs[0][1].state_dict())
    assert_same_runs(*runs[0], reference, single)
    runs[0][1].load_state_dict(single.state_dict())
    assert_same_runs(*runs[0], reference, single)


@on(2, 4)
def first_indices_are_those_of_the_rows():
    """Rows of one process follow each other; other dimensions share the range of their rows."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    meshes = [(line, [place]) for place in (Shard(0), Shard(1), Shard(2), Replicate())]
    if world == 4:
        square = init_device_mesh("cpu", (2, 2))
        places = itertools.product((Shard(0), Shard(1), Shard(2), Replicate()), repeat=2)
        meshes += [(square, list(pair)) for pair in places]
    for shape in ((5, 4, 3), (1, 4), (8, 8)):
        whole_index = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for (mesh, placements), dtype in itertools.product(
            meshes, (torch.float32, torch.complex64)
        ):
            if len(shape) < 3 and Shard(2) in placements:
                continue
            values = distribute_tensor(whole_index, mesh, placements, src_data_rank=None)
            param = DTensor.from_local(
                values.to_local().to(dtype),
                mesh,
                placements,
                run_check=False,
                shape=values.shape,
                stride=values.stride(),
            )
            first, local = sharding.first_index(param), values.to_local()
            numbers = 2 if dtype.is_complex else 1
            by_rows = not any(place in (Shard(1), Shard(2)) for place in placements)
            if by_rows and local.numel():
                assert first == numbers * local.flatten()[0]
            mine = torch.tensor([first, first + numbers * local.numel()])
            spans = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(spans, mine)
            filled = {tuple(span.tolist()) for span in spans if span[0] < span[1]}
            ends = [end for span in sorted(filled) for end in span]
            assert ends[0] == 0
            assert ends[-1] == numbers * whole_index.numel()
            assert ends[1:-1:2] == ends[2::2]  # no gaps, and none has what another has


@on(2)
def codes_that_shards_would_cut_are_refused():
    reference = Weights([(9, 500)], torch.float32, 0)
    single = MADGRAD(reference.parameters(), compact=True)
    advance(reference, single, 0, 1)
    model = nn.Module()
    value = distributed(reference.all[0].detach(), Shard(1))
    model.all = nn.ParameterList([nn.Parameter(value)])
    optimizer = MADGRAD(model.parameters(), compact=True)
    with pytest.raises(ValueError, match=r"cut through blocks of 256 numbers.* shard it by rows"):
        optimizer.load_state_dict(single.state_dict())
    assert not optimizer.state


@on(2, 3)
def an_estimated_rate_over_codes():
    """Sums are added up in another order, so the rate differs in its last places."""
    runs = [build("madgrad", shard, lr="auto") for shard in (True, False)]
    for k in range(6):
        for model, optimizer in runs:
            for i, param in enumerate(model.parameters()):
                grad = whole(param) + cases.randn(tuple(param.shape), param.dtype, 50 * k + i)
                idle = k == 4 and i == 1
                param.grad = None if idle else placed(grad, param)
            optimizer.step()
        rates = [optimizer.estimated_lr() for _, optimizer in runs]
        assert rates[0] == pytest.approx(rates[1], rel=1e-3)
    (model, many), (reference, one) = runs
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-3, atol=1e-2)
        if "root_code" in one.state[q]:
            off = whole(many.state[p]["root_code"]).int() - one.state[q]["root_code"].int()
            assert (off != 0).float().mean() < 0.01
