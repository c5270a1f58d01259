"""Run by test_optax_habits.py with 4 CPU devices: a sharded run keeps to its shards."""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cubegrad.optax import madgrad, mirror_madgrad

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
values = jax.random.normal(jax.random.key(0), (8, 6))
grads = jax.random.normal(jax.random.key(1), (8, 6))

for factory in (madgrad, mirror_madgrad):
    tx = factory(0.1)

    @jax.jit
    def step(params, state, grads, tx=tx):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, alone = jax.device_put(values, sharding), values
    state, own = tx.init(params), tx.init(alone)
    for _ in range(3):
        for buffer in jax.tree.leaves(state[1:]):
            assert buffer.sharding.is_equivalent_to(sharding, 2), buffer.sharding
            assert buffer.addressable_shards[0].data.shape == (4, 3)
        params, state = step(params, state, jax.device_put(grads, sharding))
        alone, own = step(alone, own, grads)
    assert params.sharding.is_equivalent_to(sharding, 2)
    compiled = step.lower(params, state, params).compile().as_text()
    assert not any(word in compiled for word in ("all-reduce", "all-gather", "all-to-all"))
    np.testing.assert_allclose(params, alone, rtol=1e-6)
    print(f"{factory.__name__}: sharded")  # noqa: T201
