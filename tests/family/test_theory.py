"""The paper's bounds, learning rates and minimisers, and the slips in its arithmetic."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize

from cubegrad import theory

SIZES = [(1.0, 1.0, 1), (0.3, 5.0, 10), (20.0, 0.01, 1000)]  # ‖x_0-x_*‖, G, D


def sums_of_roots(last):
    """∑_{i=0}^k √(i+1) for k = 0, 1, …, last."""
    return np.cumsum(np.sqrt(np.arange(1, last + 2)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("k", [1, 7, 1000])
def test_the_theorems_lr_minimises_the_bound_for_any_lr(k, size):
    """In γ the proof has k+1 where the theorem has k; the bound holds with either."""
    best = optimize.minimize_scalar(
        lambda log: theory.anytime_bound(k, math.exp(log), *size), bracket=(-1, 1), tol=1e-12
    )
    assert math.exp(best.x) == pytest.approx(theory.optimal_lr(k + 1, *size), rel=1e-5)
    assert best.fun == pytest.approx(theory.convergence_bound(k + 1, *size), rel=1e-9)
    with_k = theory.anytime_bound(k, theory.optimal_lr(k, *size), *size)
    assert best.fun < with_k <= theory.convergence_bound(k, *size)


def test_the_summation_property():
    k = np.arange(1000)
    assert (sums_of_roots(999) <= 2 / 3 * (k + 2) ** 1.5).all()


def test_the_proofs_constants_after_the_summation_are_slips():
    """(2/3)^{2/3} and (2/3)^{1/3} became 2/3, so 1/2 and 1/3 are too small.

    In units of γ^{5/3} D √(k+1) (k+2) G^{4/3} and γ^{1/3} ‖x_0-x_*‖² √(k+3) G^{2/3}.
    """
    k = np.arange(1000)
    first = 3 / 4 * sums_of_roots(999) ** (2 / 3) / (k + 2)
    second = 1 / 2 * sums_of_roots(1000)[1:] ** (1 / 3) / (k + 3) ** 0.5
    assert first[100] > 1 / 2
    assert second[100] > 1 / 3
    assert (first <= 3 / 4 * (2 / 3) ** (2 / 3)).all()
    assert (second <= 1 / 2 * (2 / 3) ** (1 / 3)).all()


def test_the_end_of_the_proof_has_room_for_its_slips():
    """It needs √(k+3)/((k+3/2) √(k+1)) ≤ 2/(k+1), and prints k+1 for √(k+1).

    The theorem's two terms have the constants 3 and 3, where 1.15 and 0.76 suffice; so its 6 could
    be 2.
    """
    k = np.arange(100_000)
    assert (np.sqrt(k + 3) / ((k + 1.5) * np.sqrt(k + 1)) <= 1.155 / (k + 1)).all()
    assert ((k + 2) / (k + 1.5) <= 4 / 3).all()
    noise = 1.5 * 0.75 * sums_of_roots(99_999) ** (2 / 3) / (k + 1.5)
    start = 1.5 * 0.5 * sums_of_roots(100_000)[1:] ** (1 / 3) * np.sqrt(k + 1) / (k + 1.5)
    assert noise.max() < 1.15
    assert start.max() < 0.76
    assert (2 * np.sqrt(noise * start)).max() < 2


@pytest.mark.parametrize("size", SIZES)
def test_the_adaptive_bounds_worst_case_is_within_the_theorems(size):
    distance, bound, dimension = size
    offset = torch.full((dimension,), distance / dimension**0.5, dtype=torch.float64)
    for k in (0, 1, 10, 1000):
        lr = theory.optimal_lr(k + 1, *size)
        worst = torch.full((dimension,), lr * sums_of_roots(k)[-1] * bound**2, dtype=torch.float64)
        adaptive = theory.adaptive_bound(k, lr, offset, worst, bound)
        sharp = theory.sharp_adaptive_bound(k, lr, offset, worst, bound)
        assert sharp < adaptive
        assert sharp < theory.convergence_bound(k + 1, *size) / 3
        by_coordinate = torch.full_like(offset, bound)
        assert theory.adaptive_bound(k, lr, offset, worst, by_coordinate) == adaptive
    # One bound for each run.
    assert theory.adaptive_bound(3, 0.1, offset, worst.repeat(4, 1), bound).shape == (4,)


@pytest.mark.parametrize("distance", [0.5, 3.0])
def test_the_time_varying_lr_minimises_its_bound(distance):
    bounds, dimension = [5.0, 3.0, 2.5, 2.4, 2.4, 2.3], 7
    k, total = len(bounds) - 2, sum((i + 1) ** 0.5 * g**2 for i, g in enumerate(bounds))

    def two_terms(log):
        scaled = math.exp(2 / 3 * log)
        noise = scaled / (k + 1) * dimension * total ** (2 / 3)
        return 3 * (noise + distance**2 * total ** (1 / 3) / (scaled * (k + 1) ** 1.5))

    best = optimize.minimize_scalar(two_terms, bracket=(-1, 1), tol=1e-12)
    lr = theory.time_varying_lr(distance, dimension, bounds)
    assert math.exp(best.x) == pytest.approx(lr, rel=1e-5)
    bound = theory.time_varying_bound(distance, dimension, bounds)
    assert best.fun == pytest.approx(bound, rel=1e-9)


def test_adagrads_lr_minimises_its_bound_and_the_printed_one_does_not():
    """The paper prints γ² = ‖x_0-x_*‖²/D; its two terms are smallest at γ = ‖x_0-x_*‖²/D."""
    distance, dimension, bounds = 2.0, 100, [3.0, 2.0, 1.0, 1.0]

    def two_terms(lr):
        root = sum(g**2 for g in bounds) ** 0.5 / (len(bounds) - 1)
        return 3 * root * (lr**0.5 * dimension + distance**2 / lr**0.5)

    bound = theory.adagrad_bound(distance, dimension, bounds)
    lr = theory.adagrad_lr(distance, dimension)
    best = optimize.minimize_scalar(lambda log: two_terms(math.exp(log)), bracket=(-1, 1))
    assert math.exp(best.x) == pytest.approx(lr, rel=1e-4)
    assert two_terms(lr) == pytest.approx(bound)
    assert two_terms(lr**0.5) > 1.3 * bound


def test_the_time_varying_bound_against_the_theorems_and_adagrads():
    """With equal G_i it is below the theorem's; an early outlier fades faster than in AdaGrad's."""
    for k in (1, 10, 1000):
        equal = theory.time_varying_bound(1.0, 4, [1.0] * (k + 2))
        assert equal < theory.convergence_bound(k, 1.0, 1.0, 4)
    madgrad, adagrad = [], []
    for k in (1000, 16_000):
        bounds = [1e4] + [1e-3] * (k + 1)
        madgrad.append(theory.time_varying_bound(1.0, 4, bounds))
        adagrad.append(theory.adagrad_bound(1.0, 4, bounds))
    assert madgrad[0] / madgrad[1] == pytest.approx(16**1.25, rel=2e-3)
    assert adagrad[0] / adagrad[1] == pytest.approx(16, rel=2e-3)


@pytest.mark.parametrize(
    ("minimiser", "power"), [(theory.cube_root_minimiser, 2), (theory.square_root_minimiser, 1)]
)
def test_the_denominators_solve_their_constrained_problems(minimiser, power):
    """min ∑_d h_d/s_d with ∑_d s_d^power ≤ c, against SLSQP."""
    generator = np.random.default_rng(0)
    for budget in (0.5, 1.0, 30.0):
        h = (generator.standard_normal((9, 4)) ** 2 * np.array([1, 3, 10, 0.2])).sum(0)
        h *= budget ** (1 / power) / h.sum()  # the minimum is near 1: ftol is absolute
        solution = optimize.minimize(
            lambda s, h=h: (h / s).sum(),
            np.full(4, (budget / 8) ** (1 / power)),
            jac=lambda s, h=h: -h / s**2,
            bounds=[(1e-6, None)] * 4,
            constraints={
                "type": "ineq",
                "fun": lambda s, c=budget: c - (s**power).sum(),
                "jac": lambda s: -power * s ** (power - 1),
            },
            method="SLSQP",
            options={"ftol": 1e-12, "maxiter": 1000},
        )
        assert solution.success, solution.message
        s = minimiser(torch.from_numpy(h), budget).numpy()
        np.testing.assert_allclose(s, solution.x, rtol=1e-5)
        assert (s**power).sum() == pytest.approx(budget, rel=1e-12)
        assert (h / s).sum() <= solution.fun * (1 + 1e-9)


def test_the_effective_regulariser_is_the_pull_of_dual_averaging():
    """The pull √(k+1) - √k lies between 1/(2√(k+1)) and 1/(2√k), the gradient's factor."""
    x0 = torch.tensor([1.0, -2.0]).double()
    x = torch.tensor([4.0, 2.0], requires_grad=True).double()
    for k in (1, 10, 10**6):
        value = theory.effective_regulariser(k, x, x0)
        assert value.item() == pytest.approx(25 / (4 * k**0.5))
        (gradient,) = torch.autograd.grad(value, x)
        torch.testing.assert_close(gradient, (x - x0) / (2 * k**0.5))
        assert 1 / (2 * (k + 1) ** 0.5) < theory.pull(k) < 1 / (2 * k**0.5)
    assert theory.pull(0) == 1.0


def amsgrad(gradients, alpha, beta1, beta2, decay, diameter):
    """x and v̂ before each step and at the end, on [-diameter/2, diameter/2]^D (Reddi et al.)."""
    x = m = v = v_max = np.zeros(gradients.shape[1])
    for i, g in enumerate(gradients, start=1):
        yield x, v_max
        beta = beta1 * decay ** (i - 1)
        m, v = beta * m + (1 - beta) * g, beta2 * v + (1 - beta2) * g**2
        v_max = np.maximum(v_max, v)
        move = np.divide(alpha / i**0.5 * m, np.sqrt(v_max), out=np.zeros_like(m), where=v_max > 0)
        x = np.clip(x - move, -diameter / 2, diameter / 2)
    yield x, v_max


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_amsgrads_regret_on_linear_losses_is_within_its_bound(beta1):
    generator = np.random.default_rng(1)
    g = (generator.standard_normal((400, 3)) + np.array([0.2, 0.0, -0.1])).clip(-2, 2)
    path = list(amsgrad(g, 0.1, beta1, 0.99, 0.9, 2.0))
    for k in (1, 2, 10, 100, 400):
        losses = sum(float(path[i][0] @ g[i]) for i in range(k))
        best = -np.abs(g[:k].sum(0)).sum()  # at the best corner of [-1, 1]^3
        v_max, squares = torch.from_numpy(path[k][1]), torch.from_numpy((g[:k] ** 2).sum(0))
        bound = theory.amsgrad_bound(k, 0.1, beta1, 0.99, 0.9, 2.0, 2.0, v_max, squares)
        assert losses - best <= bound
    # Every term is divided by a power of 1 - β_1, so more momentum makes the bound worse.
    more = (beta1 + 0.99) / 2
    assert theory.amsgrad_bound(400, 0.1, more, 0.99, 0.9, 2.0, 2.0, v_max, squares) > bound


ONE = torch.ones(2)
REFUSED = [
    (lambda: theory.convergence_bound(0, 1.0, 1.0, 1), "k=0 must be finite and >= 1; pass the"),
    (lambda: theory.anytime_bound(-1, 0.1, 1.0, 1.0, 1), "k=-1 must be finite and >= 0"),
    (lambda: theory.optimal_lr(1, -2.0, 1.0, 1), "distance=-2.0 must be finite and > 0; pass"),
    (lambda: theory.optimal_lr(1, 1.0, math.nan, 1), "grad_bound=nan must be finite"),
    (lambda: theory.adagrad_lr(1.0, 0), "dimension=0 must be finite and > 0; pass the number"),
    (lambda: theory.time_varying_bound(1.0, 1, [1.0]), r"grad_bounds=\[1.0\] must be two or more"),
    (lambda: theory.adagrad_bound(1.0, 1, [1.0, 0.0]), "grad_bound=0.0 must be finite and > 0"),
    (lambda: theory.cube_root_minimiser(ONE, 0.0), "budget=0.0 must be finite and > 0; pass the c"),
    (lambda: theory.pull(-1), "k=-1 must be finite and >= 0"),
    (
        lambda: theory.amsgrad_bound(1, 0.1, 0.9, 1.0, 0.9, 1.0, 1.0, ONE, ONE),
        r"beta2=1.0 must be in \[0, 1\)",
    ),
    (
        lambda: theory.amsgrad_bound(1, 0.1, 0.9, 0.5, 0.9, 1.0, 1.0, ONE, ONE),
        "beta1²=0.81.* must be < beta2=0.5; use 0.9 and 0.999",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_input_is_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()
