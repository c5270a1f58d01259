"""torch.compile: one full graph, and no recompilation while the numbers change."""

import cases
import pytest
import torch
from cases import each_class
from short_runs import advance, cloned, ones, parameters, set_grads
from torch import nn
from torch._dynamo.testing import CompileCounter

from cubegrad import MADGRAD, MADGRADW
from cubegrad.backends import rounding

each_of_two = pytest.mark.parametrize("cls", [MADGRAD, MADGRADW])
pytestmark = [
    pytest.mark.compilation,
    pytest.mark.filterwarnings("ignore:Profiler record function"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def two_runs(cls, lr, **options):
    """Twice the same parameters, optimizer and scheduler."""
    runs = []
    for _ in range(2):
        params = parameters([(4, 3)] * 3, torch.float64)
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        optimizer = cls(params, lr=rate, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
        runs.append((params, optimizer, scheduler))
    return runs


@pytest.mark.parametrize("momentum", [0.9, torch.tensor(0.9)], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "lr", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["float", "tensor"]
)
@each_class
def test_full_graph_without_recompilation(cls, lr, momentum):
    compiled, plain = two_runs(cls, lr, momentum=momentum, weight_decay=0.01)
    counter = CompileCounter()
    step = torch.compile(compiled[1].step, fullgraph=True, backend=counter)
    seen, counts = set(), []
    for k in range(20):
        for params in (compiled[0], plain[0]):
            set_grads(params, k)
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
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)  # OneCycleLR rounds to float32
        assert compiled[1].state[p]["step"] == 20


def test_changes_of_a_tensor_lr_never_recompile():
    params = parameters([(3,)] * 6, torch.float64)
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
@each_of_two
def test_every_option_compiles_to_the_same_run(cls, options):
    assert_compiled_agrees(cls, torch.float64, "eager", options, rtol=0, atol=1e-12)


@each_of_two
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_inductor_code_agrees(cls, dtype):
    """With the same z in half precision too, whose rounding the compiler could leave out."""
    assert_compiled_agrees(cls, dtype, "inductor", {}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_alike_in_a_trace(dtype):
    """By bits there, where a conversion and back would be left out."""
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1.0, 1e-3, 3e-5, 1e-7, 1e-40, 1e4, 1e38])
    ties = torch.arange(-4, 5) * 2.0**-25
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0])
    x = torch.cat([(wide * sizes[:, None]).flatten(), ties, 1 + 2.0**-11 * ties.sign(), ends])
    traced = torch.compile(rounding.nearest, fullgraph=True)(x, dtype)
    expected = x.to(dtype).float()
    assert cases.same_bits(traced.nan_to_num(7.0), expected.nan_to_num(7.0))


def assert_compiled_agrees(cls, dtype, backend, options, **tolerances):
    runs = []
    for compiled in (True, False):
        params = parameters([(33,)], dtype)
        optimizer = cls(params, lr=0.1, **options)
        if compiled:
            optimizer.step = torch.compile(optimizer.step, fullgraph=True, backend=backend)
        advance(optimizer, params, range(5))
        runs.append((params[0].detach(), dict(optimizer.state[params[0]])))
    torch.testing.assert_close(*runs, **tolerances)


class _NoHostRead(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, (
            "a tensor was read on the host"
        )
        return func(*args, **(kwargs or {}))


def test_a_first_step_that_cannot_be_traced_says_what_to_do():
    param = ones(3)
    optimizer = MADGRAD([param], lr="auto")
    step = torch.compile(optimizer.step, fullgraph=True, backend="eager")
    param.grad = torch.ones(3)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"make one plain optimizer\.step\(\)"):
        step()
    assert not optimizer.state
    optimizer.step()
    step()
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_a_flag_that_is_no_boolean_is_refused(is_first):
    param = ones(3)
    optimizer = MADGRAD([param])
    step = torch.compile(optimizer.step, backend="eager")
    param.grad = torch.ones(3)
    if not is_first:
        step()
    optimizer.param_groups[0]["decoupled_weight_decay"] = 0.1
    with cases.no_change(param), pytest.raises(TypeError, match=r"pass weight_decay=0\.1"):
        step()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_an_eps_that_changes_and_returns(momentum):
    """Its first graph would run again. Without momentum x_0 is recovered at the last eps."""
    ends = []
    for compiled in (False, True):
        (param,) = parameters([(4, 3)], torch.float64)
        optimizer = MADGRAD([param], momentum=momentum, foreach=False)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for k, eps in enumerate([1e-6, 0.05, 1e-6, 1e-6]):
            optimizer.param_groups[0]["eps"] = eps
            set_grads([param], k)
            step()
        with optimizer.edit_weights():
            param.mul_(0.5)
        ends.append(advance(optimizer, [param], range(4, 8)) and param.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


@pytest.mark.parametrize("foreach", [False, True])
@each_class
def test_capturable_reads_no_tensor_on_the_host(cls, foreach):
    param = ones(3)
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
@each_class
def test_a_cuda_graph_replays_with_a_changing_lr(cls, flags):
    params = parameters([(50,)] * 2, device="cuda")
    grads = [torch.zeros(50, device="cuda") for _ in params]
    twins = cloned(params)
    lr = torch.tensor(0.1, device="cuda")
    optimizer = cls(params, lr=lr, capturable=True, **flags)
    plain = cls(twins, lr=0.1, **flags)
    graph = torch.cuda.CUDAGraph()
    for k in range(100):
        rate = 0.1 / (k + 1)
        lr.fill_(rate)
        plain.param_groups[0]["lr"] = rate
        set_grads(twins, k)
        for p, q, grad in zip(params, twins, grads, strict=True):
            p.grad = grad.copy_(q.grad)
        if k == 1:
            with torch.cuda.graph(graph):
                optimizer.step()
        optimizer.step() if k == 0 else graph.replay()
        plain.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # since the step is refused
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
