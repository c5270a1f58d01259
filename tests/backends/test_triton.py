"""The fused GPU backend beyond the grid: on a GPU where there is one, else interpreted."""

import cases
import numpy as np
import pytest
import torch
from cases import BACKENDS, METHODS
from torch import nn

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernel = pytest.importorskip("cubegrad.backends.triton.kernel")

FUSED = next(backend for backend in BACKENDS if backend.name == "triton")
EAGER = next(backend for backend in BACKENDS if backend.name.startswith("eager"))
DEVICE = FUSED.device
each_method = pytest.mark.parametrize("method", METHODS, ids=str)
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


@triton.jit
def _roots(x, y, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, kernel.cbrt(tl.load(x + at, at < n)), at < n)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [(np.float32, -149, 128), (np.float64, -1074, 1024)]
)
def test_cube_root_within_an_ulp_and_a_half_over_every_exponent(dtype, low, high):
    rng = np.random.default_rng(0)
    mantissas = rng.uniform(1, 2, (high - low, 64))
    x = np.ldexp(mantissas, np.arange(low, high)[:, None]).astype(dtype).ravel()
    x = np.append(x, [0, np.inf]).astype(dtype)
    given = torch.from_numpy(x).to(DEVICE)
    got = torch.empty_like(given)
    _roots[(triton.cdiv(len(x), 4096),)](given, got, len(x), 4096)
    roots = got.cpu().numpy()
    assert roots[-2] == 0
    assert roots[-1] == np.inf
    right = np.cbrt(x[:-2].astype(np.longdouble))
    error = np.abs(roots[:-2] - right) / np.spacing(right.astype(dtype)).astype(np.longdouble)
    assert error.max() < 1.5


def run(backend, method, options, params, grads_of, steps):
    optimizer = cases.build(method, backend, params, options)
    for k in range(steps):
        for param, grad in zip(params, grads_of(k), strict=True):
            param.grad = None if grad is None else grad.to(param.device)
        optimizer.step()
    return optimizer


def params_of(backend, shapes, dtype=torch.float32):
    return [cases.parameter(cases.randn(s, dtype, i), backend.device) for i, s in enumerate(shapes)]


@pytest.mark.compilation
@each_method
def test_many_blocks_and_tails_equal_the_oracle(method):
    shapes = [(3 * 1024,), (3 * 1024 + 1,), (7000,), (1,), (0,), (1024,)]
    params = params_of(FUSED, shapes)
    judges = [method.oracle(cases.numbers(p)) for p in params]
    grads = [
        [cases.randn(s, torch.float32, 10 * k + i) for i, s in enumerate(shapes)] for k in range(3)
    ]
    optimizer = run(FUSED, method, {}, params, grads.__getitem__, 3)
    for i, (param, judge) in enumerate(zip(params, judges, strict=True)):
        for k in range(3):
            judge.step(cases.numbers(grads[k][i]), cases.settings({}))
        np.testing.assert_allclose(cases.numbers(param), judge.x, rtol=2e-6, atol=1e-7)
        assert optimizer.state[param]["step"] == 3


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-8, 1.0, 1e8, 1e18])
@each_method
def test_one_step_at_any_size_of_gradient(method, size):
    """Up to where g² leaves float32; beyond, see the next test."""
    param = cases.parameter(torch.zeros(200), DEVICE)
    judge = method.oracle(cases.numbers(param))
    grad = cases.randn((200,), torch.float32, 1) * size
    run(FUSED, method, {}, [param], lambda _: [grad], 1)
    judge.step(cases.numbers(grad), cases.settings({}))
    scale = np.abs(judge.x).max()
    np.testing.assert_allclose(cases.numbers(param), judge.x, rtol=2e-6, atol=2e-6 * scale * 1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@each_method
def test_float64_takes_any_gradient_and_float32_never_makes_a_nan(method, size):
    grad = cases.randn((200,), torch.float64, 1) * size
    wide = cases.parameter(torch.zeros(200, dtype=torch.float64), DEVICE)
    judge = method.oracle(cases.numbers(wide))
    run(FUSED, method, {}, [wide], lambda _: [grad], 3)
    for _ in range(3):
        judge.step(cases.numbers(grad), cases.settings({}))
    np.testing.assert_allclose(cases.numbers(wide), judge.x, rtol=1e-12)
    narrow = cases.parameter(torch.ones(200), DEVICE)
    run(FUSED, method, {}, [narrow], lambda _: [grad.float()], 3)
    assert torch.isfinite(narrow).all()


@pytest.mark.compilation
@each_method
def test_a_long_run_stays_within_a_ten_thousandth(method):
    steps = 1000 if DEVICE == "cuda" else 60
    param = params_of(FUSED, [(300,)])[0]
    judge = method.oracle(cases.numbers(param))
    grads = [cases.randn((300,), torch.float32, k) for k in range(steps)]
    run(FUSED, method, {}, [param], lambda k: [grads[k]], steps)
    for grad in grads:
        judge.step(cases.numbers(grad), cases.settings({}))
    error = np.abs(cases.numbers(param) - judge.x).max() / np.abs(judge.x).max()
    assert error < 1e-4


def test_unaligned_views_take_the_careful_path():
    room = cases.randn((5000,), torch.float32, 0).to(DEVICE)
    twin = room.clone()
    views = [nn.Parameter(t[1:4001]) for t in (room, twin)]
    grad = cases.randn((4001,), torch.float32, 1).to(DEVICE)[1:]
    for view, backend in zip(views, (FUSED, EAGER), strict=True):
        run(backend, cases.MADGRAD, {"weight_decay": 0.1}, [view], lambda _: [grad], 2)
    torch.testing.assert_close(views[0], views[1], rtol=1e-6, atol=1e-7)
    assert room[0] == twin[0]
    assert torch.equal(room[4001:], twin[4001:])


@pytest.mark.parametrize("scaled", [True, False])
@each_method
def test_a_grad_scalers_numbers_are_honoured_in_the_kernel(method, scaled):
    params = params_of(FUSED, [(2000,), (3,)])
    twins = params_of(FUSED, [(2000,), (3,)])
    optimizer = cases.build(method, FUSED, params, {})
    plain = cases.build(method, FUSED, twins, {})
    assert optimizer._step_supports_amp_scaling
    for k, overflow in enumerate([0.0, 1.0, 0.0, 1.0, 0.0]):
        optimizer.found_inf = torch.tensor(overflow, device=DEVICE)
        optimizer.grad_scale = torch.tensor(8.0, device=DEVICE) if scaled else None
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            q.grad = cases.randn(p.shape, p.dtype, 10 * k + i).to(DEVICE)
            p.grad = q.grad * (8.0 if scaled else 1.0)
        held = [*params, *(t for s in optimizer.state.values() for t in s.values())]
        grads = [p.grad for p in params]
        if overflow:
            params[0].grad[0] = float("inf")
            with cases.no_change(*held):
                optimizer.step()
        else:
            with cases.no_change(*grads):
                optimizer.step()
            plain.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert optimizer.state[p]["step"] == 3


@on_gpu
def test_a_real_grad_scaler_skips_without_a_sync():
    param = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = cases.MADGRAD.optimizer([param], lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((param * factor).sum()).backward()
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(param, before) == (factor != 1.0)
    assert optimizer.state[param]["step"] == 2


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("capturable", [False, True])
@each_method
def test_no_step_waits_for_the_device(method, capturable):
    params = params_of(FUSED, [(1000,), (5, 7)])
    lr = torch.tensor(0.1, device="cuda") if capturable else 0.1
    options = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    optimizer = method.optimizer(params, lr=lr, capturable=capturable, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.state[params[0]]["step"] == 3


@on_gpu
@each_method
def test_a_whole_iteration_captured_in_a_graph(method):
    """Gradients that first exist inside the capture: their table is uploaded by the graph."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 1)).cuda() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    inputs = torch.zeros(16, 20, device="cuda")
    lr = torch.tensor(0.05, device="cuda")
    optimizer = method.optimizer(nets[0].parameters(), lr=lr, capturable=True)
    plain = method.optimizer(nets[1].parameters(), lr=0.05)

    def iterate(net, opt):
        opt.zero_grad(set_to_none=True)
        net(inputs).square().mean().backward()
        opt.step()

    inputs.copy_(cases.randn((16, 20), torch.float32, 0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        iterate(nets[0], optimizer)
    torch.cuda.current_stream().wait_stream(side)
    iterate(nets[1], plain)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        iterate(nets[0], optimizer)
    for k in range(1, 30):
        inputs.copy_(cases.randn((16, 20), torch.float32, k))
        lr.fill_(0.05 / k)
        plain.param_groups[0]["lr"] = 0.05 / k
        torch.cuda.empty_cache()
        graph.replay()
        iterate(nets[1], plain)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@on_gpu
def test_compiles_once_within_five_seconds_whatever_the_shapes():
    import time

    def count():
        return sum(len(cache[0]) for cache in kernel.step_units.device_caches.values())

    options = {"lr": 0.1, "eps": 1e-5}
    first = params_of(FUSED, [(17, 3)])
    start = time.perf_counter()
    run(FUSED, cases.MADGRAD, options, first, lambda k: [cases.randn((17, 3), torch.float32, k)], 1)
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 5
    compiled = count()
    for shapes, lr in (([(1,)], 0.0), ([(1000,)] * 40, 1.0), ([(1 << 20,), (3,)], 2.5e-4)):
        params = params_of(FUSED, shapes)
        grads = [torch.randn(s) for s in shapes]
        run(FUSED, cases.MADGRAD, options | {"lr": lr}, params, lambda _, g=grads: g, 3)
    assert count() == compiled


@on_gpu
def test_more_than_two_to_the_31_elements_in_one_tensor():
    elements = 2**31 + 5000
    param = nn.Parameter(torch.zeros(elements, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.zeros_like(param)
    param.grad[-5000:] = 1
    param.grad[2**30] = 1
    optimizer = cases.MADGRAD.optimizer([param], lr=0.1, momentum=0.0)
    optimizer.step()
    moved = torch.nonzero(param.detach()[-6000:]).flatten()
    assert moved.numel() == 5000
    assert moved[0] == 1000
    assert param[2**30] < 0
    assert param[2**30 - 1] == 0
