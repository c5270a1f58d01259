"""madgrad("auto") after it has converged, as tests/optim/test_auto_converged.py."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from cubegrad.optax import madgrad  # noqa: E402


def parabola(x):
    return ((x - jnp.array([1.0, -1.0, 1.0])) ** 2).sum()


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def narrow_valley(x):
    """Curvatures from 1 to 1,000 in directions that are not those of the coordinates."""
    axes, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((10, 10)))
    return (jnp.logspace(0, 3, 10) * (axes.T @ x) ** 2).sum()


def descend(tx, loss, x, state, steps):
    def step(carry, _):
        x, state = carry
        value, grad = jax.value_and_grad(loss)(x)
        moves, state = tx.update(grad, state, x)
        return (optax.apply_updates(x, moves), state), value

    return jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))((x, state))


@pytest.mark.parametrize("factor", [pytest.param(0.5, marks=pytest.mark.thorough), 1.0, 2.0])
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize(
    ("loss", "start"),
    [(parabola, [-1.0, 10.0, 1.0]), (rosenbrock, [0.0, 0.0]), (narrow_valley, [1.0] * 10)],
)
def test_a_converged_run_does_not_jump(loss, start, wide, factor):
    with jax.enable_x64(wide):
        x, tx = jnp.array(start), madgrad("auto", lr_factor=factor)
        (_, state), losses = descend(tx, loss, x, tx.init(x), 12000)
        assert losses[2000:].max() < 1e-6 * losses[0]
        assert state.estimate.uncounted > 0.9


@pytest.mark.parametrize("decay", [1e-3, 1e-2, 1e-1])
def test_a_converged_run_does_not_jump_with_coupled_decay(decay):
    """The gradients of the loss remain then, and decay must outweigh them in the estimate."""
    x, tx = jnp.array([-1.0, 10.0, 1.0]), madgrad("auto", weight_decay=decay)
    (_, state), losses = descend(tx, parabola, x, tx.init(x), 4000)
    minimum = 3 * (decay / (2 + decay)) ** 2  # the loss where loss and decay balance
    assert losses[2000:].max() < 1.1 * minimum + 1e-7 * losses[0]
    assert state.estimate.distance < 11  # that of the furthest coordinate


@pytest.mark.parametrize(
    ("loss", "start", "solution"),
    [
        (parabola, [-1.0, 10.0, 1.0], [1.0, -1.0, 1.0]),
        (rosenbrock, [0.0, 0.0], [1.0, 1.0]),
    ],
)
def test_it_passes_what_optax_asks_of_its_own(loss, start, solution):
    """The problems and the tolerance of optax's contrib tests."""
    x, tx = jnp.array(start), madgrad("auto")
    (x, _), losses = descend(tx, loss, x, tx.init(x), 10000)
    np.testing.assert_allclose(x, solution, rtol=3e-2, atol=3e-2)
    assert losses[-1000:].max() < 1e-6  # so the last step was not just a lucky one
