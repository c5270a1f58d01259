"""estimated_lr finds the estimate in what flax nnx makes of a state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from cubegrad.optax import estimated_lr, madgrad

nnx = pytest.importorskip("flax.nnx")


@pytest.mark.compilation
def test_the_estimate_is_found_in_an_nnx_optimizer():
    tx = optax.chain(optax.clip_by_global_norm(1.0), madgrad("auto"))
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert estimated_lr(optimizer) == 0

    def loss(model):
        return jnp.sum((model(jnp.ones((4, 3))) - 1) ** 2)

    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = tx.init(params)
    for _ in range(5):
        grads = nnx.grad(loss)(model)
        updates, state = tx.update(nnx.to_pure_dict(grads), state, params)
        params = optax.apply_updates(params, updates)
        optimizer.update(model, grads)
    expected = estimated_lr(state)
    assert expected > 0
    held = nnx.state(optimizer)
    for thing in (optimizer, optimizer.opt_state, held, nnx.to_pure_dict(held)):
        np.testing.assert_allclose(estimated_lr(thing), expected, rtol=1e-5)
    found = nnx.jit(estimated_lr)(optimizer)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
