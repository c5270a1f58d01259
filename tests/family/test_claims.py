"""What the paper says of each step of its derivation, measured."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import cubegrad
from cubegrad import family

METHODS = {
    # class: the power of k with which the newest gradient's share of the move changes
    family.DA: -1 / 2,
    family.WeightedDA: 0,
    family.AdaGradDA: -1 / 2,
    family.UnweightedDenominator: 0,
    family.WeightedDenominator: -1 / 4,
    family.WeightedNumerator: 0,
    family.MADGRAD: 0,
}
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def under_unit_gradients(method, steps, lr=lambda _: 0.1):
    """Per step: the newest gradient's share λ_k/d_{k+1}, and how far z is from x_0."""
    param = nn.Parameter(torch.zeros(1).double())
    optimizer = method([param], averaging="none", eps=0.0)
    shares, distances = [], []
    for k in range(steps):
        optimizer.param_groups[0]["lr"] = lr(k)
        param.grad = torch.ones(1).double()
        optimizer.step()
        weight = family.WEIGHTS[optimizer.param_groups[0]["weights"]](optimizer.param_groups[0], k)
        grad_sum = optimizer.state[param]["grad_sum"].item()
        distances.append(-param.item())
        shares.append(weight * distances[-1] / grad_sum)
    return np.array(shares), np.array(distances)


@each_method
def test_the_effective_step_size(method):
    """Constant for the cube root and two others; the root of λ-weighted squares loses k^{-1/4}."""
    shares, _ = under_unit_gradients(method, 2001)
    slope = math.log(shares[2000] / shares[500]) / math.log(2001 / 501)
    assert slope == pytest.approx(METHODS[method], abs=2e-3)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 2.0])
def test_the_cube_root_levels_the_power_one_half_alone(power):
    """∑ (i+1)^p has degree p+1, so the share goes as k^{p-(p+1)/3}; larger p grow."""
    shares, _ = under_unit_gradients(partial(family.MADGRAD, power=power), 2001)
    slope = math.log(shares[2000] / shares[500]) / math.log(2001 / 501)
    assert slope == pytest.approx((2 * power - 1) / 3, abs=2e-3)


@each_method
def test_a_tenfold_drop_of_the_rate_draws_some_methods_back_to_x0(method):
    """β = √(k+1) grows on (the paper says it decreases) while the sum grows ten times slower.

    Where the denominator has γ in it, the distance keeps growing.
    """
    _, distances = under_unit_gradients(method, 600, lr=lambda k: 0.1 if k < 300 else 0.01)
    falls = method in (family.DA, family.WeightedDA, family.WeightedNumerator)
    assert bool((np.diff(distances[300:400]) < 0).all()) is falls
    assert (np.diff(distances[:300]) > 0).all()


def test_gamma_cancels_from_the_weighted_numerators_denominator():
    def denominator(lr):
        shares, _ = under_unit_gradients(family.WeightedNumerator, 50, lr=lambda _: lr)
        return lr * math.sqrt(50) / shares[-1]

    assert denominator(0.1) == pytest.approx(denominator(7.0), rel=1e-12)


def test_centred_at_the_origin_a_method_leaves_a_solution():
    """f(u,v) = (uv-1)²/2 at its minimum: nothing moves, or both go to 0, a saddle, and stay."""
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
TRAINED = 0.15  # a factor of 1.8 from every median measured from the origin; ln 2 is chance


@pytest.mark.training
@pytest.mark.parametrize(
    ("method", "lr", "leaves"), [(family.AdaGradDA, 1e-2, False), (family.MADGRAD, 0.1, True)]
)
def test_centred_at_the_origin_a_network_trains_badly_unless_the_rate_is_large(method, lr, leaves):
    """At rates that fit from x_0, four hidden layers are drawn to 0, a saddle, at the first step.

    The paper reports degraded results and a high risk of divergence. Here nothing overflows:
    AdaGrad-DA stays in the saddle with some seeds and leaves it late with others. A rate a hundred
    times that of the next test takes MADGRAD out of it.

    A run of this length magnifies the last bit of a sum, so one seed ends differently on another
    CPU; medians do not. Over three instruction sets, five groups of nine seeds and eleven inputs
    perturbed by 1e-7 they are, from x_0 and from the origin, 0.001 to 0.010 and 0.27 to 0.69 for
    AdaGrad-DA, 0.000 to 0.023 and 0.002 to 0.064 for MADGRAD.
    """
    medians = {
        centre: np.median([final_loss(method, lr, centre, seed) for seed in range(SEEDS)])
        for centre in ("x0", "origin")
    }
    assert medians["x0"] < 0.05
    assert (medians["origin"] < TRAINED) == leaves


@pytest.mark.training
def test_centred_at_the_origin_madgrad_stays_in_the_saddle_at_a_small_rate():
    """20 seeds, three instruction sets: at most 4e-4 from ln 2, and below 0.06 from x_0."""
    for seed in range(5):
        assert final_loss(family.MADGRAD, 1e-3, "x0", seed) < 0.1
        assert final_loss(family.MADGRAD, 1e-3, "origin", seed) == pytest.approx(
            math.log(2), abs=1e-3
        )


def on_the_interval(make, large, small, period, steps, decaying):
    """x on [-1, 1] under gradients of `large` once a period and -`small` else; the last cycles."""
    x = nn.Parameter(torch.zeros(1).double())
    optimizer = make([x])
    rate = optimizer.param_groups[0]["lr"]
    seen = []
    for k in range(steps):
        x.grad = torch.full((1,), large if k % period == 0 else -small).double()
        if decaying:
            optimizer.param_groups[0]["lr"] = rate / math.sqrt(k + 1)
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
        seen.append(x.item())
    return seen[-3 * period :]


@pytest.mark.parametrize("method", [family.MADGRAD, cubegrad.MADGRAD], ids=["family", "cubegrad"])
@pytest.mark.parametrize("lr", [1e-3, 1e-1])
def test_adams_counter_example_is_solved_by_madgrad(method, lr):
    """Reddi et al.: 3x once in three steps, else -x, so the sum falls towards x = -1."""
    assert max(on_the_interval(lambda p: method(p, lr=lr), 3.0, 1.0, 3, 1500, False)) == -1.0


def test_adam_ends_at_the_wrong_end_of_its_counter_example():
    def adam(params):
        return torch.optim.Adam(params, lr=0.5, betas=(0.0, 1 / (1 + 3.0**2)))

    assert min(on_the_interval(adam, 3.0, 1.0, 3, 1500, True)) > 0.97


@pytest.mark.training
def test_adam_and_madgrad_with_momentum_on_rare_large_gradients():
    """Theirs with β = (0.9, 0.99): 1010 once in 101 steps, else -10. Adam climbs to the wrong end.

    MADGRAD swings by a constant and drifts as k: here it is at -1 most of the time, later always.
    """

    def adam(params):
        return torch.optim.Adam(params, lr=0.5, betas=(0.9, 0.99))

    def madgrad(params):
        return cubegrad.MADGRAD(params, lr=0.1)

    up = on_the_interval(adam, 1010.0, 10.0, 101, 8080, True)
    assert up[-1] > up[0] > 0.7
    down = on_the_interval(madgrad, 1010.0, 10.0, 101, 8080, False)
    assert max(down) < -0.5
    assert np.median(down) == -1.0
