"""Run by tests/optax/test_habits.py with 4 CPU devices: sharded steps gather no parameter."""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cubegrad.optax import madgrad, mirror_madgrad

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
values = jax.random.normal(jax.random.key(0), (8, 6))
grads = jax.random.normal(jax.random.key(1), (8, 6))

METHODS = {
    "madgrad": madgrad(0.1),
    "mirror_madgrad": mirror_madgrad(0.1),
    "madgrad, estimated": madgrad("auto"),
}

for name, tx in METHODS.items():

    @jax.jit
    def step(params, state, grads, tx=tx):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, unsharded = jax.device_put(values, sharding), values
    state, unsharded_state = tx.init(params), tx.init(unsharded)
    for _ in range(3):
        for buffer in (leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0):
            assert buffer.sharding.is_equivalent_to(sharding, 2), buffer.sharding
            assert buffer.addressable_shards[0].data.shape == (4, 3)
        params, state = step(params, state, jax.device_put(grads, sharding))
        unsharded, unsharded_state = step(unsharded, unsharded_state, grads)
    assert params.sharding.is_equivalent_to(sharding, 2)
    compiled = step.lower(params, state, params).compile().as_text()
    assert not any(word in compiled for word in ("all-gather", "all-to-all", "collective-permute"))
    assert ("all-reduce" in compiled) == name.endswith("estimated")  # a number for each sum
    np.testing.assert_allclose(params, unsharded, rtol=1e-6)
    if name.endswith("estimated"):
        np.testing.assert_allclose(state.estimate, unsharded_state.estimate, rtol=1e-6)
        assert all(number.sharding.is_fully_replicated for number in state.estimate)
    print(f"{name}: sharded")  # noqa: T201
