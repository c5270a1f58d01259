"""The claims the paper makes about the steps of its derivation, measured."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from family_runs import end_on_the_interval
from torch import nn
from torch.nn.functional import cross_entropy

import cubegrad
from cubegrad import family

# The power of k with which the effective step size changes.
EXPONENTS = {
    family.DA: -1 / 2,
    family.WeightedDA: 0,
    family.AdaGradDA: -1 / 2,
    family.UnweightedDenominator: 0,
    family.WeightedDenominator: -1 / 4,
    family.WeightedNumerator: 0,
    family.MADGRAD: 0,
    family.MADGRADW: 0,
}
each_method = pytest.mark.parametrize("method", EXPONENTS, ids=lambda method: method.__name__)


def run_on_unit_gradients(method, steps, lr=lambda _: 0.1):
    """The effective step size λ_k/d_{k+1}, which scales the newest gradient, and x_0 - z_{k+1}."""
    param = nn.Parameter(torch.zeros(1).double())
    optimizer = method([param], averaging="none", eps=0.0)
    (group,) = optimizer.param_groups
    step_sizes, distances = [], []
    for k in range(steps):
        group["lr"] = lr(k)
        param.grad = torch.ones(1).double()
        optimizer.step()
        weight = family.WEIGHTS[group["weights"]](group, k)
        grad_sum = optimizer.state[param]["grad_sum"].item()
        distances.append(-param.item())
        step_sizes.append(weight * distances[-1] / grad_sum)
    return np.array(step_sizes), np.array(distances)


def exponent(step_sizes):
    return math.log(step_sizes[2000] / step_sizes[500]) / math.log(2001 / 501)


@each_method
def test_the_effective_step_size(method):
    step_sizes, _ = run_on_unit_gradients(method, 2001)
    assert exponent(step_sizes) == pytest.approx(EXPONENTS[method], abs=2e-3)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 2.0])
def test_with_the_cube_root_the_step_size_is_constant_for_power_one_half_only(power):
    """∑ (i+1)^p grows as k^{p+1}, so the effective step size goes as k^{p-(p+1)/3}."""
    step_sizes, _ = run_on_unit_gradients(partial(family.MADGRAD, power=power), 2001)
    assert exponent(step_sizes) == pytest.approx((2 * power - 1) / 3, abs=2e-3)


@each_method
def test_a_tenfold_drop_of_the_lr_draws_some_methods_back_to_x0(method):
    """β = √(k+1) keeps growing (the paper says it decreases); the sum grows ten times slower.

    If the denominator contains γ, the distance keeps growing.
    """
    _, distances = run_on_unit_gradients(method, 600, lr=lambda k: 0.1 if k < 300 else 0.01)
    drawn_back = method in (family.DA, family.WeightedDA, family.WeightedNumerator)
    assert bool((np.diff(distances[300:400]) < 0).all()) is drawn_back
    assert (np.diff(distances[:300]) > 0).all()


def test_gamma_cancels_from_the_denominator_of_the_weighted_numerator():
    def denominator(lr):
        step_sizes, _ = run_on_unit_gradients(family.WeightedNumerator, 50, lr=lambda _: lr)
        return lr * math.sqrt(50) / step_sizes[-1]

    assert denominator(0.1) == pytest.approx(denominator(7.0), rel=1e-12)


def test_centred_at_the_origin_a_method_leaves_the_minimum():
    """From a minimum of (uv-1)²/2: centred at x_0 it stays, at the origin it goes to the saddle."""
    for centre, expected in (("x0", 0.0), ("origin", 0.5)):
        param = nn.Parameter(torch.ones(2).double())
        optimizer = family.AdaGradDA([param], lr=0.1, centre=centre)
        for _ in range(20):
            optimizer.zero_grad()
            loss = 0.5 * (param.prod() - 1) ** 2
            loss.backward()
            optimizer.step()
        assert loss.item() == expected


def two_moons(generator):
    angle = torch.rand(300, generator=generator) * math.pi
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    points = torch.cat([upper, torch.tensor([1.0, 0.5]) - upper])
    noise = 0.1 * torch.randn(600, 2, generator=generator)
    return points + noise, torch.arange(2).repeat_interleave(300)


def final_loss(method, lr, centre, seed):
    generator = torch.Generator().manual_seed(seed)
    points, labels = two_moons(generator)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
        net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), *hidden, nn.Linear(32, 2))
    optimizer = method(net.parameters(), lr=lr, centre=centre)
    for _ in range(200):
        batch = torch.randint(600, (64,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(net(points[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return cross_entropy(net(points), labels).item()


SEEDS = 9
TRAINED = 0.15  # a factor of 1.8 or more from every median measured at the origin; chance is ln 2


@pytest.mark.training
@pytest.mark.parametrize(
    ("method", "lr", "trains"), [(family.AdaGradDA, 1e-2, False), (family.MADGRAD, 0.1, True)]
)
def test_centred_at_the_origin_a_network_trains_badly_unless_lr_is_large(method, lr, trains):
    """The first step takes four hidden layers almost to 0, which is a saddle point.

    The paper reports degraded results and a high risk of divergence. Here nothing overflows:
    AdaGrad-DA, with an lr that works when centred at x_0, stays at the saddle for some seeds and
    leaves it late for others. MADGRAD leaves it with 100 times the lr of the next test.

    Such a run magnifies the last bit of a sum, so a single seed ends differently on another CPU,
    but medians hardly do. Over three instruction sets, five groups of nine seeds and eleven inputs
    perturbed by 1e-7 they range, centred at x_0 and at the origin, from 0.001 to 0.010 and from
    0.27 to 0.69 for AdaGrad-DA, from 0.000 to 0.023 and from 0.002 to 0.064 for MADGRAD.
    """
    medians = {
        centre: np.median([final_loss(method, lr, centre, seed) for seed in range(SEEDS)])
        for centre in ("x0", "origin")
    }
    assert medians["x0"] < 0.05
    assert (medians["origin"] < TRAINED) == trains


@pytest.mark.training
def test_centred_at_the_origin_madgrad_stays_at_the_saddle_with_a_small_lr():
    """20 seeds, three instruction sets: within 4e-4 of ln 2; centred at x_0 all end below 0.06."""
    for seed in range(5):
        assert final_loss(family.MADGRAD, 1e-3, "x0", seed) < 0.1
        assert final_loss(family.MADGRAD, 1e-3, "origin", seed) == pytest.approx(
            math.log(2), abs=1e-3
        )


@pytest.mark.parametrize("method", [family.MADGRAD, cubegrad.MADGRAD], ids=["family", "cubegrad"])
@pytest.mark.parametrize("lr", [1e-3, 1e-1])
def test_madgrad_solves_adams_counter_example(method, lr):
    """Reddi et al.: the loss is 3x once in three steps, else -x; the best point is x = -1."""
    assert max(end_on_the_interval(lambda p: method(p, lr=lr), 3.0, 1.0, 3, 1500, False)) == -1.0


def test_adam_ends_at_the_wrong_end_of_its_counter_example():
    def adam(params):
        return torch.optim.Adam(params, lr=0.5, betas=(0.0, 1 / (1 + 3.0**2)))

    assert min(end_on_the_interval(adam, 3.0, 1.0, 3, 1500, True)) > 0.97


@pytest.mark.training
def test_adam_and_madgrad_with_momentum_on_rare_large_gradients():
    """Reddi et al. for β = (0.9, 0.99): 1010 once in 101 steps, else -10.

    Adam moves to the wrong end. MADGRAD oscillates while it drifts to -1, where it is most of the
    time here and always later.
    """

    def adam(params):
        return torch.optim.Adam(params, lr=0.5, betas=(0.9, 0.99))

    def madgrad(params):
        return cubegrad.MADGRAD(params, lr=0.1)

    up = end_on_the_interval(adam, 1010.0, 10.0, 101, 8080, True)
    assert up[-1] > up[0] > 0.7
    down = end_on_the_interval(madgrad, 1010.0, 10.0, 101, 8080, False)
    assert max(down) < -0.5
    assert np.median(down) == -1.0
