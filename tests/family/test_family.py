"""Each method of the derivation equals its equation, and the methods it is said to equal."""

import itertools

import numpy as np
import pytest
import torch
from cases import numbers, randn
from torch import nn

import cubegrad
from cubegrad import family, theory

STEPS = 12
SHAPE = (3, 2)
BOUND = torch.tensor([[2.0, 1.0], [0.5, 3.0], [1.0, 4.0]], dtype=torch.float64)
NAMED = [
    family.DA,
    family.WeightedDA,
    family.AdaGradDA,
    family.UnweightedDenominator,
    family.WeightedDenominator,
    family.WeightedNumerator,
    family.MADGRAD,
    family.TheoreticalMADGRAD,
    family.InlineAveragedSGD,
]


def rates(steps=STEPS):
    """A schedule: constant, a tenfold drop, and a rise."""
    return [0.3 if k < 5 else 0.03 if k < 9 else 0.1 for k in range(steps)]


def gradients(steps=STEPS, dtype=torch.float64):
    return [randn(SHAPE, dtype, 100 + k) for k in range(steps)]


def run(optimizer, param, grads, lrs=None):
    """The iterates x_1, x_2, …, as float64 arrays."""
    seen = []
    for k, grad in enumerate(grads):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[k]
        param.grad = grad.clone()
        optimizer.step()
        seen.append(numbers(param))
    return seen


def start(dtype=torch.float64, seed=0):
    return nn.Parameter(randn(SHAPE, dtype, seed))


def closed_form(options, x0, grads, lrs):
    """x_1, x_2, … with every sum written out from its first term, in numpy."""
    g = np.stack([numbers(grad) for grad in grads])
    p, r, j = options.get("power", 0.5), options.get("r", 0.5), options.get("j", 1.0)
    weights = {
        "one": [1.0 for _ in lrs],
        "lr": list(lrs),
        "power": [gamma * (k + 1) ** p for k, gamma in enumerate(lrs)],
    }[options["weights"]]
    centre = x0 if options["centre"] == "x0" else np.zeros_like(x0)
    x, seen = x0, []
    for k in range(len(grads)):
        lam, gamma, past = np.array(weights[: k + 1]), np.array(lrs[: k + 1]), g[: k + 1]
        squares = np.tensordot(lam, past**2, 1)
        last = {"one": 1.0, "lr": lrs[k], "power": lrs[k] * (k + 2) ** p}[options["weights"]]
        denominator = {
            "one": np.ones_like(x0),
            "sqrt_step": np.full_like(x0, np.sqrt(k + 1)),
            "unweighted": np.sqrt(np.tensordot(gamma, past**2, 1)),
            "weighted": np.sqrt(squares),
            "weighted_numerator": np.sqrt(k + 1) * np.sqrt(squares) / np.sqrt(lam.sum()),
            "cube_root": np.cbrt(squares),
            "theory": np.cbrt(last * BOUND.numpy() ** 2 + squares),
        }[options["denominator"]]
        c = {
            "none": 1.0,
            "constant": 1 - options.get("momentum", 0.9),
            "uniform": 1 / (k + 1),
            "theory": 1.5 / (k + 1 + 1.5),
            "polynomial": (r + 1) / (k + 1 + j + r),
        }[options["averaging"]]
        z = centre - np.tensordot(lam, past, 1) / (denominator + options["eps"])
        x = (1 - c) * x + c * z
        seen.append(x)
    return seen


@pytest.mark.parametrize("denominator", family.DENOMINATORS)
@pytest.mark.parametrize("weights", family.WEIGHTS)
def test_every_combination_of_choices_is_its_equation(weights, denominator):
    lrs = [1.0] * STEPS if weights == "one" else rates()
    for averaging, centre in itertools.product(family.AVERAGING, ("x0", "origin")):
        options = {"weights": weights, "denominator": denominator, "averaging": averaging}
        options |= {"centre": centre, "eps": 0.01, "power": 0.7, "r": 0.3, "j": 2.0}
        param = start()
        optimizer = family.DualAveraging([param], lr=lrs[0], grad_bound=BOUND, **options)
        expected = closed_form(options, numbers(param), gradients(), lrs)
        for x, y in zip(run(optimizer, param, gradients(), lrs), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", NAMED, ids=lambda m: m.__name__)
def test_a_name_is_its_section_of_the_paper(method):
    """Against the equations as printed, at a constant γ, where each has its own place."""
    g, gamma = np.stack([numbers(grad) for grad in gradients()]), 0.2
    i = np.arange(1, STEPS + 1.0).reshape(-1, 1, 1)  # i + 1
    root = np.sqrt(i)
    x0 = numbers(start())
    last = gamma * np.sqrt(STEPS + 1)  # λ_{k+1}
    printed = {
        family.DA: (gamma * g).sum(0) / np.sqrt(STEPS),
        family.WeightedDA: (root * gamma * g).sum(0) / np.sqrt(STEPS),
        family.AdaGradDA: (gamma * g).sum(0) / np.sqrt((gamma * g**2).sum(0)),
        family.UnweightedDenominator: (root * gamma * g).sum(0) / np.sqrt((gamma * g**2).sum(0)),
        family.WeightedDenominator: (root * gamma * g).sum(0)
        / np.sqrt((root * gamma * g**2).sum(0)),
        family.WeightedNumerator: (root * gamma * g).sum(0)
        * np.sqrt(root.sum(0))
        / (np.sqrt(STEPS) * np.sqrt((root * g**2).sum(0))),
        family.MADGRAD: (root * gamma * g).sum(0) / (np.cbrt((root * gamma * g**2).sum(0)) + 1e-6),
        family.TheoreticalMADGRAD: (root * gamma * g).sum(0)
        / np.cbrt(last * BOUND.numpy() ** 2 + (root * gamma * g**2).sum(0)),
        family.InlineAveragedSGD: (gamma * g).sum(0),
    }[method]
    param = start()
    bound = {"grad_bound": BOUND} if method is family.TheoreticalMADGRAD else {}
    optimizer = method([param], lr=gamma, averaging="none", **bound)
    np.testing.assert_allclose(run(optimizer, param, gradients())[-1], x0 - printed, rtol=1e-12)


def test_the_averaging_of_each_name():
    averaging = {method.__name__: method([start()], grad_bound=1.0).defaults for method in NAMED}
    momentum = {"MADGRAD": "constant", "InlineAveragedSGD": "constant"}
    momentum["TheoreticalMADGRAD"] = "theory"
    for name, defaults in averaging.items():
        assert defaults["averaging"] == momentum.get(name, "none")


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.0}, {"weight_decay": 0.1, "maximize": True}, {"eps": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_madgrad_is_cubegrad_madgrad(options, dtype):
    """To the last places of the state's dtype; a bfloat16 weight, rounded from it, may flip one."""
    ours, theirs = start(dtype), start(dtype)
    grads, lrs = gradients(60, dtype), rates(60)
    seen = run(family.MADGRAD([ours], **options), ours, grads, lrs)
    expected = run(cubegrad.MADGRAD([theirs], **options), theirs, grads, lrs)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]
    for x, y in zip(seen, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_sgd_with_inline_averaging_is_heavy_ball_sgd(momentum):
    ours, theirs = start(), start()
    eta = 0.1
    seen = run(family.InlineAveragedSGD([ours], lr=eta, momentum=momentum), ours, gradients(100))
    heavy_ball = torch.optim.SGD([theirs], lr=(1 - momentum) * eta, momentum=momentum)
    for x, y in zip(seen, run(heavy_ball, theirs, gradients(100)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("averaging", ["constant", "uniform", "theory", "polynomial"])
def test_the_mapping_to_heavy_ball_holds_for_changing_constants(averaging):
    """α_k = c_{k+1} η_k and β_k = (1-c_k) η_{k-1}/η_k."""
    param, eta = start(), rates(60)
    optimizer = family.InlineAveragedSGD([param], averaging=averaging)
    c = [family.AVERAGING[averaging](optimizer.defaults, k) for k in range(1, 61)]  # c_1 …
    x, m = numbers(param), np.zeros(SHAPE)
    seen = run(optimizer, param, gradients(60), eta)
    for k, grad in enumerate(gradients(60)):
        beta = (1 - c[k - 1]) * eta[k - 1] / eta[k] if k else 0.0
        m = beta * m + numbers(grad)
        x = x - c[k] * eta[k] * m
        np.testing.assert_allclose(seen[k], x, rtol=0, atol=1e-12)


def test_dual_averaging_is_sgd_with_a_decaying_pull_to_its_start():
    """On a problem whose gradients depend on x, so that an error would feed on itself."""
    a = randn((50, 6), torch.float64, 1)
    b = randn((50,), torch.float64, 2)
    param = nn.Parameter(randn((6,), torch.float64, 3))
    x0 = x = numbers(param)
    optimizer = family.DualAveraging(
        [param], lr=1.0, weights="one", denominator="sqrt_step", averaging="none"
    )
    for k in range(1000):
        row, target = a[k % 50], b[k % 50]

        def gradient(at, row=row, target=target):
            return row * torch.sign(row @ at - target)

        param.grad = gradient(param.detach())
        optimizer.step()
        g = numbers(gradient(torch.from_numpy(x)))
        x = x - (g + theory.pull(k) * (x - x0)) / np.sqrt(k + 1)
        np.testing.assert_allclose(numbers(param), x, rtol=0, atol=1e-10)


def test_da_at_lr_1_has_weights_one():
    one, da = start(), start()
    plain = family.DualAveraging(
        [one], lr=1.0, weights="one", denominator="sqrt_step", averaging="none"
    )
    assert np.array_equal(run(plain, one, gradients()), run(family.DA([da], 1.0), da, gradients()))


def test_uniform_averaging_is_the_mean_of_z_1_to_z_k():
    """The paper prints the mean of z_0 … z_k for x_{k+1}; c_{k+1} = 1/(k+1) gives z_1 … z_{k+1}."""
    averaged, plain = start(), start()
    x = run(family.MADGRAD([averaged], averaging="uniform"), averaged, gradients())
    z = run(family.MADGRAD([plain], averaging="none"), plain, gradients())
    for k in range(STEPS):
        np.testing.assert_allclose(x[k], np.mean(z[: k + 1], axis=0), rtol=1e-12, atol=1e-14)
    printed = (numbers(start()) + sum(z[:-1])) / STEPS
    assert np.abs(x[-1] - printed).max() > 1e-3


def test_the_theorys_averaging_is_the_polynomial_one_with_r_half_and_j_1():
    options = {"r": 0.5, "j": 1.0}
    for k in range(1, 50):
        assert family.AVERAGING["theory"]({}, k) == family.AVERAGING["polynomial"](options, k)
