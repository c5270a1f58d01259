"""What docs/algorithm.md says of MADGRADW, step by step, by the family's slow version."""

import math

import numpy as np
import pytest
import torch
from family_runs import end_on_the_interval
from torch import nn

import cubegrad
from cubegrad import family
from cubegrad.family.choices import SQUARE_WEIGHTS

GAMMA, BETA = 0.1, 0.9


def iterates(optimizer, param, grads, lrs=None):
    """x_1, x_2, … of one coordinate."""
    seen = []
    for k, grad in enumerate(grads):
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[k]
        param.grad = torch.tensor([grad], dtype=torch.float64)
        optimizer.step()
        seen.append(param.item())
    return np.array(seen)


def start():
    return nn.Parameter(torch.zeros(1, dtype=torch.float64))


def noise(steps, seed=0):
    return np.random.default_rng(seed).normal(0.3, 1.0, steps)


@pytest.mark.parametrize(
    ("method", "of_gradient", "of_rate"),
    [
        (family.MADGRAD, 1 / 3, 2 / 3),
        (family.WeightedDenominator, 0, 1 / 2),
        (family.MADGRADW, 0, 1),
    ],
)
def test_what_a_step_keeps_of_the_gradients_scale_and_of_the_rate(method, of_gradient, of_rate):
    def moved(lr, scale):
        param = start()
        optimizer = method([param], lr=lr, averaging="none", eps=0.0)
        return iterates(optimizer, param, scale * noise(20))

    np.testing.assert_allclose(moved(0.1, 1000.0), moved(0.1, 1.0) * 1000**of_gradient, rtol=1e-9)
    np.testing.assert_allclose(moved(100.0, 1.0), moved(0.1, 1.0) * 1000**of_rate, rtol=1e-9)


def test_the_mean_has_a_closed_form():
    """w_k / ∑ w_i = a_k = (3/2)/(k+3/2), which is c_k of the theorem with c_0 = 1."""
    weights = [SQUARE_WEIGHTS["mean"]({}, k) for k in range(2000)]
    assert weights[:3] == pytest.approx([1, 3 / 2, 15 / 8], rel=1e-14)
    shares = np.array(weights) / np.cumsum(weights)
    np.testing.assert_allclose(shares, 1.5 / (np.arange(2000) + 1.5), rtol=1e-11)
    theory = [family.AVERAGING["theory"]({}, k) for k in range(1, 2000)]
    np.testing.assert_allclose(shares[1:], theory, rtol=1e-11)


def test_its_weights_are_nearly_the_papers():
    """A square weighs 0.886 to 1.026 times what it would with √(i+1), in a mean of any length."""
    ours = np.array([SQUARE_WEIGHTS["mean"]({}, k) for k in range(100_000)])
    papers = np.sqrt(np.arange(100_000) + 1.0)
    ratio = ours / papers
    assert (np.diff(ratio) > -1e-9).all()  # so the first and the newest square are the extremes
    totals = np.cumsum(papers) / np.cumsum(ours)
    oldest, newest = ratio[0] * totals, ratio * totals
    assert math.sqrt(math.pi) / 2 < oldest.min() < 0.8863
    assert oldest.max() == 1.0
    assert newest.max() == pytest.approx(1.0259, abs=1e-4)
    assert newest.argmax() == 2
    assert newest[-1] == pytest.approx(1.0, abs=1e-5)


def test_with_a_mean_the_step_follows_any_schedule():
    """With the sum of the paper's rejected WeightedDenominator it falls as k^{-1/4} besides."""
    lrs = [0.1] * 300 + [0.01] * 300
    moves = {}
    for denominator, weights in (("mean", "lr"), ("weighted", "power")):
        param = start()
        optimizer = family.MADGRADW(
            [param], denominator=denominator, weights=weights, averaging="none", eps=0.0
        )
        moves[denominator] = -np.diff(iterates(optimizer, param, np.ones(600), lrs), prepend=0.0)
    np.testing.assert_allclose(moves["mean"], lrs, rtol=1e-11)
    early, late = moves["weighted"][[99, 299]]
    assert late / early == pytest.approx(3**-0.25, rel=0.01)


def test_not_held_it_is_laprop_with_this_mean():
    """m ← β m + (1-β) g/√ν, x ← x - γ m: Adam, but for dividing before the mean is taken."""
    grads = noise(200)
    param = start()
    optimizer = family.MADGRADW([param], lr=GAMMA, momentum=BETA, holds=False, eps=0.0)
    squares = mean = x = 0.0
    laprop = []
    for k, grad in enumerate(grads):
        a = 1.5 / (k + 1.5)
        squares = (1 - a) * squares + a * grad**2
        mean = BETA * mean + (1 - BETA) * grad / math.sqrt(squares)
        x -= GAMMA * mean
        laprop.append(x)
    np.testing.assert_allclose(iterates(optimizer, param, grads), laprop, rtol=1e-10, atol=1e-12)


def cautious_laprop(grads):
    squares = mean = x = 0.0
    for k, grad in enumerate(grads):
        a = 1.5 / (k + 1.5)
        squares = (1 - a) * squares + a * grad**2
        mean = BETA * mean + (1 - BETA) * grad / math.sqrt(squares)
        x -= GAMMA * mean * (mean * grad > 0)
    return x


def test_what_is_held_is_kept_and_what_a_cautious_step_drops_is_lost():
    """Ten gradients of 1 take z down. Then small ones alternate, and every other step is held."""
    grads = [1.0] * 10 + [-1e-3, 1e-3] * 200
    ends = {}
    for holds in (True, False):
        param = start()
        optimizer = family.MADGRADW([param], lr=GAMMA, momentum=BETA, holds=holds)
        ends[holds] = iterates(optimizer, param, grads)[-1]
        z = (optimizer.state[param]["centre"] - optimizer.state[param]["grad_sum"]).item()
    assert ends[True] == pytest.approx(z, abs=1e-3)
    assert ends[False] == pytest.approx(z, abs=1e-3)
    assert cautious_laprop(grads) == pytest.approx(0.69 * z, abs=0.02)


def test_without_a_gradient_nothing_moves():
    """A held x stays at once, where momentum would carry it on."""
    param = start()
    optimizer = cubegrad.MADGRADW([param], lr=GAMMA, weight_decay=0.0)
    seen = iterates(optimizer, param, [1.0] * 10 + [0.0] * 10)
    assert seen[8] > seen[9]
    assert (seen[10:] == seen[9]).all()


@pytest.mark.parametrize("lr", [1e-2, 1e-1])
def test_it_solves_adams_counter_example(lr):
    def build(params):
        return cubegrad.MADGRADW(params, lr=lr, weight_decay=0.0)

    assert max(end_on_the_interval(build, 3.0, 1.0, 3, 3000, False)) == -1.0


@pytest.mark.training
def test_rare_large_gradients_take_it_to_the_wrong_side():
    """Each is divided by a root that it has just raised; MADGRAD goes the right way."""

    def build(params):
        return cubegrad.MADGRADW(params, lr=0.1, weight_decay=0.0)

    late = end_on_the_interval(build, 1010.0, 10.0, 101, 8080, False)
    assert np.median(late) == pytest.approx(0.78, abs=0.02)


def test_the_squares_may_fall_faster_than_a_rate():
    """AdaGrad's bound needs √ν_k / γ_k never to fall. Here it does, even with γ ∝ 1/√(k+1)."""
    param = start()
    optimizer = family.MADGRADW([param])
    iterates(optimizer, param, [1.0] * 50)
    state = optimizer.state[param]
    seen = []
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        optimizer.step()
        root = (state["grad_sq_sum"] / state["weight_sum"]).sqrt().item()
        seen.append(root * math.sqrt(state["step"].item()))
    assert (np.diff(seen) < 0).all()
