"""State and step on the CPU: torchao's CPUOffloadOptimizer and FSDP2's CPUOffloadPolicy."""

import contextlib
import copy

import cases
import pytest
import torch
import torch.distributed as dist
from cases import each_class
from short_runs import tanh_net
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def net():
    return tanh_net(96, 64, 8).to(DEVICE)


def train(model, optimizer, steps=range(5)):
    for k in steps:
        x = cases.randn((32, 96), torch.float32, k).to(DEVICE)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


class Stream:
    """A CPU has finished its work when a call returns: there is nothing to wait for."""

    def wait_stream(self, _):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return self


@pytest.fixture
def offloading(monkeypatch):
    """torchao's class. Without a GPU, its "GPU" is the CPU and its streams do nothing."""
    cpu_offload = pytest.importorskip("torchao.optim.cpu_offload")
    if DEVICE == "cpu":
        empty_like = torch.empty_like
        monkeypatch.setattr(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"])
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch, "empty_like", lambda t, **_: empty_like(t, device="cpu"))
    return cpu_offload.CPUOffloadOptimizer


@pytest.mark.parametrize("compact", [False, True])
@each_class
def test_inside_torchaos_offloading_optimizer(cls, compact, offloading):
    reference, model = net(), net()
    train(reference, cls(reference.parameters(), lr=0.01, compact=compact), range(8))
    options = {"minimal_size": 128, "compact": compact}
    optimizer = offloading(model.parameters(), cls, lr=0.01, **options)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    inner = list(optimizer.optim_dict.values())
    assert [len(o.param_groups[0]["params"]) for o in inner] == [1, 1]  # the two matrices
    assert {t.device.type for o in inner for s in o.state.values() for t in s.values()} == {"cpu"}
    again = offloading(model.parameters(), cls, lr=0.5, **options)
    again.load_state_dict(saved)
    train(model, again, range(5, 8))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-6)


@pytest.fixture
def one_process(tmp_path):
    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@on_gpu
@each_class
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.usefixtures("one_process")
def test_fsdp2_steps_where_its_shards_are(cls, offload):
    reference, model = net(), net()
    train(reference, cls(reference.parameters(), lr=0.01))
    model = fully_shard(model, **({"offload_policy": CPUOffloadPolicy()} if offload else {}))
    optimizer = cls(model.parameters(), lr=0.01)
    train(model, optimizer)
    backend = optimizer._backend(optimizer.param_groups[0])
    assert ("cpu" if offload else "triton") == backend.NAME
    assert optimizer._repeats.prepared
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.device.type == ("cpu" if offload else "cuda")
        full = p.detach().to_local().cuda()
        torch.testing.assert_close(full, q.detach(), rtol=1e-6, atol=1e-6)
