"""Scenarios of test_distributed.py: steps over shards, and what is refused."""

import itertools

import cases
import pytest
import torch
import torch.distributed as dist
from ranks import on
from sharded_nets import (
    assert_close,
    batch,
    distributed,
    net,
    sharded,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.debug import CommDebugMode

from cubegrad import MADGRAD, sharding

BACKENDS = [backend for backend in cases.BACKENDS if "-" not in backend.name]


def check_sharded_steps(backend, method, dtype, placement, momenta):
    shapes = [(7, 5), (1, 4), (6, 6)]
    plain = [nn.Parameter(cases.randn(s, dtype, i)) for i, s in enumerate(shapes)]
    params = [nn.Parameter(distributed(p.detach(), placement)) for p in plain]
    one, many = (
        cases.build(method, backend, ps, {"momentum": momenta[0], "weight_decay": 0.01})
        for ps in (plain, params)
    )
    for k, momentum in enumerate(momenta):
        for i, (p, q) in enumerate(zip(plain, params, strict=True)):
            p.grad = cases.randn(tuple(p.shape), dtype, 10 * k + i)
            q.grad = distributed(p.grad, placement)
        for optimizer in (one, many):
            optimizer.param_groups[0]["momentum"] = momentum
        one.step()
        with CommDebugMode() as communication:
            many.step()
        assert communication.get_total_counts() == 0
    fused = backend.name in ("cpu", "triton")
    exactly = fused and (len(set(momenta)) == 1 or not method.rule.pulls)  # no x_0 recovered
    for p, q in zip(plain, params, strict=True):
        assert q._local_tensor.grad is None
        assert_close(whole(q), p.detach(), exactly)
        assert set(one.state[p]) == set(many.state[q])
        for name, tensor in many.state[q].items():
            assert isinstance(tensor, DTensor) == (name != "step")
            assert_close(whole(tensor), one.state[p][name], exactly)
            if name != "step":
                assert (tensor.placements, tensor.device_mesh) == (q.placements, q.device_mesh)
                assert tensor.dtype == one.state[p][name].dtype
                assert tensor.stride() == one.state[p][name].stride()
    assert len(many._repeats.prepared) == (fused and not dtype.is_complex)


@on(2, 3)
def every_backend_steps_its_shards():
    """The fused ones bit for bit, the others to 1e-6: torch's x ** (1 / 3) rounds the last elements
    of a tensor differently from those that it computes by vectors."""
    dtypes = (torch.float32, torch.bfloat16, torch.complex64)
    momenta = ([0.9] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.0])
    for backend, method in itertools.product(BACKENDS, cases.METHODS):
        for dtype, placement in zip(dtypes, (Shard(0), Shard(1), Shard(0)), strict=True):
            if backend.interpreted and dtype == torch.bfloat16:
                continue
            for sequence in momenta[: 1 if backend.interpreted else 3]:
                check_sharded_steps(backend, method, dtype, placement, sequence)
        check_sharded_steps(backend, method, torch.float64, Replicate(), momenta[0])


@on(2)
def a_prepared_step_sees_shards_that_moved():
    param = nn.Parameter(distributed(torch.ones(5, 4), Shard(0)))
    plain = nn.Parameter(torch.ones(5, 4))
    optimizers = [MADGRAD([param], lr=0.1), MADGRAD([plain], lr=0.1)]

    def step():
        plain.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        param.grad = distributed(plain.grad, Shard(0))
        for optimizer in optimizers:
            optimizer.step()
        assert cases.same_bits(whole(param), plain.detach())

    step()
    step()
    assert optimizers[0]._repeats.prepared
    param._local_tensor = param._local_tensor.clone()  # as FSDP2 does when a model is moved
    step()
    param._local_tensor.data = param._local_tensor.clone()
    step()
    buffer = optimizers[0].state[param]["grad_sum"]
    optimizers[0].state[param]["grad_sum"] = buffer.clone()
    buffer.zero_()
    step()
    step()
    assert optimizers[0].state[param]["step"] == 6


@on(2, 3)
def a_step_uses_the_memory_of_its_own_shards_only():
    world = dist.get_world_size()
    full = torch.randn(6 * 32, 16)
    param = nn.Parameter(distributed(full, Shard(0)))
    param.grad = distributed(full, Shard(0))
    optimizer = MADGRAD([param])
    seen = []
    backend = optimizer._backend(optimizer.param_groups[0])

    class Counting:
        FUSED = True
        checked = staticmethod(backend.checked)

        @staticmethod
        def step(batch, h):
            tensors = [t for row in batch.rows for t in (row.param, row.grad, *row.buffers)]
            assert all(type(t) is torch.Tensor for t in tensors)
            seen.append(sum(t.nbytes for t in tensors))
            return backend.step(batch, h)

    optimizer._backend = lambda _: Counting
    optimizer.step()
    assert seen == [5 * full.nbytes // world]  # parameter, gradient and three buffers
    held = [sharding.local(t) for t in optimizer.state[param].values() if t.ndim]
    assert sum(t.untyped_storage().nbytes() for t in held) == 3 * full.nbytes // world


@on(2)
def a_parameter_that_is_a_partial_sum_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    with pytest.raises(TypeError, match="must be sharded or replicated"):
        MADGRAD([param])


@on(2)
def an_optimizer_built_before_sharding_is_refused():
    for shard in (fully_shard, lambda m: distribute_module(m, init_device_mesh("cpu", (2,)))):
        model = net()
        early = MADGRAD(model.parameters(), lr=0.05)
        shard(model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        with pytest.raises(RuntimeError, match=r"6 of 6 .* \(5, 7\).* after sharding the model"):
            early.step()
        assert not early.state
    model = net()
    early = MADGRAD(model.parameters(), lr=0.05)
    fully_shard(model[4])
    model(batch(0)).sum().backward()
    with (
        cases.no_change(*model[:4].parameters()),
        pytest.raises(RuntimeError, match="2 of 6 parameters"),
    ):
        early.step()


@on(2)
def parameters_without_gradients_are_not_refused():
    model, other = net(), sharded(net())
    other(batch(0)).sum().backward()  # the same shapes, with gradients, but in no optimizer
    optimizer = MADGRAD([*model.parameters(), nn.Parameter(torch.ones(4))], lr=0.05)
    optimizer.step()  # before any backward
    assert not optimizer.state
    model[0].requires_grad_(False)
    model[4](model[2](torch.ones(2, 5))).sum().backward()
    model[2].bias.grad = None  # unused
    optimizer.step()
    assert set(optimizer.state) == {model[2].weight, *model[4].parameters()}
    loose = nn.Parameter(torch.ones(5, 7))  # in no module, of a shape that is sharded elsewhere
    owner = MADGRAD(other.parameters())
    MADGRAD([loose]).step()
    assert owner.param_groups


@on(2, 3)
def a_state_dict_loads_across_layouts():
    full = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    plain = nn.Parameter(full.clone())
    one = MADGRAD([plain], lr=0.1)
    layouts = [Shard(0), Shard(1), Replicate()]
    params = [nn.Parameter(distributed(full, placement)) for placement in layouts]
    many = [MADGRAD([param], lr=0.5) for param in params]

    def step(param, optimizer, k):
        grad = torch.randn(7, 4, generator=torch.Generator().manual_seed(k))
        param.grad = distributed(grad, *param.placements) if isinstance(param, DTensor) else grad
        optimizer.step()

    step(plain, one, 1)
    for param, optimizer in zip(params, many, strict=True):
        sharding.local(param.detach()).copy_(sharding.placed(plain.detach(), param))
        optimizer.load_state_dict(one.state_dict())
    many[1].load_state_dict(many[0].state_dict())
    one.load_state_dict(many[1].state_dict())
    for param, optimizer in ((plain, one), *zip(params, many, strict=True)):
        step(param, optimizer, 2)
        assert cases.same_bits(whole(param), plain.detach())
        assert optimizer.state[param]["step"] == 2
