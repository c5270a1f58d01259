"""compact=True: what it keeps, and that JAX users can do with it what they do without."""

import pickle

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import WRAPPERS, build, descend, each_method, randn, same_bits, stepper  # noqa: E402

from cubegrad.optax import (  # noqa: E402
    CompactAutoMadgradState,
    CompactAutoMadgradwState,
    CompactAutoScheduleFreeMadgradwState,
    CompactMadgradState,
    CompactMadgradwState,
    CompactMirrorMadgradState,
    CompactScheduleFreeMadgradwState,
    MadgradState,
    estimated_lr,
    madgrad,
    madgradw,
    mirror_madgrad,
)

VARIANTS = {
    "madgrad": lambda lr=0.01, **options: madgrad(lr, compact=True, **options),
    "no momentum": lambda lr=0.01, **options: madgrad(lr, momentum=0.0, compact=True, **options),
    "estimated": lambda lr=None, **options: madgrad("auto", lr_factor=lr, compact=True, **options),
    "mirror": lambda lr=0.01, **options: mirror_madgrad(lr, compact=True, **options),
    "madgradw": lambda lr=0.01, **options: madgradw(lr, compact=True, **options),
    "schedule-free": lambda lr=0.01, **options: madgradw(
        lr, compact=True, schedule_free=True, **options
    ),
    "madgradw, estimated": lambda lr=None, **options: madgradw(
        "auto", lr_factor=lr, compact=True, **options
    ),
    "schedule-free, estimated": lambda lr=None, **options: madgradw(
        "auto", lr_factor=lr, compact=True, schedule_free=True, **options
    ),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)
SHAPE = (64, 100)


def params_and_grads(seed=0, dtype="float32"):
    """A parameter with codes and one that is too small for them."""
    shapes = {"w": SHAPE, "b": (3,)}
    return (
        {name: randn(shape, dtype, seed + i) for i, (name, shape) in enumerate(shapes.items())},
        {name: randn(shape, dtype, seed + 7 + i) for i, (name, shape) in enumerate(shapes.items())},
    )


BYTES = {"madgrad": 4.2, "no momentum": 3.2, "estimated": 4.2, "mirror": 2.2, "madgradw": 2.2}
BYTES |= {"schedule-free": 2.2, "madgradw, estimated": 4.2, "schedule-free, estimated": 4.2}
TYPES = {
    "madgrad": CompactMadgradState,
    "no momentum": CompactMadgradState,
    "estimated": CompactAutoMadgradState,
    "mirror": CompactMirrorMadgradState,
    "madgradw": CompactMadgradwState,
    "schedule-free": CompactScheduleFreeMadgradwState,
    "madgradw, estimated": CompactAutoMadgradwState,
    "schedule-free, estimated": CompactAutoScheduleFreeMadgradwState,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_variant
def test_bytes_of_state(variant, dtype):
    tx, param = VARIANTS[variant](), jnp.ones((64, 64), dtype)
    state = tx.init({"w": param})
    assert type(state) is TYPES[variant]
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)
    assert kept <= BYTES[variant] * param.size


@pytest.mark.parametrize("shape", [(64, 63), (4096,), (65, 63), (2, 1024)])
def test_small_parameters_keep_their_sums(shape):
    params = jnp.ones(shape)
    tx, plain = madgrad(0.1, compact=True, state_dtype="bfloat16"), madgrad(0.1)
    state = tx.init(params)
    assert state.root_code is None
    assert state.grad_sum.dtype == jnp.bfloat16  # state_dtype is for these
    tx = madgrad(0.1, compact=True)
    updates, state = tx.update(params, tx.init(params), params)
    expected, expected_state = plain.update(params, plain.init(params), params)
    assert same_bits((updates, state[:4]), (expected, expected_state))
    assert MadgradState._fields == state._fields[:4]


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@each_variant
def test_lr_zero_moves_no_bit(variant, dtype):
    tx = VARIANTS[variant](lambda _: jnp.float32(0.0))
    params, grads = params_and_grads(0, dtype)
    params["w"] = params["w"].at[0, :2].set(jnp.array([0.0, -0.0], dtype))
    moved, state = stepper(tx)(params, tx.init(params), grads)
    assert same_bits(moved, params)
    assert state.count == 1


@pytest.mark.compilation
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@each_method
def test_a_gradient_that_is_not_finite_stays_in_its_coordinate(method, bad):
    params, grads = params_and_grads()
    spoilt = {**grads, "w": grads["w"].at[2, 3].set(bad)}
    tx = build(method, {"eps": 0.0, "compact": True})
    step = stepper(tx)
    ours, state = step(params, tx.init(params), spoilt)
    expected, _ = step(params, tx.init(params), grads)
    same = np.asarray(ours["w"] == expected["w"])
    assert same.sum() >= same.size - 1
    assert np.isfinite(state.offset_scale["w"]).all()
    assert np.isfinite(state.root_scale["w"]).all()


@pytest.mark.compilation
@each_variant
def test_parameters_and_state_are_donated_and_reused(variant):
    tx = VARIANTS[variant]()
    params = {"w": jnp.ones((1024, 256)), "half": jnp.ones((64, 256), jnp.bfloat16)}
    state, step = tx.init(params), stepper(tx, donate_argnums=(0, 1))
    memory = step.lower(params, state, params).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert memory.alias_size_in_bytes == size
    for _ in range(2):
        old = jax.tree.leaves((params, state))
        params, state = step(params, state, jax.tree.map(jnp.ones_like, params))
        assert all(leaf.is_deleted() for leaf in old)
    assert (params["w"] < 1).all()


@pytest.mark.compilation
@each_variant
def test_temporary_memory_does_not_grow_with_the_parameter(variant):
    """The moves take the memory of the gradients, if that is free.

    An estimated rate has a copy of them: until there is a first estimate, they count as 0.
    """
    if jax.default_backend() != "cpu":
        pytest.skip("XLA fuses the step on other devices")
    tx, used = VARIANTS[variant](), []
    for rows in (1024, 4096):
        params = jnp.ones((rows, 256))
        update = jax.jit(tx.update, donate_argnums=(0, 1))
        compiled = update.lower(params, tx.init(params), params).compile()
        used.append(compiled.memory_analysis().temp_size_in_bytes)
    limit = 4.1 if "estimated" in variant else 0.1  # bytes a parameter
    assert used[1] - used[0] <= 256 * 3072 * limit


@pytest.mark.compilation
@pytest.mark.parametrize("save", [pickle, None])
@each_variant
def test_a_resumed_run_equals_an_uninterrupted_one(variant, save):
    tx = VARIANTS[variant]()
    params, grads = params_and_grads(0, "bfloat16")
    state, step = tx.init(params), stepper(tx)
    params, state = step(params, state, grads)
    saved = pickle.loads(pickle.dumps(state)) if save else tuple(state)  # without its class
    expected = step(params, state, grads)
    resumed = step(params, saved, grads)
    assert same_bits(resumed, expected)
    assert type(resumed[1]) is type(state)


@pytest.mark.compilation
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_works_inside_a_wrapper(wrapper):
    tx = WRAPPERS[wrapper](VARIANTS["estimated"]())
    params, grads = params_and_grads()
    state = tx.init(params)
    moved, state = stepper(tx)(params, state, grads)
    assert not same_bits(moved["w"], params["w"])
    assert estimated_lr(state) > 0


@pytest.mark.compilation
def test_injected_numbers_keep_the_offset_and_take_the_same_steps():
    params, grads = params_and_grads()
    tx = optax.inject_hyperparams(madgrad, static_args=("compact",))(0.01, compact=True)
    plain = VARIANTS["madgrad"]()
    moved, state = stepper(tx)(params, tx.init(params), grads)
    expected, _ = stepper(plain)(params, plain.init(params), grads)
    np.testing.assert_allclose(moved["w"], expected["w"], rtol=0, atol=1e-6)
    assert state.inner_state.offset_code["w"].dtype == jnp.int8


@pytest.mark.compilation
@each_variant
def test_training_comes_as_far_as_without_codes(variant):
    goal = randn(SHAPE, "float32", 5)

    def loss(params):
        return ((params["w"] - goal) ** 2).sum() + (params["b"] ** 2).sum()

    params, _ = params_and_grads()
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 3e-3)):
        start = jax.tree.map(lambda p, dtype=dtype: p.astype(dtype), params)
        rate = optax.linear_schedule(1.0 if "estimated" in variant else 0.1, 0, 300)
        tx = VARIANTS[variant](0.1 if variant == "schedule-free" else rate)
        (final, state), _ = descend(tx, start, loss, 300)
        assert final["w"].dtype == dtype
        assert state.count == 300
        assert loss(final) <= limit * loss(params)


@pytest.mark.compilation
def test_runs_in_a_batch_equal_runs_alone():
    tx = VARIANTS["madgrad"](0.1)
    starts = jnp.stack([randn(SHAPE, "float32", seed) for seed in (0, 1)])

    def final(start):
        return descend(tx, start, lambda x: (x**2).sum(), 5)[0][0]

    together = jax.vmap(final)(starts)
    for start, found in zip(starts, together, strict=True):
        # One code that is rounded the other way moves x by a hundredth of a step.
        np.testing.assert_allclose(found, final(start), rtol=0, atol=1e-3)


@pytest.mark.compilation
def test_the_mask_selects_what_decays():
    params, grads = params_and_grads()
    tx = VARIANTS["madgrad"](weight_decay=0.5, decoupled_weight_decay=True, mask={"w": 0, "b": 1})
    plain = VARIANTS["madgrad"]()
    decayed, state = tx.update(grads, tx.init(params), params)
    expected, _ = plain.update(grads, plain.init(params), params)
    assert same_bits(decayed["w"], expected["w"])
    assert not same_bits(decayed["b"], expected["b"])
    assert same_bits(state.initial_scale["w"], tx.init(params).initial_scale["w"])


def test_a_parameter_of_another_dtype_than_its_state_is_refused():
    tx, params = VARIANTS["madgrad"](), jnp.ones(SHAPE, jnp.bfloat16)
    state, wide = tx.init(params), params.astype(jnp.float32)
    with pytest.raises(ValueError, match=r"is float32, and must .* bfloat16; use optax.apply_upd"):
        tx.update(wide, state, wide)


@pytest.mark.compilation
@each_variant
def test_a_state_is_the_same_from_jit_and_from_shapes(variant):
    tx, (params, _) = VARIANTS[variant](), params_and_grads()
    state, shapes = tx.init(params), jax.eval_shape(tx.init, params)
    assert same_bits(jax.jit(tx.init)(params), state)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert same_bits(optax.tree_utils.tree_map_params(tx, lambda leaf: leaf, state), state)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(set(buffers)) == len(buffers)


@pytest.mark.compilation
@each_variant
def test_no_code_becomes_wider_with_float64_enabled(variant):
    with jax.enable_x64(True):
        tx, (params, grads) = VARIANTS[variant](), params_and_grads()
        state = tx.init(params)
        updates, new = jax.jit(tx.update)(grads, state, params)
        assert updates["w"].dtype == jnp.float32
        assert jax.tree.map(lambda a: a.dtype, new) == jax.tree.map(lambda a: a.dtype, state)


def test_a_tree_that_stays_uncoded_is_warned_of():
    tree = {"narrow": jnp.ones((2**16, 32)), "long": jnp.ones((64, 256))}
    with pytest.warns(UserWarning, match=r"rows of less than 64, such as params\['narrow'\]"):
        madgrad(compact=True).init(tree)
    assert madgrad().init(tree).count == 0  # warnings are errors here
    assert madgrad(compact=True).init({**tree, "large": jnp.ones((2**11, 2**10))}).count == 0
