"""What JAX users do with an optax transformation works with ours."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_cases import (  # noqa: E402
    VARIANTS,
    WRAPPERS,
    build,
    descend,
    each_method,
    each_variant,
    same_bits,
    stepper,
)

from cubegrad.optax import madgrad  # noqa: E402

TARGET = jnp.array([3.0, -2.0, 0.5])


def loss(params):
    return ((params["w"] * params["scale"] - TARGET) ** 2).sum()


def initial_params(dtype=jnp.float32):
    return {"w": jnp.zeros(3, dtype), "scale": jnp.ones((), dtype)}


WRAPPED = WRAPPERS | {
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "MultiSteps of 2": lambda tx: optax.MultiSteps(tx, every_k_schedule=2),
    "masked by a tree": lambda tx: optax.masked(tx, {"w": True, "scale": False}),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@each_method
def test_it_trains_inside_a_wrapper(wrapped, method):
    tx = WRAPPED[wrapped](build(method, {"lr": 0.1}))
    if wrapped.startswith("masked"):  # optax passes masked gradients on as updates
        tx = optax.chain(tx, optax.masked(optax.set_to_zero(), {"w": False, "scale": True}))
    (params, _), _ = descend(tx, initial_params(), loss, 400)
    assert loss(params) < 1e-2 * loss(initial_params())
    assert (params["scale"] == 1) == (wrapped.startswith("masked") or wrapped == "partition")


def test_clipping_comes_before_the_sums():
    tx = optax.chain(optax.clip_by_global_norm(1.0), madgrad(0.1))
    grads = {"w": jnp.full(3, 1e6), "scale": jnp.zeros(())}
    _, state = stepper(tx)(initial_params(), tx.init(initial_params()), grads)
    np.testing.assert_allclose(state[1].grad_sum["w"], 0.1 / 3**0.5, rtol=1e-5)


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_apply_if_finite_rejects_the_whole_step(dtype):
    tx = optax.apply_if_finite(madgrad(0.1), 3)
    (params, state), _ = descend(tx, initial_params(dtype), loss, 2)
    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)
    new_params, new_state = stepper(tx)(params, state, bad)
    assert same_bits(new_params, params)
    assert same_bits(new_state.inner_state, state.inner_state)
    assert new_state.total_notfinite == 1


@pytest.mark.compilation
def test_injected_numbers_may_change_between_steps():
    tx = optax.inject_hyperparams(madgrad, static_args=("state_dtype", "mask"))(
        0.1, mask=lambda p: {n: n == "w" for n in p}, state_dtype=jnp.float32
    )
    (params, state), _ = descend(tx, initial_params(), loss, 3)
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    state.hyperparams["momentum"] = jnp.float32(0.0)
    step = stepper(tx)
    once, state = step(params, state, jax.grad(loss)(params))
    twice, _ = step(once, state, jax.grad(loss)(once))
    assert not same_bits(once, params)  # x has moved to z
    np.testing.assert_allclose(once["w"], twice["w"], rtol=1e-6)


def test_injected_decay_is_not_rounded_away_in_bfloat16():
    options = {"weight_decay": 0.01, "decoupled_weight_decay": True}
    tx = optax.inject_hyperparams(madgrad)(0.1, **options)
    params = {"w": jnp.ones(3, jnp.bfloat16)}  # so optax casts all numbers to bfloat16
    _, state = stepper(tx)(params, tx.init(params), {"w": jnp.zeros(3, jnp.bfloat16)})
    np.testing.assert_allclose(state.inner_state.initial_param["w"], 0.999, rtol=1e-5)


@pytest.mark.parametrize(
    "mask", [{"w": False, "scale": True}, lambda p: {n: x.ndim == 0 for n, x in p.items()}]
)
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_mask_selects_what_decays(mask, decoupled):
    tx = madgrad(0.1, weight_decay=0.5, decoupled_weight_decay=decoupled, mask=mask)
    params = {"w": jnp.ones(3), "scale": jnp.ones(())}
    new_params, _ = stepper(tx)(params, tx.init(params), jax.tree.map(jnp.zeros_like, params))
    assert same_bits(new_params["w"], params["w"])
    assert new_params["scale"] < 1


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float32"])
@each_method
def test_state_dtype_is_the_dtype_of_the_sums(method, state_dtype):
    tx = build(method, {"state_dtype": state_dtype, "momentum": 0.0})
    (_, state), _ = descend(tx, initial_params(), loss, 2)
    sums = jax.tree.leaves([tree for name, tree in state._asdict().items() if "sum" in name])
    assert {leaf.dtype.name for leaf in sums} == {state_dtype}
    points = jax.tree.leaves(state[-1])
    assert {leaf.dtype.name for leaf in points} <= {"float32"}
    # Without momentum x_0 can be recovered and z is x, but not from rounded sums.
    assert bool(points) == (state_dtype == "bfloat16")


@pytest.mark.compilation
@each_method
def test_vmap_over_seeds_and_learning_rates(method):
    def final(seed, lr):
        tx = build(method, {"lr": lr})
        params = {"w": jax.random.normal(jax.random.key(seed), (3,)), "scale": jnp.ones(())}
        return descend(tx, params, loss, 20)[0][0]["w"]

    seeds, rates = jnp.arange(2), jnp.array([0.01, 0.1, 0.3])
    grid = jax.jit(jax.vmap(jax.vmap(final, (None, 0)), (0, None)))(seeds, rates)
    assert grid.shape == (2, 3, 3)
    alone = jax.jit(final)
    for i, j in ((0, 0), (1, 2)):
        np.testing.assert_allclose(grid[i, j], alone(seeds[i], rates[j]), rtol=1e-5, atol=1e-6)


@pytest.mark.compilation
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_method
def test_derivatives_through_steps_are_those_of_finite_differences(method, momentum):
    """Where ν is 0 and the cube root has no derivative, those of the step are finite."""
    with jax.enable_x64(True):
        options = {"momentum": momentum, "eps": 1e-2, "weight_decay": 0.1}
        goal = jnp.array([1.0, 2.0, 3.0])

        @jax.jit
        def outcome(lr, begin, grad_scale):
            tx = build(method, options | {"lr": lr})
            params, state = begin, tx.init(begin)
            for k in range(3):
                grad = (params - k) * grad_scale
                updates, state = tx.update(grad, state, params)
                params = optax.apply_updates(params, updates)
            return ((params - goal) ** 2).sum()

        arguments = (jnp.float64(0.1), jnp.array([0.5, -1.0, 2.0]), jnp.array([1.0, 2.0, 1.0]))
        check_grads(outcome, arguments, order=1, modes=("rev", "fwd"), eps=1e-5)
        still = (arguments[0], jnp.zeros(3), jnp.zeros(3))
        slopes = jax.grad(outcome, (0, 1, 2))(*still)
        assert all(bool(jnp.isfinite(slope).all()) for slope in slopes)


@pytest.mark.compilation
@pytest.mark.parametrize("init", [lambda tx: tx.init, lambda tx: jax.jit(tx.init)])
@each_variant
def test_parameters_and_state_are_donated_and_reused(variant, init):
    tx = VARIANTS[variant]()
    params = {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
    state = init(tx)(params)
    step = stepper(tx, donate_argnums=(0, 1))
    memory = step.lower(params, state, params).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert memory.alias_size_in_bytes == size
    # docs/jax.md has the exceptions
    arrays = {"madgrad": 0, "mirror_madgrad": 0, "madgradw": 3, "schedule-free": 2}
    if variant in arrays:
        assert memory.temp_size_in_bytes <= 256 + arrays[variant] * 2048  # scalars, and w's size
    grads = jax.tree.map(lambda p: p + 1.0, params)
    for _ in range(2):
        old = jax.tree.leaves((params, state))
        params, state = step(params, state, grads)
        assert all(leaf.is_deleted() for leaf in old)
    assert (params["w"] < 1).all()


@each_variant
def test_a_tree_without_parameters_only_counts(variant):
    tx = VARIANTS[variant]()
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {}
    assert state.count == 1


SHARDING = Path(__file__).parents[1] / "support" / "jax_sharding.py"


@pytest.mark.processes
def test_state_is_sharded_like_its_parameter():
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SHARDING)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 11
    assert all(line.endswith(": sharded") for line in lines)
