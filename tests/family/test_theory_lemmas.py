"""Each lemma of the paper's appendix on random input, and the slips in its text."""

import convex
import numpy as np
import pytest
import torch
from cases import randn
from hypothesis import assume, given
from hypothesis import strategies as st
from random_examples import examples
from torch import nn

from cubegrad import family, theory

many, few = examples(150), examples(25)
ROUNDING = 1e-12

positive = st.floats(1e-3, 1e3)


@st.composite
def weighted_gradients(draw):
    """λ_0 ≤ λ_1 ≤ …, G_0, G_1, … and 0 ≤ g_t ≤ G_t, some of them 0 or G_t."""
    n = draw(st.integers(1, 40))
    weights = np.cumsum(draw(st.lists(positive, min_size=n, max_size=n)))
    bounds = np.array(draw(st.lists(positive, min_size=n, max_size=n)))
    fractions = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
    return weights, bounds, bounds * np.array(draw(st.lists(fractions, min_size=n, max_size=n)))


def error_sums(weights, bounds, g):
    """Both sides of the error-sum lemma for k = 0, 1, …"""
    sums = np.cumsum(weights * g**2)
    previous = np.concatenate([[0.0], sums[:-1]])
    left = np.cumsum(weights**2 * g**2 / np.cbrt(weights * bounds**2 + previous))
    return left, 1.5 * weights * np.cbrt(sums) ** 2


@given(weighted_gradients())
@many
def test_error_sum(sequence):
    weights, bounds, g = sequence
    left, right = error_sums(weights, np.full_like(bounds, bounds.max()), g)
    assert (left <= right * (1 + ROUNDING)).all()


@given(weighted_gradients())
@many
def test_error_sum_with_a_bound_for_each_step(sequence):
    """The time varying case uses the lemma with G_t; its proof only needs |g_t| ≤ G_t."""
    left, right = error_sums(*sequence)
    assert (left <= right * (1 + ROUNDING)).all()


def test_error_sum_needs_the_bound_on_the_gradient():
    """The lemma does not state that bound, and its base case lacks λ_0."""
    left, right = error_sums(np.ones(1), np.array([0.1]), np.array([10.0]))
    assert left[0] > 10 * right[0]
    g, bound, first = 1.0, 1.0, 8.0
    left, _ = error_sums(np.array([first]), np.array([bound]), np.array([g]))
    assert left[0] == pytest.approx(first ** (5 / 3) * g**2 / bound ** (2 / 3))
    assert left[0] > 1.5 * (g**2) ** (2 / 3)  # the base case as printed, without λ_0


def polynomial(k, r, j):
    """c_k = (r+1)/(k+j+r)."""
    return family.AVERAGING["polynomial"]({"r": r, "j": j}, k)


@given(k=st.integers(0, 10**6), r=st.floats(0, 1), j=st.one_of(st.integers(0, 9), st.floats(0, 9)))
@examples(1000)
def test_iterate_weighting(k, r, j):
    """(1-c_k)/c_k (k+j)^r ≤ 1/c_{k-1} (k+j-1)^r for k + j ≥ 1, also for r = 0 and r = 1."""
    assume(k + j >= 1)
    c, previous = (polynomial(i, r, j) for i in (k, k - 1)) if k + j + r > 1 else (1.0, np.inf)
    left, right = (1 - c) / c * (k + j) ** r, (k + j - 1) ** r / previous
    assert left <= right * (1 + ROUNDING) + ROUNDING


def test_iterate_weighting_needs_k_plus_j_to_be_at_least_1():
    """The paper states it for all k ≥ 0, j ≥ 0; here its right side is not real, and c_k > 1."""
    k, j, r = 0, 0.5, 0.5
    assert isinstance((k + j - 1) ** r, complex)
    assert polynomial(k, r, j) > 1


def test_the_proof_of_iterate_weighting_ends_with_the_previous_c():
    """Its last line prints 1/c_k for 1/c_{k-1}."""
    k, j, r = 3, 1, 0.5
    factor = (k + j + r - 1) / (r + 1)
    assert factor == pytest.approx(1 / polynomial(k - 1, r, j))
    assert factor != pytest.approx(1 / polynomial(k, r, j))


def test_iterate_weighting_fails_for_r_above_1():
    """There (k+j)^r is convex."""
    k, j, r = 3, 1, 2
    c, previous = polynomial(k, r, j), polynomial(k - 1, r, j)
    assert (1 - c) / c * (k + j) ** r > (k + j - 1) ** r / previous


def theory_group(lr, grad_bound):
    """TheoreticalMADGRAD's options."""
    return {"lr": lr, "weights": "power", "power": 0.5, "grad_bound": grad_bound}


def denominator(group, k, grad_sq_sum):
    """a_k = ∛(λ_k G² + ν_k)."""
    return family.DENOMINATORS["theory"](group, family.Sums(k - 1, grad_sq_sum, np.nan))


@pytest.mark.parametrize("averaging", ["constant", "uniform", "theory", "polynomial"])
@given(seed=st.integers(0, 10**6), r=st.floats(0.01, 0.99), j=st.floats(0, 5))
@few
def test_z_is_recovered_from_the_differences_of_x(averaging, seed, r, j):
    """z_k = x_k - (1-c_k)/c_k (x_{k-1} - x_k), against z_k = x_0 - s_k/a_k."""
    param = nn.Parameter(randn((4,), torch.float64, seed))
    optimizer = family.TheoreticalMADGRAD(
        [param], lr=0.1, grad_bound=5.0, averaging=averaging, r=r, j=j
    )
    for k in range(1, 13):
        previous = param.detach().clone()
        param.grad = randn((4,), torch.float64, seed + k)
        optimizer.step()
        state, x = optimizer.state[param], param.detach()
        a = denominator(optimizer.defaults, k, state["grad_sq_sum"])
        z = state["centre"] - state["grad_sum"] / a
        c = family.AVERAGING[averaging](optimizer.defaults, k)
        torch.testing.assert_close(x - (1 - c) / c * (previous - x), z, rtol=1e-10, atol=1e-10)


@st.composite
def vectors(draw, count):
    n = draw(st.integers(1, 6))
    reals = st.floats(-100, 100)
    return [
        torch.tensor(draw(st.lists(reals, min_size=n, max_size=n))).double() for _ in range(count)
    ]


@given(vectors(4))
@many
def test_support_function_is_the_maximum_and_its_gradient_the_dual_point(drawn):
    s, log_a, offset, x = drawn
    a = (log_a / 25).exp()
    maximum = theory.support_function(s, a)

    def objective(x):
        return -(s * x).sum() - 0.5 * (a * x.square()).sum()

    assert objective(x) <= maximum + ROUNDING * (1 + maximum)
    torch.testing.assert_close(objective(-s / a), maximum, rtol=1e-12, atol=1e-12)
    point = (-s).requires_grad_()
    (gradient,) = torch.autograd.grad(theory.support_function(point, a), point)
    torch.testing.assert_close(gradient, (offset - s / a) - offset, rtol=1e-9, atol=1e-9)


@given(vectors(4))
@many
def test_support_function_inequalities(drawn):
    s, delta, log_a, growth = drawn
    a = (log_a / 25).exp()
    assert theory.support_function(s, a + growth.abs()) <= theory.support_function(s, a)
    change = (delta * s / a).sum() + 0.5 * (delta.square() / a).sum()
    # An equality, where the paper has ≤: with diagonal A, V is quadratic.
    left = theory.support_function(s + delta, a)
    scale = (s.square() / a + delta.square() / a).sum() + 1
    assert abs(left - theory.support_function(s, a) - change) <= 1e-11 * scale


def test_a_support_function_can_grow_when_the_bound_falls():
    """So "the same argument" does not prove the time-varying case for bounds that fall quickly.

    V_{A_{k+1}}(-s_k) ≤ V_{A_k}(-s_k) needs a_{k+1} ≥ a_k, that is
    λ_{k+1} G_{k+1}² + λ_k g_k² ≥ λ_k G_k², which holds if √(i+1) G_i² never falls.
    """
    s = torch.ones(1, dtype=torch.float64)
    no_gradients = torch.zeros_like(s)
    for bounds, holds in (([10.0, 1.0], False), ([10.0, 10 / 1.5**0.25], True)):
        earlier, later = (
            theory.support_function(s, denominator(theory_group(1.0, bound), k, no_gradients))
            for k, bound in enumerate(bounds, start=1)
        )
        assert bool(later <= earlier * (1 + ROUNDING)) is holds


@given(
    problem=convex.problems(rows=(1, 8), scales=[1.0], penalties=[0.0, 0.1]),
    lr=st.floats(1e-3, 10),
    seed=st.integers(0, 10**6),
)
@few
def test_lyapunov_step(problem, lr, seed):
    """The bound on V_{A_{k+1}}(-s_{k+1}), in every run, with any point in place of x_*."""
    x0, target = (randn((problem.dimension,), torch.float64, seed + i) for i in (0, 1))
    bound = problem.grad_bounds()
    group = theory_group(lr, bound)
    last, s, nu = x0, torch.zeros_like(x0), torch.zeros_like(x0)  # x_{k-1}, s_k, ν_k
    for step in convex.run(problem, x0, lr, bound, 12, 4):
        weight = family.WEIGHTS["power"](group, step.k)  # λ_k
        c = family.AVERAGING["theory"](group, step.k)  # c_k
        a = denominator(group, step.k, nu)
        a_next = denominator(group, step.k + 1, step.grad_sq_sum)
        left = theory.support_function(step.grad_sum, a_next)
        noise = weight**2 / 2 * (step.grad**2 / a).sum(-1)
        before, now, at_target = (problem.sampled(x, step.index) for x in (last, step.x, target))
        drift = weight * (step.grad * (x0 - target)).sum(-1)
        values = -weight / c * (now - at_target) + (1 - c) / c * weight * (before - at_target)
        scale = 1 + left + noise + weight / c * (before + now + at_target)
        if step.k == 0:
            assert (left <= noise + ROUNDING * scale).all()  # the paper's bound for the first step
            # Telescoping needs this too. The paper does not say so; it follows from convexity.
            assert (drift + values >= -ROUNDING * scale).all()
        right = theory.support_function(s, a) + noise + drift + values
        assert (left <= right + ROUNDING * scale).all()
        last, s, nu = step.x, step.grad_sum, step.grad_sq_sum


def test_lyapunov_step_as_printed_in_its_proof_can_fail():
    """Two lines of the proof have V_{A_{k+1}}(-s_k), which is smaller, for V_{A_k}(-s_k)."""
    s, step = torch.tensor([1.0]).double(), torch.tensor([-0.5]).double()  # s_k and λ_k g_k
    a, a_next = torch.tensor([1.0]).double(), torch.tensor([8.0]).double()
    left = theory.support_function(s + step, a_next)
    rest = (step * s / a).sum() + (step**2 / (2 * a)).sum()  # λ⟨g, x_0-z_k⟩ + λ²/2 ‖g‖²
    assert left <= theory.support_function(s, a) + rest
    assert left > theory.support_function(s, a_next) + rest
