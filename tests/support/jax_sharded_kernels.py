"""Run by tests/optax/test_kernel.py with 4 CPU devices: kernels step shards as they do wholes."""

import sys
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cubegrad.optax import apply_gradients, kernel, madgrad, madgradw

kernel.INTERPRET, kernel.LEAST = True, 2**10
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPECS = {
    "rows": ((64, 1024), PartitionSpec("data")),
    "long": ((2**16,), PartitionSpec(("data", "model"))),
    "whole": ((64, 512), PartitionSpec()),
    "both": ((64, 2048), PartitionSpec("data", "model")),
}
values = {
    name: jax.random.normal(jax.random.key(i), shape)
    for i, (name, (shape, _)) in enumerate(SPECS.items())
}
grads = jax.tree.map(lambda value: jax.numpy.sin(7 * value), values)


def placed(tree, sharded):
    one = jax.devices()[0]
    shardings = {n: NamedSharding(mesh, spec) if sharded else one for n, (_, spec) in SPECS.items()}
    return jax.tree.map(jax.device_put, tree, shardings)


def traced(tx, sharded, known):
    """A step that is not compiled yet, its arguments, and how many kernels it has."""
    params, gradients = placed(values, sharded), placed(grads, sharded)
    shardings = jax.tree.map(lambda param: param.sharding, params) if known else None
    step = partial(apply_gradients, tx, kernel=True, shardings=shardings)
    arguments = gradients, tx.init(params), params
    found = jax.jit(step).trace(*arguments)
    return found, arguments, str(found.jaxpr).count("pallas_call")


def run(tx, sharded):
    found, (gradients, state, params), kernels = traced(tx, sharded, known=True)
    step = found.lower().compile()
    for _ in range(2):
        params, state = step(gradients, state, params)
    return params, state, kernels, step.as_text()


# With codes "both" has no whole blocks; a shard adds up its own sums.
for tx, with_kernels, close in ((madgradw(0.1, compact=True), 3, 0), (madgrad("auto"), 4, 1e-6)):
    params, state, kernels, compiled = run(tx, sharded=True)
    assert kernels == with_kernels, kernels
    assert not any(word in compiled for word in ("all-gather", "all-to-all", "collective-permute"))
    for name, (shape, spec) in SPECS.items():
        assert params[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)), name
    whole, whole_state, kernels, _ = run(tx, sharded=False)
    assert kernels == 4, kernels
    for name in ("rows", "long", "whole"):  # the same indices, and so the same random bits
        np.testing.assert_allclose(params[name], whole[name], rtol=close, atol=close)
        for one, other in zip(state, whole_state, strict=True):
            if isinstance(one, dict) and one[name] is not None:
                np.testing.assert_allclose(one[name], other[name], rtol=close, atol=close)
    # What XLA splits by itself is not known while it is traced.
    assert traced(tx, sharded=True, known=False)[2] == 0
    sys.stdout.write("sharded\n")

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
