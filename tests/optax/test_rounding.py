"""stochastic_rounding=True in JAX: the weights of PyTorch's eager backend."""

import cases
import jax
import jax.numpy as jnp
import jax_cases
import numpy as np
import optax
import pytest
from jax_cases import build, each_method, stepper

HALVES = ["bfloat16", "float16"]
AT_RANDOM = {"stochastic_rounding": True}
SHAPES = [(65, 33), (), (7, 5, 3), (0, 3)]


@pytest.mark.compilation
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("dtype", HALVES)
@each_method
def test_the_weights_of_pytorch(method, dtype, momentum):
    """Weights that differ in float32's last place are rounded apart in at most 1 of 1,000 cases."""
    chosen = AT_RANDOM | {"momentum": momentum}
    twins = [
        cases.parameter(cases.randn(shape, jax_cases.DTYPES[dtype], i), "cpu")
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = cases.build(method, cases.EAGER, twins, chosen)
    tx = build(method, chosen)
    params = [jax_cases.array(twin.detach()) for twin in twins]
    state, step = tx.init(params), stepper(tx)
    for k in range(4):
        for i, twin in enumerate(twins):
            twin.grad = cases.randn(tuple(twin.shape), twin.dtype, 100 * k + i)
        optimizer.step()
        params, state = step(params, state, [jax_cases.array(twin.grad) for twin in twins])
    apart = [
        np.sum(jax_cases.numbers(param) != cases.numbers(twin))
        for param, twin in zip(params, twins, strict=True)
    ]
    assert sum(apart) <= 8
    assert all(param.dtype == dtype for param in params)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("dtype", HALVES)
@each_method
def test_a_step_at_rate_0_moves_no_bit(method, dtype, momentum):
    tx = build(method, AT_RANDOM | {"momentum": momentum, "lr": 0.0})
    param = jax_cases.randn((40, 30), dtype, 0).at[0, :2].set(jnp.array([0.0, -0.0], dtype))
    state, new = tx.init(param), param
    for k in range(3):
        updates, state = tx.update(jax_cases.randn((40, 30), dtype, k + 1), state, new)
        new = optax.apply_updates(new, updates)
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (param, new)]
    assert (bits[0] == bits[1]).all()


@each_method
def test_updates_of_half_precision_are_float32(method):
    """No move in bfloat16 leads to every number. With compact=True small parameters do the same."""
    params = {"half": jax_cases.randn((5, 7), "bfloat16", 0), "single": jnp.ones((5, 7))}
    moves = []
    for options in (AT_RANDOM, {"compact": True}, {}):
        tx = build(method, options)
        updates, _ = tx.update(params, tx.init(params), params)
        assert updates["single"].dtype == jnp.float32
        moves.append(updates)
    assert moves[0]["half"].dtype == moves[1]["half"].dtype == jnp.float32
    assert (moves[0]["half"] == moves[1]["half"]).all()
    assert moves[2]["half"].dtype == jnp.bfloat16
    assert (moves[0]["single"] == moves[2]["single"]).all()


def test_the_mean_of_many_weights_makes_a_small_move():
    """Each is a unit off with the probability move / unit; rounded to nearest none would be."""
    start, unit = 384.0, 2.0
    params = jnp.full((64, 1024), start, jnp.bfloat16)
    ends = []
    for options, value in ((AT_RANDOM, params), ({}, params), ({}, jnp.array(start))):
        tx = build(cases.MADGRAD, options | {"lr": 0.01})
        state, step = tx.init(value), stepper(tx)
        for _ in range(10):
            value, state = step(value, state, jnp.ones_like(value))
        ends.append(np.asarray(value, np.float64))
    at_random, to_nearest, exact = ends
    way = start - exact
    assert 0 < way < unit / 2
    assert (to_nearest == start).all()
    limit = 5 * np.sqrt(way * unit / params.size) + 0.03 * way
    assert abs(start - at_random.mean() - way) < limit
