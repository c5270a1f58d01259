"""What optax expects of any transformation: arguments, wrappers, dtypes, convergence."""

import typing
from inspect import signature

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_cases import (  # noqa: E402
    VARIANTS,
    WRAPPERS,
    descend,
    each_variant,
    injected,
    same_bits,
)

from cubegrad.optax import madgrad, madgradw, mirror_madgrad  # noqa: E402

PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.ones(())}
GRADS = {"w": jnp.array([1.0, -0.5, 0.25]), "b": jnp.full((), 2.0)}


WRAPPED = [(variant, "alone") for variant in VARIANTS]
WRAPPED += [(v, w) for v in ("madgrad", "madgrad, estimated") for w in WRAPPERS if w != "alone"]
WRAPPED += [(variant, "inject_hyperparams") for variant in ("madgrad", "madgrad, estimated")]


@pytest.mark.compilation
@pytest.mark.parametrize(("variant", "wrapper"), WRAPPED)
def test_extra_arguments_are_ignored(variant, wrapper):
    """A training loop passes the loss to every optimizer, for those that use it."""
    if wrapper == "inject_hyperparams":
        tx = injected(variant)
    else:
        tx = WRAPPERS[wrapper](VARIANTS[variant]())
    state = tx.init(PARAMS)
    plain = jax.jit(tx.update)(GRADS, state, PARAMS)
    extra = {"value": jnp.ones(()), "unknown": {"a": 1.0}}
    assert same_bits(plain, jax.jit(tx.update)(GRADS, state, PARAMS, **extra))
    assert not same_bits(plain[0], jax.tree.map(jnp.zeros_like, PARAMS))


@each_variant
def test_the_class_is_the_one_with_extra_arguments(variant):
    """optax's wrappers drop the extra arguments for any other class."""
    assert isinstance(VARIANTS[variant](), optax.GradientTransformationExtraArgs)


@pytest.mark.compilation
def test_the_next_member_of_a_chain_gets_the_loss():
    tx = optax.chain(madgrad(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    state = tx.init(PARAMS)
    for _ in range(4):
        _, state = tx.update(GRADS, state, PARAMS, value=jnp.ones(()))
    assert state[1].scale < 1


def test_the_learning_rate_is_annotated_as_in_optax():
    def annotation(factory):
        return signature(factory).parameters["learning_rate"].annotation

    optaxes = annotation(optax.adam)
    assert annotation(mirror_madgrad) == optaxes
    auto = typing.Literal["auto"]
    assert annotation(madgrad) == annotation(madgradw)
    assert set(typing.get_args(annotation(madgrad))) == {*typing.get_args(optaxes), auto}


@each_variant
def test_a_constant_schedule_equals_the_number(variant):
    number, schedule = VARIANTS[variant](0.3), VARIANTS[variant](optax.constant_schedule(0.3))
    plain = number.update(GRADS, number.init(PARAMS), PARAMS)[0]
    scheduled = schedule.update(GRADS, schedule.init(PARAMS), PARAMS)[0]
    for name in PARAMS:
        np.testing.assert_allclose(scheduled[name], plain[name], rtol=1e-6)


@each_variant
def test_a_state_that_is_a_plain_tuple_is_taken(variant):
    """As a checkpoint that was saved without its classes is restored."""
    tx = VARIANTS[variant]()
    state = tx.init(PARAMS)
    expected, plain = tx.update(GRADS, state, PARAMS), tx.update(GRADS, tuple(state), PARAMS)
    assert jax.tree.all(jax.tree.map(same_bits, plain, expected))
    assert type(plain[1]) is type(state)


@each_variant
def test_params_are_required(variant):
    tx = VARIANTS[variant]()
    with pytest.raises(ValueError, match="params=None"):
        tx.update(GRADS, tx.init(PARAMS))


NUMBERS = ("learning_rate", "momentum", "weight_decay", "eps")


@pytest.mark.parametrize("name", ["lr_factor", *NUMBERS])
def test_a_string_is_refused_as_a_number(name):
    options = {"learning_rate": "auto"} if name == "lr_factor" else {}
    with pytest.raises(TypeError, match=f"{name}='0.5'.* must be one number"):
        madgrad(**options, **{name: "0.5"})


def parabola(dtype):
    goal = jnp.array([1.0, -1.0, 1.0], dtype)
    if jnp.iscomplexobj(goal):
        goal = goal * (1 - 0.5j)
    return jnp.array([-1.0, 5.0, 1.0], dtype), goal, lambda p: (abs(p - goal) ** 2).sum()


def rosenbrock(dtype):
    def loss(p):
        return abs(1 - p[0]) ** 2 + 100 * abs(p[1] - p[0] ** 2) ** 2

    return jnp.zeros(2, dtype), jnp.ones(2, dtype), loss


def trees(dtype):
    """Leaves of different ranks."""
    goal = (jnp.array([1.0, -1.0, 2.0], dtype), jnp.array([[1.0, 0.0], [-1.0, 1.0]], dtype))

    def loss(p):
        return sum((abs(a - b) ** 2).sum() for a, b in zip(p, goal, strict=True))

    return jax.tree.map(jnp.zeros_like, goal), goal, loss


# Without momentum no step is small enough for the valley: after 30,000 steps ours is where
# optax.contrib.madgrad(1e-2, momentum=0) is, at (0.126, 0.101).
CONVERGE = [(v, p) for v in VARIANTS for p in (parabola, rosenbrock, trees)]
CONVERGE.remove(("madgrad, no momentum", rosenbrock))
# A mean of all z forgets a first one that is far away only as 1/k.
CONVERGE = [(v, p) for v, p in CONVERGE if "schedule-free" not in v or p is trees]


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize(("variant", "problem"), CONVERGE)
def test_it_converges(variant, problem, dtype):
    start, goal, loss = problem(dtype)
    peak = 1.0 if "estimated" in variant else 0.02
    tx = VARIANTS[variant](optax.linear_schedule(peak, 0.0, 5000))
    (params, _), _ = descend(tx, start, loss, 5000)
    for param, expected in zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True):
        assert param.dtype == dtype
        np.testing.assert_allclose(param, expected, atol=1e-3)


@each_variant
def test_no_type_is_weak_and_the_second_step_compiles_nothing(variant):
    """A weak type would become a strong one in the first step, and jit would compile again."""
    weak = {"w": PARAMS["w"], "b": jnp.asarray(1.0)}
    assert weak["b"].weak_type
    tx = VARIANTS[variant]()
    step = jax.jit(tx.update)
    for init in (tx.init, jax.jit(tx.init)):
        state = init(weak)
        for _ in range(2):
            assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
            updates, state = step(GRADS, state, PARAMS)
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(updates))
    assert step._cache_size() == 1


DTYPES = [(d, d) for d in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")]
DTYPES += [("bfloat16", "float32"), ("float32", "bfloat16")]


@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES)
@each_variant
def test_dtypes_and_shapes_do_not_change(variant, dtype, grad_dtype):
    """lax.cond requires that its branches agree in both."""
    with jax.enable_x64(dtype in ("float64", "complex128")):
        tx = VARIANTS[variant]()
        params = jnp.array([1.0, 2.0], dtype)
        state, grads = tx.init(params), params.astype(grad_dtype)
        step = jax.jit(
            lambda take: lax.cond(
                take, lambda: tx.update(grads, state, params), lambda: (params, state)
            )
        )
        updates, new_state = step(True)
        assert updates.dtype == params.dtype
        assert new_state.count == 1
        assert same_bits(step(False)[1], state)


@each_variant
def test_a_state_can_be_made_from_shapes_and_mapped_over(variant):
    """Sums start at 0, and optax knows which parameter each buffer belongs to."""
    tx = VARIANTS[variant]()
    state = tx.init(PARAMS)
    shapes = jax.eval_shape(tx.init, PARAMS)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for name in {"grad_sum", "grad_sq_sum"} & set(state._fields):
        assert all(not leaf.any() for leaf in jax.tree.leaves(getattr(state, name)))
    same = optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, state)
    assert same_bits(same, state)
    marked = optax.tree_utils.tree_map_params(
        tx,
        lambda leaf, param: leaf if leaf is None else leaf.shape == param.shape,
        state,
        PARAMS,
        transform_non_params=lambda _: None,
        is_leaf=lambda leaf: leaf is None,  # x_0 where it is not kept
    )
    buffers = jax.tree.leaves(marked)
    assert all(buffers)
    assert len(buffers) == (6 if "estimated" in variant or variant == "madgrad" else 4)


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@each_variant
def test_multi_steps_steps_with_the_mean_gradient(variant, dtype):
    tx = VARIANTS[variant]()
    accumulated = optax.MultiSteps(tx, every_k_schedule=2)
    params = jnp.array([1.0, 2.0], dtype)
    state = accumulated.init(params)
    first, state = accumulated.update(params * 0.5, state, params)
    assert not first.any()
    second, _ = accumulated.update(params * 1.5, state, params)
    at_once, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(
        second.astype(jnp.float32), at_once.astype(jnp.float32), rtol=2.0**-7
    )


def three_steps(init, update):
    params, state = PARAMS, init(PARAMS)
    for _ in range(3):
        updates, state = update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.compilation
@each_variant
def test_injected_hyperparams_take_the_same_steps(variant):
    plain = VARIANTS[variant](None if "estimated" in variant else 0.1)
    expected, params = (
        three_steps(jax.jit(tx.init), jax.jit(tx.update)) for tx in (plain, injected(variant))
    )
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)


@pytest.mark.compilation
@each_variant
def test_a_compiled_update_takes_the_same_steps(variant):
    tx = VARIANTS[variant](weight_decay=0.1)
    expected, params = (three_steps(tx.init, update) for update in (tx.update, jax.jit(tx.update)))
    for name in PARAMS:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.compilation
def test_flax_nnx_passes_the_loss():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, madgrad(0.1), wrt=nnx.Param)
    loss, grads = nnx.value_and_grad(lambda m: (m(jnp.ones(3)) ** 2).sum())(model)
    optimizer.update(model, grads, value=loss)
    assert (model(jnp.ones(3)) ** 2).sum() < loss
