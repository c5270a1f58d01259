"""torch.compile: one full graph, and no recompilation while the numbers change."""

import cases
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from cubegrad import MADGRAD, MirrorMADGRAD

pytestmark = [
    pytest.mark.compilation,
    pytest.mark.filterwarnings("ignore:Profiler record function"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def pair(cls, lr, **options):
    """A compiled optimizer with its scheduler, and the same not compiled."""
    torch._dynamo.reset()
    runs = []
    for _ in range(2):
        params = [nn.Parameter(cases.randn((4, 3), torch.float64, i)) for i in range(3)]
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        optimizer = cls(params, lr=rate, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        runs.append((params, optimizer, scheduler))
    return runs


@pytest.mark.parametrize("momentum", [0.9, torch.tensor(0.9)], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["float", "tensor"]
)
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_full_graph_without_recompilation(cls, lr, momentum):
    compiled, plain = pair(cls, lr, momentum=momentum, weight_decay=0.01)
    counter = CompileCounter()
    step = torch.compile(compiled[1].step, fullgraph=True, backend=counter)
    seen, counts = set(), []
    for k in range(20):
        for i, (p, q) in enumerate(zip(compiled[0], plain[0], strict=True)):
            p.grad = cases.randn((4, 3), torch.float64, 100 * k + i)
            q.grad = p.grad.clone()
        step()
        plain[1].step()
        group = compiled[1].param_groups[0]
        seen.add((float(group["lr"]), float(group["momentum"])))
        counts.append(counter.frame_count)
        compiled[2].step()
        plain[2].step()
    assert len(seen) == 20
    assert 1 <= counts[2] == counts[-1]
    for p, q in zip(compiled[0], plain[0], strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)  # OneCycleLR's floats meet as float32
        assert compiled[1].state[p]["step"] == 20


def test_a_tensor_lr_never_recompiles_whenever_it_changes():
    torch._dynamo.reset()
    params = [nn.Parameter(cases.randn((3,), torch.float64, i)) for i in range(6)]
    groups = [{"params": [p], "lr": torch.tensor(0.1)} for p in params]
    optimizer = MADGRAD(groups, momentum=torch.tensor(0.9))
    counter = CompileCounter()
    step = torch.compile(optimizer.step, fullgraph=True, backend=counter)
    counts = []
    for k in range(16):
        for param in params:
            param.grad = torch.ones_like(param)
        if k >= 4:
            optimizer.param_groups[k % 6]["lr"].mul_(0.5)
            optimizer.param_groups[k % 6]["momentum"].mul_(0.99)
        step()
        counts.append(counter.frame_count)
    assert counts[2] == counts[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0},
        {"eps": 0.0},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.01, "decoupled_lr": True},
        {"maximize": True},
    ],
    ids=str,
)
def test_every_option_compiles_to_the_same_run(options):
    torch._dynamo.reset()
    params, twins = ([nn.Parameter(cases.randn((5,), torch.float64, 1))] for _ in range(2))
    compiled, plain = (MADGRAD(p, lr=0.1, **options) for p in (params, twins))
    step = torch.compile(compiled.step, fullgraph=True, backend="eager")
    for k in range(5):
        params[0].grad = cases.randn((5,), torch.float64, k)
        twins[0].grad = params[0].grad.clone()
        step()
        plain.step()
    torch.testing.assert_close(params[0], twins[0], rtol=0, atol=1e-12)


def test_inductor_code_agrees():
    torch._dynamo.reset()
    params, twins = ([nn.Parameter(cases.randn((33,), torch.float32, 1))] for _ in range(2))
    compiled, plain = (MADGRAD(p, lr=0.1) for p in (params, twins))
    step = torch.compile(compiled.step, fullgraph=True)
    for k in range(5):
        params[0].grad = cases.randn((33,), torch.float32, k)
        twins[0].grad = params[0].grad.clone()
        step()
        plain.step()
    torch.testing.assert_close(params[0], twins[0], rtol=1e-5, atol=1e-6)


class _NoHostRead(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, (
            "a tensor was read on the host"
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_capturable_reads_no_tensor_on_the_host(cls, foreach):
    param = nn.Parameter(torch.ones(3))
    lr, momentum = torch.tensor(0.1), torch.tensor(0.9)
    decay = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    optimizer = cls([param], lr=lr, momentum=momentum, foreach=foreach, capturable=True, **decay)
    param.grad = torch.ones(3)
    with _NoHostRead():
        optimizer.step()
        lr.mul_(0.5)
        optimizer.step()
    assert optimizer.state[param]["step"] == 2
    assert optimizer.state[param]["step"].device == param.device
    plain = cls([param], lr=0.1, foreach=foreach)
    with _NoHostRead(), pytest.raises(AssertionError, match="read on the host"):
        plain.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_a_cuda_graph_replays_with_a_changing_lr(cls, flags):
    params = [nn.Parameter(cases.randn((50,), torch.float32, i).cuda()) for i in range(2)]
    grads = [torch.zeros(50, device="cuda") for _ in params]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    lr = torch.tensor(0.1, device="cuda")
    optimizer = cls(params, lr=lr, capturable=True, **flags)
    plain = cls(twins, lr=0.1, **flags)
    graph = torch.cuda.CUDAGraph()
    for k in range(100):
        rate = 0.1 / (k + 1)
        lr.fill_(rate)
        plain.param_groups[0]["lr"] = rate
        for i, (p, q, grad) in enumerate(zip(params, twins, grads, strict=True)):
            grad.copy_(cases.randn((50,), torch.float32, 10 * k + i))
            p.grad, q.grad = grad, grad.clone()
        if k == 1:
            with torch.cuda.graph(graph):
                optimizer.step()
        optimizer.step() if k == 0 else graph.replay()
        plain.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the refused step leaves it so
def test_capturing_without_capturable_is_refused():
    param = nn.Parameter(torch.ones(3, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = MADGRAD([param])
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="capturable=True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
