"""What docs/jax.md says of optax.contrib.madgrad (of optax 0.2.8), compared with ours."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import run, same_bits, stepper  # noqa: E402

from cubegrad.optax import madgrad  # noqa: E402

pytestmark = pytest.mark.skipif(
    not optax.__version__.startswith("0.2.8"), reason="docs/jax.md describes optax 0.2.8"
)


def once(tx, param, grad, **jit):
    return stepper(tx, **jit)(param, tx.init(param), grad)


def peer(*args, **options):
    return optax.contrib.madgrad(*args, **options)


def test_its_initial_param_is_an_alias():
    param = jnp.ones(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="donate the same buffer twice"):
        once(peer(0.1), param, jnp.ones(3), donate_argnums=(0, 1))
    ours, _ = once(madgrad(0.1), jnp.ones(3), jnp.ones(3), donate_argnums=(0, 1))
    assert (ours < 1).all()


def test_it_moves_at_learning_rate_zero():
    theirs, _ = once(peer(0.0), jnp.ones(3), jnp.ones(3))
    ours, _ = once(madgrad(0.0), jnp.ones(3), jnp.ones(3))
    np.testing.assert_allclose(1 - theirs, 1e-5, rtol=0.05)
    assert same_bits(ours, jnp.ones(3))


def test_its_float16_sums_overflow_and_the_weight_stops():
    ones, grad = jnp.ones(3, jnp.float16), jnp.full(3, 300, jnp.float16)
    theirs, state = once(peer(1.0), ones, grad)
    ours, _ = once(madgrad(1.0), ones, grad)
    assert jnp.isinf(state[1].grad_sum_sq).all()
    assert same_bits(theirs, ones)
    assert (ours < 1).all()


def test_its_bfloat16_sums_lose_small_gradients():
    """After 1,000 steps with gradient 1, ν should be Σ λ_k; a bfloat16 sum stops growing before."""
    sums, ours = [], madgrad(0.1)
    for tx in (peer(0.1), ours):
        ones = jnp.ones(1, jnp.bfloat16)
        _, state = run(tx, ones, [ones] * 1000)
        sums.append(state.grad_sq_sum if tx is ours else state[1].grad_sum_sq)
    exact = 0.1 * np.sqrt(np.arange(1, 1001)).sum()
    assert float(sums[0][0]) < 0.65 * exact
    assert float(sums[1][0]) == pytest.approx(exact, rel=1e-4)


def test_without_eps_it_makes_nan():
    grad = jnp.array([0.0, 1.0])
    theirs, _ = once(peer(0.1, eps=0.0), jnp.ones(2), grad)
    ours, _ = once(madgrad(0.1, eps=0.0), jnp.ones(2), grad)
    assert jnp.isnan(theirs[0])
    assert ours[0] == 1


def test_without_momentum_it_keeps_the_initial_param():
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(jnp.ones(1000)))) // 1000
        for tx in (peer(0.1, momentum=0.0), madgrad(0.1, momentum=0.0))
    ]
    assert sizes == [12, 8]
