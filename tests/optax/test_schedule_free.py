"""madgradw(schedule_free=True): PyTorch's weights, the mean of all z, and where it is found."""

import re

import cases
import numpy as np
import pytest
import torch

import cubegrad

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax_cases  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_cases import WRAPPERS, descend, randn, same_bits, scan, stepper  # noqa: E402

from cubegrad.optax import (  # noqa: E402
    ScheduleFreeMadgradwState,
    averaged_params,
    madgrad,
    madgradw,
)

STEPS = 60
# 0 at first, then up and down.
RATES = [max(0.0, 2e-2 * (1 - abs(k - 25) / 40)) if k > 2 else 0.0 for k in range(STEPS)]
# A random walk of one unit in the last place at each step.
WALKS = {"float32": STEPS**0.5 * 2.0**-23, "float64": STEPS**0.5 * 2.0**-52}


def schedule_free(learning_rate=0.1, **options):
    return madgradw(learning_rate, schedule_free=True, **options)


def scheduled(**options):
    rates = jnp.asarray(RATES)
    return schedule_free(lambda count: rates[count], **options)


@pytest.mark.compilation
@pytest.mark.parametrize("warmup_steps", [0, 12])
@pytest.mark.parametrize("dtype", WALKS)
def test_the_weights_and_the_mean_are_those_of_pytorch(dtype, warmup_steps):
    options = {"weight_decay": 0.1, "schedule_free": True, "warmup_steps": warmup_steps}
    of_torch = jax_cases.DTYPES[dtype]
    twins = [cases.parameter(cases.randn((n, 3), of_torch, n), "cpu") for n in (1, 4, 9)]
    optimizer = cubegrad.MADGRADW(twins, lr=1.0, foreach=False, **options)
    with jax.enable_x64(dtype == "float64"):
        # PyTorch counts no step of the warm-up at a rate of 0.
        chosen = RATES if warmup_steps == 0 else [max(lr, 1e-3) for lr in RATES]
        rates = jnp.asarray(chosen)
        tx = madgradw(lambda count: rates[count], **options)
        params = [jax_cases.array(twin.detach()) for twin in twins]
        steps = []
        for k, lr in enumerate(chosen):
            optimizer.param_groups[0]["lr"] = lr
            for i, twin in enumerate(twins):
                twin.grad = cases.randn(tuple(twin.shape), of_torch, 100 * k + i)
            steps.append([twin.grad for twin in twins])
            optimizer.step()
        grads = [jax_cases.array(torch.stack(column)) for column in zip(*steps, strict=True)]
        (params, state), _ = scan(tx, params, grads)
        found = [(params, [cases.numbers(twin) for twin in twins])]
        optimizer.eval()
        found.append((averaged_params(state, params), [cases.numbers(twin) for twin in twins]))
        for ours, expected in found:
            for param, other in zip(ours, expected, strict=True):
                limit = WALKS[dtype] * max(1.0, abs(other).max())
                assert param.dtype == dtype
                np.testing.assert_allclose(jax_cases.numbers(param), other, rtol=0, atol=limit)
    largest, total = optimizer.param_groups[0]["mean"].tolist()[1:]
    np.testing.assert_allclose(state.largest_lr, largest, rtol=1e-6)
    np.testing.assert_allclose(state.weight_sum, total / largest**2, rtol=1e-6)


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
def test_the_mean_is_that_of_all_z(dtype):
    with jax.enable_x64(dtype == "float64"):
        start = randn((5, 7), dtype, 0)
        grads = jnp.stack([randn((5, 7), dtype, 1 + k) for k in range(STEPS)])

        def points(params, state):
            return params + state.dual_offset, averaged_params(state, params)

        _, (points, means) = scan(scheduled(weight_decay=0.0), start, grads, points)
        points, means = (jax_cases.numbers(array) for array in (points, means))
        weights = np.maximum.accumulate(RATES) ** 2
        for k in range(STEPS):
            used = weights[: k + 1]
            expected = jax_cases.numbers(start)
            if used.any():
                expected = np.tensordot(used, points[: k + 1], 1) / used.sum()
            limit = 4 * WALKS.get(dtype, WALKS["float32"])
            np.testing.assert_allclose(means[k], expected, rtol=0, atol=limit)


SHAPES = {"matrix": (70, 100), "long": (65_536 + 37,), "small": (3, 2)}


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_the_mean_of_a_state_in_codes(dtype):
    """As far beyond y as the codes say, in the parameter's dtype."""
    params = {name: randn(shape, dtype, 1) for name, shape in SHAPES.items()}
    tx = schedule_free(momentum=0.75, compact=True)
    state, step = tx.init(params), stepper(tx)
    for k in range(2):
        params, state = step(params, state, jax.tree.map(lambda p, k=k: p + k, params))
    uncoded = {"small"} if dtype != "complex64" else {"small", "long"}  # rows of 2
    assert {name for name in SHAPES if state.dual_offset[name] is not None} == uncoded
    means = averaged_params(state, params)
    for name, param in params.items():
        if name in uncoded:
            offset = jax_cases.numbers(state.dual_offset[name])
        else:
            code = np.asarray(state.offset_code[name], np.float64) // 2  # the last bit is a root's
            scale = np.asarray(state.offset_scale[name], np.float64)
            rows = code.reshape(scale.shape[0] if scale.ndim > 1 else 1, -1)
            scale = np.repeat(scale.reshape(len(rows), -1), 256, axis=1)[:, : rows.shape[1]]
            offset = (rows * scale).reshape(code.shape)
        assert abs(offset).max() > 1e-3
        assert means[name].dtype == param.dtype
        expected = jax_cases.numbers(param) - offset / 3
        error = 2.0**-8 if dtype == "bfloat16" else 2.0**-23
        np.testing.assert_allclose(
            jax_cases.numbers(means[name]), expected, rtol=error, atol=2.0**-22
        )


@pytest.mark.compilation
def test_a_warm_up_is_a_schedule_for_the_decay_too():
    start, grads = randn((9,), "float32", 0), randn((8, 9), "float32", 1)
    rates = jnp.asarray([min(1.0, (k + 1) / 5) * 0.1 for k in range(8)])
    ends = [
        scan(tx, start, grads)[0]
        for tx in (
            schedule_free(0.1, weight_decay=0.5, warmup_steps=5),
            schedule_free(0.1, weight_decay=0.5, warmup_steps=np.int64(5)),
            schedule_free(lambda count: rates[count], weight_decay=0.5),
        )
    ]
    assert same_bits(ends[0], ends[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ends[0], ends[2])


@pytest.mark.parametrize("lr", [1e-3, 1e-23])
def test_the_weights_of_a_constant_rate_count_its_steps(lr):
    """In float32 the square of 1e-23 is 0, and a sum of squares is soon rounded."""
    tx, params = schedule_free(lr), {"w": jnp.ones(3)}
    state = tx.init(params)._replace(weight_sum=jnp.float32(2**23), largest_lr=jnp.float32(lr))
    _, state = jax.jit(tx.update)(params, state, params)
    assert state.weight_sum == 2**23 + 1


PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.ones(2)}


def trained(tx, params=PARAMS):
    return descend(tx, params, lambda p: (p["w"] ** 2).sum() + (p["b"] ** 2).sum(), 5)[0]


@pytest.mark.compilation
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "inject_hyperparams"])
def test_the_mean_is_found_inside_a_wrapper(wrapper):
    if wrapper == "inject_hyperparams":
        tx = jax_cases.injected("schedule-free")
    else:
        tx = WRAPPERS[wrapper](schedule_free())
    params, state = trained(tx)
    if wrapper == "flatten":
        with pytest.raises(ValueError, match=r"the mean of params, which params lack; .*flatten"):
            averaged_params(state, params)
        return
    means = jax.jit(averaged_params)(state, params)
    (own,) = [node for node in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(node)]
    for name in PARAMS:
        if name == "b" and wrapper in ("masked", "partition"):
            assert same_bits(means[name], params[name])
        else:
            expected = params[name] - own.dual_offset[name] / 9
            np.testing.assert_allclose(means[name], expected, rtol=1e-6)


def is_ours(node):
    return isinstance(node, ScheduleFreeMadgradwState)


@pytest.mark.compilation
def test_each_part_of_a_partition_has_its_own_mean():
    own = {"w": schedule_free(0.1), "b": schedule_free(0.01, momentum=0.5)}
    params, state = trained(optax.partition(own, {"w": "w", "b": "b"}))
    means = averaged_params(state, params)
    for name, tx in own.items():
        alone, its_state = trained(optax.masked(tx, {n: n == name for n in PARAMS}))
        assert same_bits(means[name], averaged_params(its_state, alone)[name])


@pytest.mark.compilation
def test_runs_in_a_batch_have_a_mean_each():
    rates = jnp.array([0.1, 0.01])
    params, state = jax.vmap(lambda lr: trained(schedule_free(lr)))(rates)
    means = jax.vmap(averaged_params)(state, params)
    for i, lr in enumerate(rates):
        alone, its_state = trained(schedule_free(lr))
        expected = averaged_params(its_state, alone)
        for name in PARAMS:
            np.testing.assert_allclose(means[name][i], expected[name], rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"momentum has shape \(2,\), .*jax.vmap\(averaged_par"):
        averaged_params(state, params)


@pytest.mark.compilation
def test_the_mean_is_found_in_an_nnx_optimizer():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(schedule_free()), wrt=nnx.Param)
    for _ in range(3):
        grads = nnx.grad(lambda m: ((m(jnp.ones((4, 3))) - 1) ** 2).sum())(model)
        optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    offsets = nnx.to_pure_dict(optimizer.opt_state[0].dual_offset)
    for state in (optimizer, optimizer.opt_state, nnx.state(optimizer)):
        means = averaged_params(state, params)
        assert type(means) is type(params)
        for name, mean in nnx.to_pure_dict(means).items():
            expected = nnx.to_pure_dict(params)[name] - offsets[name] / 9
            np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)


WRONG = [
    ({"momentum": 0.0}, ValueError, "momentum=0.0 must be above 0 .*; use 0.9"),
    ({"b1": 0}, ValueError, "momentum=0.0 must be above 0 .*; use 0.9"),
    ({"momentum": optax.constant_schedule(0.9)}, TypeError, "momentum=<.* must be a plain number"),
    (
        {"momentum": jnp.array(0.9)},
        TypeError,
        "must be a plain .*; use momentum=0.9, .*static_args",
    ),
    ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be a whole number of at least 0"),
    ({"warmup_steps": 0.1}, ValueError, "warmup_steps=0.1 must be a whole number of at least 0"),
    ({"warmup_steps": True}, ValueError, "warmup_steps=True must be a whole number"),
    ({"schedule_free": 0.5}, TypeError, "schedule_free=0.5 .* must be True or False"),
    (
        {"schedule_free": False, "warmup_steps": 5},
        ValueError,
        "warmup_steps=5 needs schedule_free=True; without it use .*warmup_constant_schedule",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        madgradw(**{"schedule_free": True} | options)


def test_an_injected_momentum_is_refused():
    tx = optax.inject_hyperparams(madgradw)(0.1, schedule_free=True)
    with pytest.raises(TypeError, match=r"momentum=.*; use momentum=0.9, and name .*static_args"):
        tx.init(PARAMS)
    plain = optax.inject_hyperparams(madgradw)(0.1)  # warmup_steps is an array there
    updates, _ = jax.jit(plain.update)(PARAMS, plain.init(PARAMS), PARAMS)
    assert updates["w"][0] < 0


STATE = schedule_free().init(PARAMS)
WITHOUT = [
    (madgrad().init(PARAMS), PARAMS, "the state has no mean of the weights; pass what init() or"),
    (tuple(STATE), PARAMS, "that was restored of it as ScheduleFreeMadgradwState(*state)"),
    ([STATE, STATE], PARAMS, "has 2 means of the same parameters and must have 1; pass the state"),
    (STATE, {"w": PARAMS["w"]}, "the mean of params['b'], which params lack; pass the params that"),
    (STATE, PARAMS | {"b": jnp.ones(3)}, "of params['b'] has shape (2,), and must have (3,); pass"),
]


@pytest.mark.parametrize(("state", "params", "message"), WITHOUT)
def test_a_state_without_the_mean_is_refused(state, params, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        averaged_params(state, params)


def test_numbers_of_a_mean_that_are_no_arrays_of_jax_are_taken():
    tx = schedule_free()
    _, state = tx.update(PARAMS, STATE, PARAMS)
    expected = tx.update(PARAMS, state, PARAMS)
    for kind in (float, np.float64, np.asarray):
        numbers = {n: kind(getattr(state, n)) for n in ("largest_lr", "weight_sum", "momentum")}
        assert same_bits(tx.update(PARAMS, state._replace(**numbers), PARAMS), expected)
    for bad in (None, "1", True, jnp.ones(2)):
        with pytest.raises(ValueError, match=r"the state's weight_sum is .* must be one number;"):
            tx.update(PARAMS, state._replace(weight_sum=bad), PARAMS)
