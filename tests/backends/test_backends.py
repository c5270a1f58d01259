"""Every backend, dtype, option and memory layout follows the float64 oracle."""

import cases
import numpy as np
import pytest
import torch
from cases import (
    BACKENDS,
    METHODS,
    OPTIONS,
    SCHEDULE_FREE,
    SHAPES,
    each_backend,
    each_backend_of_a_long_test,
    each_method,
)
from short_runs import cloned, parameters, set_grads

EPS32 = 2.0**-23
FOUR_KINDS = ("plain", "no-momentum", "decoupled", "at-random")


def marks(backend, shape, options):
    """A memory layout is the same with capturable, and in a kernel with most options.

    Where both are varied, and kernels are interpreted, half of the grid's time is spent.
    """
    same = "capturable" in backend.flags or (backend.interpreted and options not in FOUR_KINDS)
    return pytest.mark.thorough if same and shape is not SHAPES[0] else ()


# Not even `make test-all` interprets all memory layouts with capturable: that takes a minute.
GRID = [
    pytest.param(method, backend, shape, options, marks=marks(backend, shape, options))
    for method in METHODS
    for backend in BACKENDS
    for shape in (SHAPES[:1] if backend.interpreted and backend.flags else SHAPES)
    for options in OPTIONS
]
# A schedule-free run differs from MADGRADW in what follows from the root alone, and needs momentum.
OF_MEANS = ("plain", "eps0", "l2-maximize", "decoupled", "large-momentum", "at-random-decoupled")
GRID += [
    (SCHEDULE_FREE, backend, shape, options)
    for backend in BACKENDS
    for shape in (SHAPES[:1] if backend.interpreted or "capturable" in backend.flags else SHAPES)
    for options in (OF_MEANS if shape is SHAPES[0] else OF_MEANS[-1:])
]
RUNS = [(method, options) for method in METHODS for options in OPTIONS]
RUNS += [(SCHEDULE_FREE, options) for options in (*OF_MEANS, "decoupled-lr")]


@pytest.mark.parametrize(("method", "options"), RUNS, ids=str)
@each_backend_of_a_long_test
def test_float64_follows_the_oracle_for_200_steps(backend, method, options):
    if torch.float64 not in backend.dtypes:
        pytest.skip("no float64 on this backend")
    chosen = OPTIONS[options]
    params = [cases.randn((n, 3), torch.float64, n) for n in (1, 4, 9)]
    references = [method.oracle(cases.numbers(p)) for p in params]
    params = [cases.parameter(p, backend.device) for p in params]
    optimizer = cases.build(method, backend, params, chosen)
    for k in range(20 if backend.interpreted else 200):
        lr = cases.lr_at(k, chosen.get("lr", 1e-2))
        optimizer.param_groups[0]["lr"] = lr
        for i, (param, reference) in enumerate(zip(params, references, strict=True)):
            grad = cases.randn(param.shape, torch.float64, 1000 * k + i) * 10.0 ** (i - 1)
            grad[0, 0] = 0  # a coordinate that never has a gradient
            param.grad = grad.to(backend.device)
            reference.step(cases.numbers(grad), cases.settings(chosen, lr))
        optimizer.step()
    for param, reference in zip(params, references, strict=True):
        np.testing.assert_allclose(cases.numbers(param), reference.x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("method", "backend", "shape", "options"), GRID, ids=str)
def test_each_step_is_within_a_few_ulp(backend, method, shape, options):
    """The oracle starts each step from the stored numbers, so that errors do not add up."""
    chosen = OPTIONS[options]
    to_nearest = not (chosen.get("stochastic_rounding") or method.rule.averages)
    rounding = {
        torch.float16: 2.0**-11 if to_nearest else 2.0**-10,
        torch.bfloat16: 2.0**-8 if to_nearest and not backend.interpreted else 2.0**-7,
    }
    for dtype in backend.dtypes:
        value = shape.param(cases.randn(shape.shape, dtype, 1))
        param = cases.parameter(value, backend.device)
        reference = method.oracle(cases.numbers(param))
        optimizer = cases.build(method, backend, [param], chosen)
        compute = 2.0**-52 if dtype in (torch.float64, torch.complex128) else EPS32
        for k in range(5 if backend.interpreted else 12):
            lr = cases.lr_at(k, chosen.get("lr", 1e-2))
            o = cases.settings(chosen, lr)
            optimizer.param_groups[0]["lr"] = lr
            grad = cases.moved(shape.grad(cases.randn(shape.shape, dtype, 100 + k)), backend.device)
            param.grad = grad
            if k > 0:
                reference.restart(cases.numbers(param), cases.stored(optimizer, param), o)
            reference.step(cases.numbers(grad), o)
            with cases.no_change(grad):
                optimizer.step()
            assert param.dtype == dtype
            assert param.stride() == value.stride()
            results = {"x": cases.numbers(param)} | cases.stored(optimizer, param)
            expected = {"x": reference.x} | reference.beside(results["x"])
            for name, numbers in results.items():
                limit = 4 * compute * reference.size[name]
                if name == "x":
                    limit += rounding.get(dtype, 0.0) * np.abs(reference.x)
                error = np.abs(numbers - expected[name])
                assert (error <= limit).all(), (dtype, k, name, (error / limit).max())


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@each_method
@each_backend
def test_mixed_dtypes_counts_and_missing_gradients_in_one_group(backend, method, momentum):
    options = {"weight_decay": 0.01, "momentum": momentum}
    params = [parameters([(3, 2)], dtype, backend.device)[0] for dtype in backend.dtypes]
    alone = cloned(params)
    together = cases.build(method, backend, params, options)
    apart = [cases.build(method, backend, [p], options) for p in alone]
    for k in range(6):
        for some in (params, alone):
            set_grads(some, k)
            for i, param in enumerate(some):
                if (k + i) % 3 == 0:
                    param.grad = None
        together.step()
        for optimizer in apart:
            optimizer.step()
    for p, q, own in zip(params, alone, apart, strict=True):
        assert cases.same_bits(p.detach(), q.detach())
        assert set(together.state[p]) == set(own.state[q])
        assert together.state[p]["step"] == 4
