"""apply_gradients(kernel=True) where there is no kernel, in wrappers and in other libraries."""

import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import VARIANTS, WRAPPERS, randn, same_bits  # noqa: E402
from jax_kernels import interpret, kernel_step, kernels, lowered, marks, plain_step, tree  # noqa: E402

from cubegrad.optax import madgrad  # noqa: E402
from cubegrad.optax.apply import Written, _applied  # noqa: E402

pytestmark = marks


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch)


@pytest.mark.parametrize("variant", ["madgrad", "madgrad, estimated", "madgradw"])
def test_without_a_gpu_the_step_is_that_of_update(variant):
    """Compiled for this machine: the kernels are traced, and the parameters are the same."""
    tx, params = VARIANTS[variant](), tree()
    state = tx.init(params)
    assert kernels(kernel_step(tx), params, state, params) == 1
    new, expected = (
        jax.jit(step(tx))(tree(seed=10), state, params) for step in (kernel_step, plain_step)
    )
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "compact"),
    [
        ((64, 1000), "float32", True),  # the last block of a row is shorter
        ((64, 1000), "float32", False),  # less than 65,536
        ((65, 1009), "float32", False),  # no whole blocks
        ((64, 1024), "complex64", False),
    ],
)
def test_other_parameters_are_left_to_xla(shape, dtype, compact):
    tx, params = madgrad(0.1, compact=compact), {"w": randn(shape, dtype, 0)}
    arguments = params, tx.init(params), params
    assert kernels(kernel_step(tx), *arguments) == 0
    assert same_bits(*(jax.jit(step(tx))(*arguments) for step in (kernel_step, plain_step)))


def test_vmap_takes_the_step_of_xla():
    tx = madgrad(0.1, compact=True)
    params = jax.vmap(lambda scale: tree()["w"] * scale)(jnp.arange(1.0, 3.0))
    state = jax.vmap(tx.init)(params)
    text = lowered(jax.vmap(kernel_step(tx)), params, state, params)
    assert "triton" not in text
    new = jax.jit(jax.vmap(kernel_step(tx)))(params, state, params)
    for k in range(2):
        alone = jax.jit(plain_step(tx))(*jax.tree.map(lambda a, k=k: a[k], (params, state, params)))
        np.testing.assert_allclose(new[0][k], alone[0], rtol=0, atol=1e-3)


USED = {"alone", "chain", "masked", "partition", "inject_hyperparams"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "inject_hyperparams", "followed by another"])
def test_inside_a_wrapper(wrapper, monkeypatch):
    """A kernel is used unless another transformation looks at the update."""
    applied = []
    monkeypatch.setattr(
        "cubegrad.optax.apply._applied", lambda *trees: applied.append(trees) or _applied(*trees)
    )
    if wrapper == "inject_hyperparams":
        tx = optax.inject_hyperparams(madgrad)(0.1, momentum=0.9)
    elif wrapper == "followed by another":
        tx = optax.chain(madgrad(0.1), optax.add_decayed_weights(0.1))
    else:
        tx = WRAPPERS[wrapper](madgrad(0.1))
    params, grads = tree(), tree(seed=10)
    state, ours = tx.init(params), kernel_step(tx)
    new, expected = (jax.jit(step)(grads, state, params) for step in (ours, plain_step(tx)))
    used = any(isinstance(leaf, Written) for leaf in jax.tree.leaves(applied))
    assert used == (wrapper in USED)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-6)


def test_other_transformations_and_errors_pass_through():
    params = tree()
    for tx in (optax.adamw(1e-3), optax.sgd(0.1)):
        state = tx.init(params)
        updates, expected = tx.update(params, state, params)
        new = kernel_step(tx)(params, state, params)
        assert same_bits(new, (optax.apply_updates(params, updates), expected))
    tx = madgrad(0.1)
    with pytest.raises(ValueError, match=r"must have the parameter's shape"):
        kernel_step(tx)({**params, "b": jnp.ones(8)}, tx.init(params), params)
    reducing = optax.chain(madgrad(0.1), optax.contrib.reduce_on_plateau())
    arguments = params, reducing.init(params), params
    assert same_bits(
        kernel_step(reducing, value=1.0)(*arguments), plain_step(reducing)(*arguments, value=1.0)
    )


def test_a_missing_backend_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delitem(sys.modules, "cubegrad.optax.pallas", raising=False)
    monkeypatch.delattr("cubegrad.optax.pallas", raising=False)
    jax.clear_caches()
    tx, params = madgrad(0.1), tree(shape=(64, 2048))
    with pytest.raises(ImportError, match="use kernel=False"):
        kernel_step(tx)(params, tx.init(params), params)


@pytest.mark.usefixtures("interpreted")
def test_modules_of_flax_and_equinox():
    nnx, equinox = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    tx = madgrad(1e-4)

    def loss(model):
        return (model(jnp.ones(256)) ** 2).sum()

    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    state = tx.init(nnx.state(model, nnx.Param))

    @nnx.jit
    def nnx_step(model, state):
        grads = nnx.grad(loss)(model)
        params, state = kernel_step(tx)(grads, state, nnx.state(model, nnx.Param))
        nnx.update(model, params)
        return state

    before = loss(model)
    nnx_step(model, state)
    assert loss(model) < before

    module = equinox.nn.Linear(256, 256, key=jax.random.key(0))

    @equinox.filter_jit
    def equinox_step(module, state):
        grads = equinox.filter_grad(loss)(module)
        params, rest = equinox.partition(module, equinox.is_inexact_array)
        params, state = kernel_step(tx)(grads, state, params)
        return equinox.combine(params, rest), state

    moved, _ = equinox_step(module, tx.init(equinox.filter(module, equinox.is_inexact_array)))
    assert loss(moved) < loss(module)
