"""Run by tests/optax/test_habits.py with 4 CPU devices: sharded steps gather no parameter."""

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from cubegrad.optax import averaged_params, madgrad, madgradw, mirror_madgrad

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
rows = NamedSharding(mesh, PartitionSpec("data"))
SMALL, WHOLE_BLOCKS, LONG_ROWS = ((8, 6), sharding), ((8, 1024), sharding), ((8, 5, 120), rows)

METHODS = {
    "madgrad": (madgrad(0.1), SMALL),
    "mirror_madgrad": (mirror_madgrad(0.1), SMALL),
    "madgradw": (madgradw(0.1), SMALL),
    "schedule-free": (madgradw(0.1, schedule_free=True), SMALL),
    "madgrad, estimated": (madgrad("auto"), SMALL),
    "compact madgrad": (madgrad(0.1, compact=True), WHOLE_BLOCKS),
    "compact madgrad, rows": (madgrad(0.1, compact=True), LONG_ROWS),
    "compact mirror_madgrad": (mirror_madgrad(0.1, compact=True), WHOLE_BLOCKS),
    "compact madgradw": (madgradw(0.1, compact=True), WHOLE_BLOCKS),
    "compact schedule-free": (madgradw(0.1, schedule_free=True, compact=True), WHOLE_BLOCKS),
    "compact madgrad, estimated": (madgrad("auto", compact=True), WHOLE_BLOCKS),
}

for name, (tx, (shape, sharding)) in METHODS.items():
    values = jax.random.normal(jax.random.key(0), shape)
    grads = jax.random.normal(jax.random.key(1), shape)

    @jax.jit
    def step(params, state, grads, tx=tx):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, unsharded = jax.device_put(values, sharding), values
    state, unsharded_state = tx.init(params), tx.init(unsharded)
    parts = (2, 2) if "model" in sharding.spec else (2, 1)
    for _ in range(3):
        for buffer in (leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0):
            assert buffer.sharding.is_equivalent_to(sharding, buffer.ndim), buffer.sharding
            shard = buffer.addressable_shards[0].data.shape
            assert (shard[0] * parts[0], shard[1] * parts[1]) == buffer.shape[:2]
        params, state = step(params, state, jax.device_put(grads, sharding))
        unsharded, unsharded_state = step(unsharded, unsharded_state, grads)
    assert params.sharding.is_equivalent_to(sharding, params.ndim)
    compiled = step.lower(params, state, params).compile().as_text()
    assert not any(word in compiled for word in ("all-gather", "all-to-all", "collective-permute"))
    assert ("all-reduce" in compiled) == name.endswith("estimated")  # a number for each sum
    if name.startswith("compact"):  # a code that is rounded the other way moves x by a bit more
        np.testing.assert_allclose(params, unsharded, rtol=0, atol=1e-3)
        assert np.mean(np.abs(params - unsharded) > 1e-6) <= 1e-3
    else:
        np.testing.assert_allclose(params, unsharded, rtol=1e-6)
    if name.endswith("estimated"):
        np.testing.assert_allclose(state.estimate, unsharded_state.estimate, rtol=1e-6)
        assert all(number.sharding.is_fully_replicated for number in state.estimate)
    if name.endswith("schedule-free"):
        for find_mean in (averaged_params, jax.jit(averaged_params)):
            mean = find_mean(state, params)
            assert mean.sharding.is_equivalent_to(sharding, mean.ndim)
    print(f"{name}: sharded")  # noqa: T201
