"""The edge cases of tests/optim/test_semantics.py, for JAX."""

import cases
import numpy as np
import pytest
from cases import MADGRAD

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax_cases  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_cases import build, each_method, randn, run, same_bits, stepper  # noqa: E402

from cubegrad import optax as cubegrad_optax  # noqa: E402


def sequence(*values):
    """A schedule of these values, one for each step."""
    return lambda count: jnp.asarray(values)[count]


@pytest.mark.compilation
@pytest.mark.parametrize(
    "decay",
    [
        {},
        pytest.param({"weight_decay": 0.1}, marks=pytest.mark.thorough),
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_method
def test_a_first_step_at_lr_zero_moves_no_bit(method, momentum, decay):
    with jax.enable_x64(True):
        zeros = jnp.array([0.0, -0.0])
        params = {d: randn((50,), d, 0).at[:2].set(zeros.astype(d)) for d in jax_cases.DTYPES}
        grads = {d: (randn((50,), d, 1) * 100).astype(d) for d in jax_cases.DTYPES}
        lr = 0.0 if momentum else sequence(0.0)
        tx = build(method, {"lr": lr, "momentum": momentum, **decay})
        new_params, state = run(tx, params, [grads])
        assert same_bits(new_params, params)
        assert state.count == 1


def test_later_lr_zero_leaves_the_sums_alone_and_averages_towards_z():
    tx = build(MADGRAD, {"lr": sequence(*[0.1] * 5, 0.0)})
    grads = [randn((20,), "float32", k) for k in range(6)]
    params, state = run(tx, randn((20,), "float32", 9), grads[:5])
    judge = MADGRAD.oracle(np.array(params))
    judge.s, judge.nu, judge.x0 = (np.float64(buffer) for buffer in state[1:])
    z = judge.x0 - judge.displacement(1e-6)
    averaged, new_state = stepper(tx)(params, state, grads[5])
    assert same_bits(state[1:], new_state[1:])
    ratio = np.linalg.norm(averaged - z) / np.linalg.norm(params - z)
    assert ratio == pytest.approx(0.9, abs=1e-4)


def test_without_momentum_lr_zero_or_no_gradient_moves_no_bit():
    """Fused to one rounding, the difference of two equal displacements would not be 0."""
    tx = build(MADGRAD, {"lr": sequence(0.1, 0.1, 0.1, 0.0, 0.1), "momentum": 0.0})
    grads = [randn((2000,), "float32", k) for k in range(3)]
    params, state = run(tx, randn((2000,), "float32", 9), grads)
    step = stepper(tx)
    at_lr_zero, state = step(params, state, grads[0])
    assert same_bits(at_lr_zero, params)
    without_gradient, _ = step(params, state, jnp.zeros(2000))
    assert same_bits(without_gradient, params)


@pytest.mark.compilation
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_method
def test_a_zero_denominator_keeps_the_coordinate_in_place(method, momentum):
    start, grad = randn((4,), "float32", 0), jnp.array([0.0, 1e-30, 1e-42, 0.5])
    params, state = run(build(method, {"eps": 0.0, "momentum": momentum}), start, [grad] * 3)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((params, state)))
    assert same_bits(params[:3], start[:3])
    assert params[3] < start[3]


def test_eps_too_small_to_invert_is_not_a_nan():
    start = randn((3,), "float32", 0)
    params, _ = run(build(MADGRAD, {"eps": 1e-42}), start, [jnp.array([0.0, 1e-30, 1.0])])
    assert same_bits(params[:2], start[:2])
    assert params[2] < start[2]


def test_an_infinite_denominator_is_not_a_nan():
    start = jnp.ones(2)
    params, _ = run(build(MADGRAD, {}), start, [jnp.array([1e25, 1.0])] * 2)
    assert params[0] == 1
    assert params[1] < 1


@each_method
def test_gradients_survive_a_step_that_donates_the_rest(method):
    tx = build(method, {"weight_decay": 0.1, "maximize": True})
    grads = randn((20,), "float32", 3)
    kept = np.array(grads)
    params = randn((20,), "float32", 0)
    stepper(tx, donate_argnums=(0, 1))(params, tx.init(params), grads)
    assert params.is_deleted()
    assert same_bits(grads, kept)


def test_no_momentum_keeps_no_initial_param():
    tx = build(MADGRAD, {"momentum": 0.0})
    params = {"a": jnp.ones(3), "half": jnp.ones(3, jnp.bfloat16)}
    _, state = run(tx, params, [params])
    assert state.initial_param["a"] is None
    assert state.initial_param["half"].dtype == jnp.float32
    kept = build(MADGRAD, {"momentum": jnp.float32(0.0)}).init(params)  # an array may change
    assert kept.initial_param["a"].shape == (3,)


@pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.3, "decoupled_weight_decay": True}])
def test_momentum_switched_off_and_on_follows_the_oracle(decay):
    with jax.enable_x64(True):
        momenta = [[0.0, 0.9, 0.0, 0.5][k // 15] for k in range(60)]
        params = randn((30,), "float64", 0)
        judge = MADGRAD.oracle(np.array(params))
        tx = build(MADGRAD, decay | {"momentum": sequence(*momenta)})
        state, step = tx.init(params), stepper(tx)
        for k, momentum in enumerate(momenta):
            grad = randn((30,), "float64", k)
            params, state = step(params, state, grad)
            judge.step(np.array(grad), cases.settings(decay | {"momentum": momentum}))
            np.testing.assert_allclose(params, judge.x, rtol=0, atol=1e-12)


@pytest.mark.compilation
@each_method
def test_each_group_counts_its_own_steps(method):
    """A group that starts late starts at k = 0, with its weights at that time as x_0."""
    with jax.enable_x64(True):
        params = {name: randn((6,), "float64", i) for i, name in enumerate(("early", "late"))}
        judges = {}
        tx = build(method, {})
        group = {name: optax.masked(tx, {n: n == name for n in params}) for name in params}
        states, step = {}, {name: stepper(optax.chain(group[name], only(name))) for name in params}
        for k in range(10):
            if k == 4:
                params["late"] = params["late"] * 3
            for i, name in enumerate(params if k >= 4 else ["early"]):
                judges.setdefault(name, method.oracle(np.array(params[name])))
                states.setdefault(name, optax.chain(group[name], only(name)).init(params))
                grads = {n: randn((6,), "float64", 100 * i + k) for n in params}
                params, states[name] = step[name](params, states[name], grads)
                judges[name].step(np.array(grads[name]), cases.settings({}))
        counts = {name: int(state[0].inner_state.count) for name, state in states.items()}
        assert counts == {"early": 10, "late": 6}
        for name, judge in judges.items():
            np.testing.assert_allclose(params[name], judge.x, rtol=0, atol=1e-12)


def only(name):
    """Set the updates of all other parameters to 0."""
    return optax.masked(optax.set_to_zero(), lambda tree: {n: n != name for n in tree})


@pytest.mark.parametrize("compiled", [False, True])
@each_method
def test_the_starting_point_is_a_copy(method, compiled):
    tx = build(method, {})
    params = jnp.arange(6.0)
    state = (jax.jit(tx.init) if compiled else tx.init)(params)
    point = state[-1]
    assert same_bits(point, jnp.zeros(6) if method.rule.relative else params)
    assert point.unsafe_buffer_pointer() != params.unsafe_buffer_pointer()


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@each_method
def test_half_precision_keeps_float32_state(method, dtype):
    start = randn((10,), dtype, 0)
    params, state = run(build(method, {}), start, [jnp.full(10, 300, dtype)])  # 300² overflows
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state[1:])} == {"float32"}
    assert params.dtype == dtype
    assert jnp.isfinite(params).all()
    assert not (params == start).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_without_momentum_loses_no_small_move(dtype):
    """Each move is below the last place of x and would be lost if added to the rounded x."""
    options = {"lr": 1e-4, "momentum": 0.0}
    judge, ones = MADGRAD.oracle(np.ones(1)), jnp.ones(1, dtype)
    params, _ = run(build(MADGRAD, options), ones, [ones] * 60)
    for _ in range(60):
        judge.step(np.ones(1), cases.settings(options))
    assert judge.x[0] < 0.95
    assert float(params[0]) == pytest.approx(judge.x[0], rel=2.0**-7)


def test_mirror_defaults_to_no_eps():
    params, state = run(cubegrad_optax.mirror_madgrad(), jnp.ones(2), [jnp.array([0.0, 1.0])])
    assert state._fields == ("count", "grad_sq_sum", "z")
    assert params.tolist() == pytest.approx([1.0, 1 - 0.1 * 1e-2])
