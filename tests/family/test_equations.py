"""Each method of the derivation equals its equation in the paper, and the methods it restates."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import numbers, randn
from family_runs import NAMED, build, each_method
from torch import nn

import cubegrad
from cubegrad import family, theory

STEPS = 12
SHAPE = (3, 2)
BOUND = torch.tensor([[2.0, 1.0], [0.5, 3.0], [1.0, 4.0]], dtype=torch.float64)


def rates(steps=STEPS):
    """A schedule with a tenfold drop and a rise."""
    return [0.3 if k < 5 else 0.03 if k < 9 else 0.1 for k in range(steps)]


def gradients(steps=STEPS, dtype=torch.float64):
    return [randn(SHAPE, dtype, 100 + k) for k in range(steps)]


def run(optimizer, param, grads, lrs=None):
    """The iterates x_1, x_2, …, as float64 arrays."""
    iterates = []
    for k, grad in enumerate(grads):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[k]
        param.grad = grad.clone()
        optimizer.step()
        iterates.append(numbers(param))
    return iterates


def start(dtype=torch.float64):
    return nn.Parameter(randn(SHAPE, dtype, 0))


def mean_square(g):
    """∑ w_i g_i² / ∑ w_i with w_i = (3/2)(5/2)…(i+1/2) / i!."""
    weights = [math.prod((j + 0.5) / j for j in range(1, i + 1)) for i in range(len(g))]
    return np.average(g**2, axis=0, weights=weights)


def closed_form(options, x0, grads, lrs):
    """The iterates x_1, x_2, … in numpy, with every sum computed anew from its first term."""

    def weight(gamma, k):
        power = gamma * (k + 1) ** options["power"]
        return {"one": 1.0, "lr": gamma, "power": power}[options["weights"]]

    g = np.stack([numbers(grad) for grad in grads])
    weights = [weight(gamma, k) for k, gamma in enumerate(lrs)]
    centre = x0 if options["centre"] == "x0" else np.zeros_like(x0)
    r, j = options["r"], options["j"]
    x, moves, iterates = x0, [], []
    for k in range(len(grads)):
        lam, gamma, past = np.array(weights[: k + 1]), np.array(lrs[: k + 1]), g[: k + 1]
        squares = np.tensordot(lam, past**2, 1)
        denominator = {
            "one": np.ones_like(x0),
            "sqrt_step": np.full_like(x0, np.sqrt(k + 1)),
            "unweighted": np.sqrt(np.tensordot(gamma, past**2, 1)),
            "weighted": np.sqrt(squares),
            "weighted_numerator": np.sqrt(k + 1) * np.sqrt(squares) / np.sqrt(lam.sum()),
            "mean": np.sqrt(mean_square(past)),
            "cube_root": np.cbrt(squares),
            "theory": np.cbrt(weight(lrs[k], k + 1) * BOUND.numpy() ** 2 + squares),
        }[options["denominator"]]
        c = {
            "none": 1.0,
            "constant": 1 - options["momentum"],
            "uniform": 1 / (k + 1),
            "theory": 1.5 / (k + 1 + 1.5),
            "polynomial": (r + 1) / (k + 1 + j + r),
        }[options["averaging"]]
        moves.append(lam[-1] * past[-1] / (denominator + options["eps"]))
        whole = np.tensordot(lam, past, 1) / (denominator + options["eps"])
        z = centre - (sum(moves) if options["mirror"] else whole)
        follows = (z - x) * past[-1] < 0 if options["holds"] and c < 1 else np.ones_like(x)
        x = np.where(follows, (1 - c) * x + c * z, x)
        iterates.append(x)
    return iterates


@pytest.mark.parametrize("denominator", family.DENOMINATORS)
@pytest.mark.parametrize("weights", family.WEIGHTS)
def test_every_combination_of_choices_equals_its_equation(weights, denominator):
    lrs = [1.0] * STEPS if weights == "one" else rates()
    constants = {"eps": 0.01, "power": 0.7, "momentum": 0.9, "r": 0.3, "j": 2.0}
    flags = (False, True)
    for averaging, centre, mirror, holds in itertools.product(
        family.AVERAGING, ("x0", "origin"), flags, flags
    ):
        options = {"weights": weights, "denominator": denominator, "averaging": averaging}
        options |= {"centre": centre, "mirror": mirror, "holds": holds} | constants
        param = start()
        optimizer = family.DualAveraging([param], lr=lrs[0], grad_bound=BOUND, **options)
        expected = closed_form(options, numbers(param), gradients(), lrs)
        iterates = run(optimizer, param, gradients(), lrs)
        np.testing.assert_allclose(iterates, expected, rtol=1e-12, atol=1e-12)


@each_method
def test_each_named_method_equals_its_equation_in_the_paper(method):
    """As printed, with a constant γ."""
    gamma = 0.2
    g = np.stack([numbers(grad) for grad in gradients()])
    root = np.sqrt(np.arange(1, STEPS + 1.0)).reshape(-1, 1, 1)  # √(i+1)
    s, squares = (gamma * g).sum(0), (gamma * g**2).sum(0)
    weighted_s, weighted_squares = (root * gamma * g).sum(0), (root * gamma * g**2).sum(0)
    next_weight = gamma * np.sqrt(STEPS + 1)  # λ_{k+1}
    moved = {
        family.DA: s / np.sqrt(STEPS),
        family.WeightedDA: weighted_s / np.sqrt(STEPS),
        family.AdaGradDA: s / np.sqrt(squares),
        family.UnweightedDenominator: weighted_s / np.sqrt(squares),
        family.WeightedDenominator: weighted_s / np.sqrt(weighted_squares),
        family.WeightedNumerator: weighted_s
        * np.sqrt(root.sum(0))
        / (np.sqrt(STEPS) * np.sqrt((root * g**2).sum(0))),
        family.MADGRAD: weighted_s / (np.cbrt(weighted_squares) + 1e-6),
        family.TheoreticalMADGRAD: weighted_s
        / np.cbrt(next_weight * BOUND.numpy() ** 2 + weighted_squares),
        family.MADGRADW: sum(
            gamma * g[k] / (np.sqrt(mean_square(g[: k + 1])) + 1e-8) for k in range(STEPS)
        ),
        family.InlineAveragedSGD: s,
    }[method]
    param = start()
    x0 = numbers(param)
    optimizer = build(method, [param], lr=gamma, averaging="none", grad_bound=BOUND)
    np.testing.assert_allclose(run(optimizer, param, gradients())[-1], x0 - moved, rtol=1e-12)


def test_the_averaging_of_each_named_method():
    averaging = {method: build(method, [start()]).defaults["averaging"] for method in NAMED}
    assert averaging == dict.fromkeys(NAMED, "none") | {
        family.MADGRAD: "constant",
        family.MADGRADW: "constant",
        family.InlineAveragedSGD: "constant",
        family.TheoreticalMADGRAD: "theory",
    }


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.0}, {"weight_decay": 0.1, "maximize": True}, {"eps": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_madgrad_equals_cubegrad_madgrad(options, dtype):
    """To the last digits of the state's dtype; a bfloat16 weight, rounded from it, to one bit."""
    plain, fast = start(dtype), start(dtype)
    grads, lrs = gradients(60, dtype), rates(60)
    iterates = run(family.MADGRAD([plain], **options), plain, grads, lrs)
    expected = run(cubegrad.MADGRAD([fast], **options), fast, grads, lrs)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]
    np.testing.assert_allclose(iterates, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"weight_decay": 0.3, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.0, "eps": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_madgradw_equals_cubegrad_madgradw(options, momentum, dtype):
    """Under a schedule, as closely as MADGRAD does."""
    options = {"momentum": momentum, "decoupled_weight_decay": False} | options
    plain, fast = start(dtype), start(dtype)
    grads, lrs = gradients(60, dtype), rates(60)
    iterates = run(family.MADGRADW([plain], **options), plain, grads, lrs)
    expected = run(cubegrad.MADGRADW([fast], **options), fast, grads, lrs)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    np.testing.assert_allclose(iterates, expected, rtol=tolerance, atol=tolerance)


def test_decoupled_decay_equals_that_of_cubegrad_madgrad():
    options = {"weight_decay": 0.3, "decoupled_weight_decay": True}
    plain, fast = start(), start()
    iterates = run(family.MADGRAD([plain], **options), plain, gradients(60), rates(60))
    expected = run(cubegrad.MADGRAD([fast], **options), fast, gradients(60), rates(60))
    np.testing.assert_allclose(iterates, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_sgd_with_inline_averaging_equals_heavy_ball_sgd(momentum):
    averaged, param = start(), start()
    eta, grads = 0.1, gradients(100)
    inline = family.InlineAveragedSGD([averaged], lr=eta, momentum=momentum)
    heavy_ball = torch.optim.SGD([param], lr=(1 - momentum) * eta, momentum=momentum)
    expected = run(heavy_ball, param, grads)
    np.testing.assert_allclose(run(inline, averaged, grads), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("averaging", ["constant", "uniform", "theory", "polynomial"])
def test_inline_averaging_maps_to_heavy_ball_with_changing_constants(averaging):
    """α_k = c_{k+1} η_k and β_k = (1-c_k) η_{k-1}/η_k."""
    param, eta = start(), rates(60)
    optimizer = family.InlineAveragedSGD([param], averaging=averaging)
    c = [family.AVERAGING[averaging](optimizer.defaults, k) for k in range(1, 61)]  # c_1, c_2, …
    x, m = numbers(param), np.zeros(SHAPE)
    iterates = run(optimizer, param, gradients(60), eta)
    for k, grad in enumerate(gradients(60)):
        beta = (1 - c[k - 1]) * eta[k - 1] / eta[k] if k else 0.0
        m = beta * m + numbers(grad)
        x = x - c[k] * eta[k] * m
        np.testing.assert_allclose(iterates[k], x, rtol=0, atol=1e-12)


def unweighted(param):
    """The paper's first dual averaging method, with λ_k = 1."""
    return family.DualAveraging(
        [param], lr=1.0, weights="one", denominator="sqrt_step", averaging="none"
    )


def test_dual_averaging_equals_sgd_with_a_decaying_pull_to_x0():
    """On a problem whose gradients depend on x, so that an error would grow."""
    a = randn((50, 6), torch.float64, 1)
    b = randn((50,), torch.float64, 2)
    param = nn.Parameter(randn((6,), torch.float64, 3))
    x0 = x = numbers(param)
    optimizer = unweighted(param)
    for k in range(1000):
        row, target = a[k % 50], b[k % 50]

        def gradient(point, row=row, target=target):
            return row * torch.sign(row @ point - target)

        param.grad = gradient(param.detach())
        optimizer.step()
        g = numbers(gradient(torch.from_numpy(x)))
        x = x - (g + theory.pull(k) * (x - x0)) / np.sqrt(k + 1)
        np.testing.assert_allclose(numbers(param), x, rtol=0, atol=1e-10)


def test_da_with_lr_1_equals_the_papers_with_weights_one():
    one, da = start(), start()
    expected = run(unweighted(one), one, gradients())
    assert np.array_equal(run(family.DA([da], lr=1.0), da, gradients()), expected)


def test_uniform_averaging_is_the_mean_of_z_1_to_z_k():
    """The paper prints the mean of z_0 … z_k for x_{k+1}; c_{k+1} = 1/(k+1) gives z_1 … z_{k+1}."""
    averaged, plain = start(), start()
    x = run(family.MADGRAD([averaged], averaging="uniform"), averaged, gradients())
    z = run(family.MADGRAD([plain], averaging="none"), plain, gradients())
    for k in range(STEPS):
        np.testing.assert_allclose(x[k], np.mean(z[: k + 1], axis=0), rtol=1e-12, atol=1e-14)
    printed = (numbers(start()) + sum(z[:-1])) / STEPS
    assert np.abs(x[-1] - printed).max() > 1e-3


def test_the_theorys_averaging_is_polynomial_with_r_half_and_j_1():
    options = {"r": 0.5, "j": 1.0}
    for k in range(1, 50):
        assert family.AVERAGING["theory"]({}, k) == family.AVERAGING["polynomial"](options, k)
