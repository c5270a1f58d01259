"""The fused GPU backend, on a GPU or interpreted: what the grid of test_backends.py leaves out."""

import cases
import numpy as np
import pytest
import torch
from cases import each_method
from short_runs import parameters, set_grads, tanh_net
from torch import nn

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernel = pytest.importorskip("cubegrad.backends.triton.kernel")

FUSED, DEVICE = cases.TRITON, cases.TRITON.device
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
    inputs = torch.from_numpy(x).to(DEVICE)
    outputs = torch.empty_like(inputs)
    _roots[(triton.cdiv(len(x), 4096),)](inputs, outputs, len(x), 4096)
    roots = outputs.cpu().numpy()
    assert roots[-2] == 0
    assert roots[-1] == np.inf
    exact = np.cbrt(x[:-2].astype(np.longdouble))
    error = np.abs(roots[:-2] - exact) / np.spacing(exact.astype(dtype)).astype(np.longdouble)
    assert error.max() < 1.5


def run(backend, method, options, params, grads):
    """Step with these gradients: for each step a list with one for each parameter."""
    optimizer = cases.build(method, backend, params, options)
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.to(param.device)
        optimizer.step()
    return optimizer


def oracle_results(method, params, grads):
    """The parameters after steps of the oracle with these gradients."""
    results = []
    for param, own in zip(params, zip(*grads, strict=True), strict=True):
        reference = method.oracle(cases.numbers(param))
        for grad in own:
            reference.step(cases.numbers(grad), cases.settings({}))
        results.append(reference.x)
    return results


@pytest.mark.compilation
@each_method
def test_many_blocks_and_tails_equal_the_oracle(method):
    shapes = [(3 * 1024,), (3 * 1024 + 1,), (7000,), (1,), (0,), (1024,)]
    params = parameters(shapes, device=DEVICE)
    grads = [
        [cases.randn(s, torch.float32, 10 * k + i) for i, s in enumerate(shapes)] for k in range(3)
    ]
    expected = oracle_results(method, params, grads)
    optimizer = run(FUSED, method, {}, params, grads)
    for param, numbers in zip(params, expected, strict=True):
        np.testing.assert_allclose(cases.numbers(param), numbers, rtol=2e-6, atol=1e-7)
        assert optimizer.state[param]["step"] == 3


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-8, 1.0, 1e8, 1e18])
@each_method
def test_one_step_with_gradients_of_any_size(method, size):
    """As long as g² fits into float32; the next test goes beyond."""
    param = cases.parameter(torch.zeros(200), DEVICE)
    grads = [[cases.randn((200,), torch.float32, 1) * size]]
    (expected,) = oracle_results(method, [param], grads)
    run(FUSED, method, {}, [param], grads)
    atol = 2e-9 * np.abs(expected).max()
    np.testing.assert_allclose(cases.numbers(param), expected, rtol=2e-6, atol=atol)


@pytest.mark.parametrize("size", [1e-30, 1e30])
@each_method
def test_float64_steps_with_any_gradient_and_float32_makes_no_nan(method, size):
    grad = cases.randn((200,), torch.float64, 1) * size
    wide = cases.parameter(torch.zeros(200, dtype=torch.float64), DEVICE)
    (expected,) = oracle_results(method, [wide], [[grad]] * 3)
    run(FUSED, method, {}, [wide], [[grad]] * 3)
    np.testing.assert_allclose(cases.numbers(wide), expected, rtol=1e-12)
    narrow = cases.parameter(torch.ones(200), DEVICE)
    run(FUSED, method, {}, [narrow], [[grad.float()]] * 3)
    assert torch.isfinite(narrow).all()


@pytest.mark.compilation
@each_method
def test_a_long_run_stays_within_a_ten_thousandth(method):
    params = parameters([(300,)], device=DEVICE)
    steps = 1000 if DEVICE == "cuda" else 60
    grads = [[cases.randn((300,), torch.float32, k)] for k in range(steps)]
    (expected,) = oracle_results(method, params, grads)
    run(FUSED, method, {}, params, grads)
    assert np.abs(cases.numbers(params[0]) - expected).max() < 1e-4 * np.abs(expected).max()


def test_unaligned_views_equal_the_eager_backend():
    room = cases.randn((5000,), torch.float32, 0).to(DEVICE)
    twin = room.clone()
    views = [nn.Parameter(t[1:4001]) for t in (room, twin)]
    grad = cases.randn((4001,), torch.float32, 1).to(DEVICE)[1:]
    for view, backend in zip(views, (FUSED, cases.EAGER), strict=True):
        run(backend, cases.MADGRAD, {"weight_decay": 0.1}, [view], [[grad]] * 2)
    torch.testing.assert_close(views[0], views[1], rtol=1e-6, atol=1e-7)
    assert room[0] == twin[0]
    assert torch.equal(room[4001:], twin[4001:])


@pytest.mark.parametrize("scaled", [True, False])
@each_method
def test_the_kernel_unscales_gradients_and_skips_overflows(method, scaled):
    params = parameters([(2000,), (3,)], device=DEVICE)
    twins = parameters([(2000,), (3,)], device=DEVICE)
    optimizer = cases.build(method, FUSED, params, {})
    plain = cases.build(method, FUSED, twins, {})
    assert optimizer._step_supports_amp_scaling
    for k, overflow in enumerate([0.0, 1.0, 0.0, 1.0, 0.0]):
        optimizer.found_inf = torch.tensor(overflow, device=DEVICE)
        optimizer.grad_scale = torch.tensor(8.0, device=DEVICE) if scaled else None
        set_grads(twins, k)
        for p, q in zip(params, twins, strict=True):
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
@pytest.mark.parametrize("capturable", [False, True])
@each_method
def test_no_step_waits_for_the_device(method, capturable):
    params = parameters([(1000,), (5, 7)], device=DEVICE)
    lr = torch.tensor(0.1, device="cuda") if capturable else 0.1
    options = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    optimizer = method.optimizer(params, lr=lr, capturable=capturable, **options)
    with cases.no_waiting():
        for _ in range(3):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 3


@on_gpu
@each_method
def test_a_whole_iteration_captured_in_a_graph(method):
    """Gradients that first exist inside the capture: their table is uploaded by the graph."""
    nets = [tanh_net(20, 30, 1).cuda() for _ in range(2)]
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
    first = parameters([(17, 3)], device=DEVICE)
    start = time.perf_counter()
    run(FUSED, cases.MADGRAD, options, first, [[cases.randn((17, 3), torch.float32, 0)]])
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 5
    compiled = count()
    for shapes, lr in (([(1,)], 0.0), ([(1000,)] * 40, 1.0), ([(1 << 20,), (3,)], 2.5e-4)):
        params = parameters(shapes, device=DEVICE)
        grads = [torch.randn(s) for s in shapes]
        run(FUSED, cases.MADGRAD, options | {"lr": lr}, params, [grads] * 3)
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
