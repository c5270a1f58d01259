"""The corners in which MADGRAD packages differ from the paper; each backend is right in all."""

import math

import cases
import numpy as np
import pytest
import torch
from cases import BACKENDS, MADGRAD, METHODS, MIRROR
from torch import nn

import cubegrad

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


def parameter(backend, *shape, dtype=torch.float32, seed=0):
    return cases.parameter(cases.randn(shape, dtype, seed), backend.device)


def set_grad(param, seed, scale=1.0):
    param.grad = (cases.randn(tuple(param.shape), param.dtype, seed) * scale).to(param.device)


@pytest.mark.parametrize(
    "decay", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}]
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_method
@each_backend
def test_a_first_step_at_lr_zero_moves_no_bit(backend, method, momentum, decay):
    for dtype in backend.dtypes:
        param = parameter(backend, 50, dtype=dtype)
        with torch.no_grad():
            param[0], param[1] = 0.0, -0.0
        options = {"lr": 0.0, "momentum": momentum, **decay}
        optimizer = cases.build(method, backend, [param], options)
        set_grad(param, 1, scale=100.0)
        with cases.no_change(param, param.grad):
            optimizer.step()
        assert optimizer.state[param]["step"] == 1


@each_backend
def test_no_eps_in_the_step_size(backend):
    """With eps as large as 0.1, the sums after one step still are lr·g and lr·g²."""
    param = parameter(backend, 20, dtype=torch.float64)
    optimizer = cases.build(MADGRAD, backend, [param], {"lr": 1e-3, "eps": 0.1})
    set_grad(param, 1)
    optimizer.step()
    state = optimizer.state[param]
    torch.testing.assert_close(state["grad_sum"], 1e-3 * param.grad, rtol=1e-7, atol=0)
    torch.testing.assert_close(state["grad_sq_sum"], 1e-3 * param.grad**2, rtol=1e-7, atol=0)


@each_backend
def test_later_lr_zero_leaves_the_sums_alone_and_averages_towards_z(backend):
    param = parameter(backend, 20)
    optimizer = cases.build(MADGRAD, backend, [param], {"lr": 1e-1})
    for k in range(5):
        set_grad(param, k)
        optimizer.step()
    state = optimizer.state[param]
    z = state["initial_param"] - state["grad_sum"] / (state["grad_sq_sum"] ** (1 / 3) + 1e-6)
    distance = (param.detach() - z).norm()
    optimizer.param_groups[0]["lr"] = 0.0
    with cases.no_change(state["grad_sum"], state["grad_sq_sum"], state["initial_param"]):
        optimizer.step()
    ratio = ((param.detach() - z).norm() / distance).item()
    assert ratio == pytest.approx(0.9, abs=1e-4)


@each_backend
def test_without_momentum_a_later_lr_zero_moves_no_bit(backend):
    param = parameter(backend, 200)
    optimizer = cases.build(MADGRAD, backend, [param], {"lr": 1e-1, "momentum": 0.0})
    for k in range(5):
        set_grad(param, k)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    with cases.no_change(param):
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_method
@each_backend
def test_a_zero_denominator_keeps_the_coordinate_in_place(backend, method, momentum):
    param = parameter(backend, 4)
    start = param.detach().clone()
    optimizer = cases.build(method, backend, [param], {"eps": 0.0, "momentum": momentum})
    for _ in range(5):
        # Nothing; a square that underflows; a subnormal; a proper gradient.
        param.grad = torch.tensor([0.0, 1e-30, 1e-42, 0.5]).to(param.device)
        optimizer.step()
    assert torch.isfinite(param).all()
    assert cases.same_bits(param.detach()[:3], start[:3])
    assert param[3] < start[3]


@each_backend
def test_eps_too_small_to_invert_is_not_a_nan(backend):
    param = parameter(backend, 3)
    start = param.detach().clone()
    optimizer = cases.build(MADGRAD, backend, [param], {"eps": 1e-42})
    param.grad = torch.tensor([0.0, 1e-30, 1.0]).to(param.device)
    optimizer.step()
    assert cases.same_bits(param.detach()[:2], start[:2])
    assert param[2] < start[2]


@each_method
@each_backend
def test_gradients_are_never_modified(backend, method):
    for options in (
        {"weight_decay": 0.1},
        {"maximize": True},
        {"weight_decay": 0.1, "momentum": 0.0},
    ):
        param = parameter(backend, 20)
        optimizer = cases.build(method, backend, [param], options)
        set_grad(param, 3)
        grad = param.grad
        with cases.no_change(grad):
            optimizer.step()
        assert param.grad is grad


@each_backend
def test_no_momentum_keeps_no_initial_param(backend):
    param = parameter(backend, 20)
    optimizer = cases.build(MADGRAD, backend, [param], {"momentum": 0.0})
    set_grad(param, 0)
    optimizer.step()
    assert set(optimizer.state[param]) == {"step", "grad_sum", "grad_sq_sum"}


@pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.3, "decoupled_weight_decay": True}])
@each_backend
def test_momentum_switched_off_and_on_follows_the_oracle(backend, decay):
    param = parameter(backend, 30, dtype=torch.float64)
    judge = MADGRAD.oracle(cases.numbers(param))
    optimizer = cases.build(MADGRAD, backend, [param], decay)
    for k in range(60):
        momentum = [0.0, 0.9, 0.0, 0.5][k // 15]
        optimizer.param_groups[0]["momentum"] = momentum
        set_grad(param, k)
        optimizer.step()
        judge.step(cases.numbers(param.grad), cases.settings(decay | {"momentum": momentum}))
        assert ("initial_param" in optimizer.state[param]) == (momentum != 0)
        np.testing.assert_allclose(cases.numbers(param), judge.x, rtol=0, atol=1e-12)


@each_backend
def test_a_parameter_without_gradient_during_the_switch(backend):
    params = [parameter(backend, 8, dtype=torch.float64, seed=i) for i in range(2)]
    judges = [MADGRAD.oracle(cases.numbers(p)) for p in params]
    optimizer = cases.build(MADGRAD, backend, params, {})
    for k, (momentum, absent) in enumerate(
        [(0.9, None), (0.0, 0), (0.0, 1), (0.0, None), (0.9, 0)]
    ):
        optimizer.param_groups[0]["momentum"] = momentum
        for i, (param, judge) in enumerate(zip(params, judges, strict=True)):
            param.grad = None
            if i != absent:
                set_grad(param, 10 * k + i)
                o = cases.settings({"momentum": momentum})
                judge.step(cases.numbers(param.grad), o)
        optimizer.step()
    for param, judge in zip(params, judges, strict=True):
        np.testing.assert_allclose(cases.numbers(param), judge.x, rtol=0, atol=1e-12)


@each_method
@each_backend
def test_each_parameter_counts_its_own_steps(backend, method):
    early, late = (parameter(backend, 6, dtype=torch.float64, seed=i) for i in range(2))
    judges = [method.oracle(cases.numbers(early))]
    optimizer = cases.build(method, backend, [early], {})
    for k in range(10):
        if k == 4:
            with torch.no_grad():
                late.mul_(3)  # weights loaded after the optimizer was built are the centre
            optimizer.add_param_group({"params": [late]})
            judges.append(method.oracle(cases.numbers(late)))
        for i, judge in enumerate(judges):
            set_grad((early, late)[i], 100 * i + k)
            judge.step(cases.numbers((early, late)[i].grad), cases.settings({}))
        optimizer.step()
    assert optimizer.state[early]["step"] == 10
    assert optimizer.state[late]["step"] == 6
    for param, judge in zip((early, late), judges, strict=True):
        assert isinstance(optimizer.state[param]["step"], torch.Tensor)
        np.testing.assert_allclose(cases.numbers(param), judge.x, rtol=0, atol=1e-12)


@each_backend
def test_initial_param_is_a_copy_of_the_value_at_the_first_step(backend):
    param = parameter(backend, 6)
    optimizer = cases.build(MADGRAD, backend, [param], {})
    with torch.no_grad():
        param.copy_(torch.arange(6.0))
    set_grad(param, 0)
    optimizer.step()
    centre = optimizer.state[param]["initial_param"]
    assert torch.equal(centre.cpu(), torch.arange(6.0))
    assert centre.data_ptr() != param.data_ptr()


@each_method
@each_backend
def test_decoupled_decay_decays_as_adamw_does(backend, method):
    """Where x alone is shrunk, z holds it: the norm stops falling after a few steps."""
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True}
    param = parameter(backend, 50)
    twin = nn.Parameter(param.detach().clone())
    optimizer = cases.build(method, backend, [param], options)
    adamw = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.5)
    for _ in range(100):
        param.grad, twin.grad = torch.zeros_like(param), torch.zeros_like(twin)
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(param, twin, rtol=1e-4, atol=0)
    assert param.norm() < 0.01 * parameter(backend, 50).norm()


@each_method
@each_backend
def test_decoupled_lr_decays_alike_at_any_lr(backend, method):
    norms = []
    for lr in (1e-4, 1e-1):
        param = parameter(backend, 50)
        options = {"lr": lr, "weight_decay": 0.01, "decoupled_lr": True}
        optimizer = cases.build(method, backend, [param], options)
        for k in range(20):
            optimizer.param_groups[0]["lr"] = lr * (0.5 if k >= 10 else 1.0)
            param.grad = torch.zeros_like(param)
            optimizer.step()
        norms.append((param.norm() / parameter(backend, 50).norm()).item())
    assert norms[0] == pytest.approx(0.99**10 * 0.995**10, rel=1e-4)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@each_method
@each_backend
def test_decayed_weights_do_not_come_back(backend, method):
    """After a long decay, gradients of another kind must not revive the old distance from x_0."""
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True, "momentum": 0.0}
    param = parameter(backend, 1, dtype=torch.float64)
    optimizer = cases.build(method, backend, [param], options)
    for _ in range(20):
        param.grad = torch.full_like(param, 1.0)
        optimizer.step()
    for _ in range(400):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert param.abs().item() < 1e-8
    for k in range(200):  # noise that sums to nothing but doubles ν
        param.grad = torch.full_like(param, 1e-3 * (-1) ** k)
        optimizer.step()
    assert param.abs().item() < 0.2


@each_method
@each_backend
def test_half_precision_keeps_float32_state(backend, method):
    for dtype in (torch.float16, torch.bfloat16):
        if dtype not in backend.dtypes:
            continue
        param = parameter(backend, 10, dtype=dtype)
        optimizer = cases.build(method, backend, [param], {})
        param.grad = torch.full_like(param, 300.0)  # 300² overflows float16
        before = param.detach().clone()
        optimizer.step()
        assert {t.dtype for t in optimizer.state[param].values()} == {torch.float32}
        assert torch.isfinite(param).all()
        assert not torch.equal(param, before)


@each_backend
def test_half_precision_without_momentum_loses_no_small_move(backend):
    """Each move is below x's last place; recovered from the rounded x, x_0 would swallow them."""
    for dtype in (torch.float16, torch.bfloat16):
        if dtype not in backend.dtypes:
            continue
        param = cases.parameter(torch.ones(1, dtype=dtype), backend.device)
        judge = MADGRAD.oracle(cases.numbers(param))
        options = {"lr": 1e-4, "momentum": 0.0}
        optimizer = cases.build(MADGRAD, backend, [param], options)
        for _ in range(60):
            param.grad = torch.ones_like(param)
            optimizer.step()
            judge.step(np.ones(1), cases.settings(options))
        assert judge.x[0] < 0.95
        assert param.item() == pytest.approx(judge.x[0], rel=2.0**-7)


@each_method
@each_backend
def test_a_gradient_that_is_a_negated_or_conjugated_view(backend, method):
    for dtype in (torch.float32, torch.complex64):
        grad = cases.randn((5,), dtype, 1).to(backend.device)
        lazy = torch._neg_view(grad).conj() if dtype.is_complex else torch._neg_view(grad)
        params = [parameter(backend, 5, dtype=dtype) for _ in range(2)]
        for param, given in zip(params, (lazy, lazy.resolve_neg().resolve_conj()), strict=True):
            optimizer = cases.build(method, backend, [param], {})
            for _ in range(3):
                param.grad = given
                optimizer.step()
        assert torch.equal(params[0], params[1])
        assert not torch.equal(params[0], parameter(backend, 5, dtype=dtype))


def test_mirror_defaults_to_no_eps():
    param = nn.Parameter(torch.ones(2))
    optimizer = MIRROR.optimizer([param])
    assert optimizer.defaults["eps"] == 0.0
    param.grad = torch.tensor([0.0, 1.0])
    optimizer.step()
    assert set(optimizer.state[param]) == {"step", "grad_sq_sum", "z"}
    assert param.tolist() == pytest.approx([1.0, 1 - 0.1 * 1e-2])


def test_lr_and_momentum_may_be_tensors():
    plain, tensors = (nn.Parameter(torch.ones(5)) for _ in range(2))
    one = cubegrad.MADGRAD([plain], lr=0.1, momentum=0.5)
    two = cubegrad.MADGRAD([tensors], lr=torch.tensor(0.1), momentum=torch.tensor([0.5]))
    for k in range(5):
        set_grad(plain, k)
        tensors.grad = plain.grad.clone()
        one.step()
        two.step()
    torch.testing.assert_close(plain, tensors, rtol=1e-6, atol=0)


def test_step_weight_grows_with_the_square_root():
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = cubegrad.MADGRAD([param], lr=0.1)
    for _ in range(9):
        param.grad = torch.ones_like(param)
        optimizer.step()
    expected = 0.1 * sum(math.sqrt(k + 1) for k in range(9))
    assert optimizer.state[param]["grad_sum"].item() == pytest.approx(expected, rel=1e-14)
