"""Run by tests/optax/test_kernel_compiled.py with 4 CPU devices: shards step as wholes do."""

import sys
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cubegrad.optax import apply_gradients, kernel, madgrad

kernel.INTERPRET, kernel.LEAST = True, 2**10
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPECS = {
    "rows": ((64, 1024), PartitionSpec("data")),
    "long": ((2**16,), PartitionSpec(("data", "model"))),
    "whole": ((64, 512), PartitionSpec()),
    "both": ((2048, 32), PartitionSpec("data", "model")),  # no codes
}
tx = madgrad("auto", compact=True)
values = {
    name: jax.random.normal(jax.random.key(i), shape)
    for i, (name, (shape, _)) in enumerate(SPECS.items())
}
grads = jax.tree.map(lambda value: jax.numpy.sin(7 * value), values)


def placed(tree, sharded):
    one = jax.devices()[0]
    shardings = {n: NamedSharding(mesh, spec) if sharded else one for n, (_, spec) in SPECS.items()}
    return jax.tree.map(jax.device_put, tree, shardings)


def traced(sharded, known):
    """A step that is not compiled yet, its arguments, and how many kernels it has."""
    params, gradients = placed(values, sharded), placed(grads, sharded)
    shardings = jax.tree.map(lambda param: param.sharding, params) if known else None
    step = partial(apply_gradients, tx, kernel=True, shardings=shardings)
    arguments = gradients, tx.init(params), params
    found = jax.jit(step).trace(*arguments)
    return found, arguments, str(found.jaxpr).count("pallas_call")


def run(sharded):
    found, (gradients, state, params), kernels = traced(sharded, known=True)
    step = found.lower().compile()
    for _ in range(2):
        params, state = step(gradients, state, params)
    return params, state, kernels, step.as_text()


params, state, kernels, compiled = run(sharded=True)
whole, whole_state, kernels_of_whole, _ = run(sharded=False)
assert (kernels, kernels_of_whole) == (4, 4), (kernels, kernels_of_whole)
assert not any(word in compiled for word in ("all-gather", "all-to-all", "collective-permute"))
for name, (shape, spec) in SPECS.items():
    assert params[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)), name
for name, kept in state._asdict().items():
    if name in ("count", "estimate"):  # a shard adds up its own sums
        np.testing.assert_allclose(kept, getattr(whole_state, name), rtol=1e-5)
        continue
    pairs = zip(jax.tree.leaves(kept), jax.tree.leaves(getattr(whole_state, name)), strict=True)
    for one, other in pairs:  # the same indices, and so the same random bits
        apart = np.abs(np.float64(one) - np.float64(other))
        assert np.mean(apart > (1e-6 if one.dtype == np.float32 else 0)) <= 1e-4, name
for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
# What XLA splits by itself is not known while it is traced.
assert traced(sharded=True, known=False)[2] == 0

# Inside shard_map every array is a shard.
tx, spec = madgrad(0.1), PartitionSpec("data")
inner = jax.shard_map(
    lambda param, grad: apply_gradients(tx, grad, tx.init(param), param, kernel=True)[0],
    mesh=jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
    in_specs=(spec, spec),
    out_specs=spec,
    check_vma=False,
)
assert "pallas_call" in str(jax.make_jaxpr(inner)(values["rows"], grads["rows"]))
sys.stdout.write("sharded")
