"""Each lemma of the paper's appendix over random sequences, and where its text slips."""

import convex
import numpy as np
import pytest
import torch
from cases import numbers, randn
from convex import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from cubegrad import family, theory

cheap, dear = examples(150), examples(25)
ROUNDING = 1e-12

positive = st.floats(1e-3, 1e3)
lengths = st.integers(1, 40)


@st.composite
def weighted_gradients(draw):
    """λ_0 ≤ λ_1 ≤ …, G_0, G_1, … and |g_t| ≤ G_t, some at the bound and some 0."""
    n = draw(lengths)
    weights = np.cumsum(draw(st.lists(positive, min_size=n, max_size=n)))
    bounds = np.array(draw(st.lists(positive, min_size=n, max_size=n)))
    shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    return weights, bounds, bounds * np.array(draw(st.lists(shares, min_size=n, max_size=n)))


def error_sums(weights, bounds, g):
    """Both sides of the lemma for k = 0, 1, …"""
    sums = np.cumsum(weights * g**2)
    before = np.concatenate([[0.0], sums[:-1]])
    left = np.cumsum(weights**2 * g**2 / np.cbrt(weights * bounds**2 + before))
    return left, 1.5 * weights * np.cbrt(sums) ** 2


@given(weighted_gradients())
@cheap
def test_error_sum(sequence):
    weights, bounds, g = sequence
    left, right = error_sums(weights, np.full_like(bounds, bounds.max()), g)
    assert (left <= right * (1 + ROUNDING)).all()


@given(weighted_gradients())
@cheap
def test_error_sum_with_a_bound_for_each_step(sequence):
    """The time varying case uses the lemma with G_t; its proof only needs |g_t| ≤ G_t."""
    left, right = error_sums(*sequence)
    assert (left <= right * (1 + ROUNDING)).all()


def test_error_sum_needs_the_bound_on_the_gradient():
    """The lemma's text does not repeat it, and leaves λ_0 out of its base case."""
    left, right = error_sums(np.ones(1), np.array([0.1]), np.array([10.0]))
    assert left[0] > 10 * right[0]
    g, bound, first = 1.0, 1.0, 8.0
    left, _ = error_sums(np.array([first]), np.array([bound]), np.array([g]))
    assert left[0] == pytest.approx(first ** (5 / 3) * g**2 / bound ** (2 / 3))
    assert left[0] > 1.5 * (g**2) ** (2 / 3)  # the base case as printed, without λ_0


@given(k=st.integers(0, 10**6), r=st.floats(0, 1), j=st.one_of(st.integers(0, 9), st.floats(0, 9)))
@examples(1000)
def test_iterate_weighting(k, r, j):
    """(1-c_k)/c_k (k+j)^r ≤ 1/c_{k-1} (k+j-1)^r, at both ends r = 0 and 1 too, for k + j ≥ 1."""
    assume(k + j >= 1)
    c, before = ((r + 1) / (i + j + r) for i in (k, k - 1)) if k + j + r > 1 else (1.0, np.inf)
    left, right = (1 - c) / c * (k + j) ** r, (k + j - 1) ** r / before
    assert left <= right * (1 + ROUNDING) + ROUNDING


def test_iterate_weighting_needs_k_plus_j_to_be_1():
    """Printed for all k ≥ 0, j ≥ 0; below 1 the right side is the root of a negative number."""
    k, j, r = 0, 0.5, 0.5
    assert isinstance((k + j - 1) ** r, complex)
    assert (r + 1) / (k + j + r) > 1  # and c_k is no share
    k, j = 3, 1  # the proof's last line has 1/c_k for 1/c_{k-1}
    step = (k + j + r - 1) / (r + 1)
    assert step == pytest.approx(1 / ((r + 1) / (k - 1 + j + r)))
    assert step != pytest.approx(1 / ((r + 1) / (k + j + r)))
    m, r = k + j, 2  # and beyond r = 1 it is false: m^r is convex
    assert (m - 1) * m**r > (m - 1 + r) * (m - 1) ** r


@pytest.mark.parametrize("averaging", ["constant", "uniform", "theory", "polynomial"])
@given(seed=st.integers(0, 10**6), r=st.floats(0.01, 0.99), j=st.floats(0, 5))
@dear
def test_z_from_the_differences_of_x(averaging, seed, r, j):
    """z_k = x_k - (1-c_k)/c_k (x_{k-1} - x_k), against z_k = x_0 - s_k/a_k."""
    param = nn.Parameter(randn((4,), torch.float64, seed))
    optimizer = family.TheoreticalMADGRAD(
        [param], lr=0.1, grad_bound=5.0, averaging=averaging, r=r, j=j
    )
    for k in range(1, 13):
        before = numbers(param)
        param.grad = randn((4,), torch.float64, seed + k)
        optimizer.step()
        state = optimizer.state[param]
        a = np.cbrt(0.1 * np.sqrt(k + 1) * 5.0**2 + numbers(state["grad_sq_sum"]))
        z = numbers(state["centre"]) - numbers(state["grad_sum"]) / a
        c = family.AVERAGING[averaging](optimizer.defaults, k)
        x = numbers(param)
        np.testing.assert_allclose(x - (1 - c) / c * (before - x), z, rtol=1e-10, atol=1e-10)


@st.composite
def vectors(draw, count):
    n = draw(st.integers(1, 6))
    reals = st.floats(-100, 100)
    return [
        torch.tensor(draw(st.lists(reals, min_size=n, max_size=n))).double() for _ in range(count)
    ]


@given(vectors(4))
@cheap
def test_support_function_is_the_maximum_and_its_gradient_the_dual_point(drawn):
    s, log_a, offset, x = drawn
    a = (log_a / 25).exp()
    top = theory.support_function(s, a)

    def objective(at):
        return -(s * at).sum() - 0.5 * (a * at.square()).sum()

    assert objective(x) <= top + ROUNDING * (1 + top)
    torch.testing.assert_close(objective(-s / a), top, rtol=1e-12, atol=1e-12)
    point = (-s).requires_grad_()
    (gradient,) = torch.autograd.grad(theory.support_function(point, a), point)
    torch.testing.assert_close(gradient, (offset - s / a) - offset, rtol=1e-9, atol=1e-9)


@given(vectors(4))
@cheap
def test_support_function_inequalities(drawn):
    s, delta, log_a, growth = drawn
    a = (log_a / 25).exp()
    assert theory.support_function(s, a + growth.abs()) <= theory.support_function(s, a)
    change = (delta * s / a).sum() + 0.5 * (delta.square() / a).sum()
    # For diagonal A the paper's inequality is an equality, V being quadratic.
    left = theory.support_function(s + delta, a)
    scale = (s.square() / a + delta.square() / a).sum() + 1
    assert abs(left - theory.support_function(s, a) - change) <= 1e-11 * scale


def test_a_bound_that_falls_breaks_the_monotone_support_function():
    """So the time varying case is not proven by "the same argument" for bounds that fall quickly.

    V_{A_{k+1}}(-s_k) ≤ V_{A_k}(-s_k) needs a_{k+1} ≥ a_k, that is
    λ_{k+1} G_{k+1}² + λ_k g_k² ≥ λ_k G_k², which √(i+1) G_i² not falling assures.
    """
    s, weights = torch.ones(1, dtype=torch.float64), torch.arange(1.0, 4.0).double().sqrt()
    falling, allowed = [10.0, 1.0], [10.0, 10 / 1.5**0.25]
    for bounds, holds in ((falling, False), (allowed, True)):
        a = [(weights[k] * bounds[k - 1] ** 2).reshape(1) ** (1 / 3) for k in (1, 2)]  # g = 0
        later, earlier = theory.support_function(s, a[1]), theory.support_function(s, a[0])
        assert bool(later <= earlier * (1 + ROUNDING)) is holds


@st.composite
def problems(draw):
    kind = draw(st.sampled_from(sorted(convex.LOSSES)))
    seed, n, d = draw(st.integers(0, 10**6)), draw(st.integers(1, 8)), draw(st.integers(1, 4))
    targets = randn((n,), torch.float64, seed + 1)
    penalty = draw(st.sampled_from([0.0, 0.1]))
    rows = randn((n, d), torch.float64, seed)
    return convex.Problem(kind, rows, targets if kind == "l1" else targets.sign(), penalty)


@given(problems(), st.floats(1e-3, 10), st.integers(0, 10**6))
@dear
def test_lyapunov_step(problem, lr, seed):
    """The bound on V_{A_{k+1}}(-s_{k+1}), path by path, with any point in the place of x_*."""
    x0, target = (randn((problem.dimension,), torch.float64, seed + i) for i in (0, 1))
    bound = problem.grad_bounds()
    last, s, nu = x0, torch.zeros_like(x0), torch.zeros_like(x0)  # x_{k-1}, s_k, ν_k
    for step in convex.run(problem, x0, lr, bound, 12, 4):
        weight, c = lr * (step.k + 1) ** 0.5, 1.5 / (step.k + 1.5)
        a = (weight * bound**2 + nu) ** (1 / 3)
        a_next = (lr * (step.k + 2) ** 0.5 * bound**2 + step.grad_sq_sum) ** (1 / 3)
        left = theory.support_function(step.grad_sum, a_next)
        noise = weight**2 / 2 * (step.grad**2 / a).sum(-1)
        before, here, away = (problem.sampled(x, step.index) for x in (last, step.x, target))
        drift = weight * (step.grad * (x0 - target)).sum(-1)
        values = -weight / c * (here - away) + (1 - c) / c * weight * (before - away)
        scale = 1 + left + noise + weight / c * (before + here + away)
        if step.k == 0:
            assert (left <= noise + ROUNDING * scale).all()  # the first step's own bound
            # Telescoping needs this one too, which convexity gives; the paper does not say so.
            assert (drift + values >= -ROUNDING * scale).all()
        right = theory.support_function(s, a) + noise + drift + values
        assert (left <= right + ROUNDING * scale).all()
        last, s, nu = step.x, step.grad_sum, step.grad_sq_sum


def test_lyapunov_step_as_its_proof_prints_it_can_fail():
    """The proof has V_{A_{k+1}}(-s_k) in two lines for V_{A_k}(-s_k), which is smaller."""
    s, step = torch.tensor([1.0]).double(), torch.tensor([-0.5]).double()  # s_k and λ_k g_k
    a, a_next = torch.tensor([1.0]).double(), torch.tensor([8.0]).double()
    left = theory.support_function(s + step, a_next)
    rest = (step * s / a).sum() + (step**2 / (2 * a)).sum()  # λ⟨g, x_0-z_k⟩ + λ²/2 ‖g‖²
    assert left <= theory.support_function(s, a) + rest
    assert left > theory.support_function(s, a_next) + rest
