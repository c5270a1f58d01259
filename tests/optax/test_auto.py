"""learning_rate="auto": its estimates, against the float64 oracle and on hard inputs."""

from functools import partial

import cases
import numpy as np
import oracle
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import descend, numbers, same_bits, scan, stepper  # noqa: E402

from cubegrad.optax import estimated_lr, madgrad, madgradw, xla  # noqa: E402

pytestmark = pytest.mark.compilation

STEPS = 50
SIZES = {"a": (4, 3), "b": (8,)}
WARM_UP = np.concatenate([[0.0, 0.0], np.linspace(0.1, 1.0, 10), np.full(38, 1.0)])


def random_tree(seed, scale=1.0, steps=()):
    """Float64 numbers, ten times smaller in the second leaf."""
    generator = np.random.default_rng(seed)
    return {
        name: scale * 10.0**-i * generator.standard_normal((*steps, *shape))
        for i, (name, shape) in enumerate(SIZES.items())
    }


def flat(tree):
    return np.concatenate([numbers(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def estimates(_, state):
    """What `scan` records: D_{k+1} and γ_{k+1}."""
    return state.estimate.distance, estimated_lr(state)


def madgradw_auto(**options):
    """With the oracle's defaults."""
    base = {"weight_decay": 0.0, "eps": 1e-6, "decoupled_weight_decay": False}
    return madgradw("auto", **base | options)


METHODS = {
    "madgrad": (partial(madgrad, "auto"), oracle.Estimate, oracle.Madgrad),
    "madgradw": (madgradw_auto, oracle.EstimateFreeOfScale, oracle.Madgradw),
    "schedule-free": (
        partial(madgradw_auto, schedule_free=True),
        oracle.EstimateFreeOfScale,
        oracle.ScheduleFree,
    ),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def expected_run(start, grads, factors, options, method=METHODS["madgrad"]):
    """The oracle's last parameters, D_{k+1} and γ_{k+1}; all coordinates in one vector."""
    _, kind, run = method
    estimate = kind([run(flat(start))])
    rows = np.concatenate([leaf.reshape(STEPS, -1) for leaf in jax.tree.leaves(grads)], axis=1)
    history = []
    for grad, factor in zip(rows, factors, strict=True):
        estimate.step([grad], cases.settings(options), factor)
        history.append((estimate.distance, estimate.lr))
    return estimate.runs[0].x, *np.transpose(history)


# The oracle takes one vector: where a mask differs between leaves, so does its weight_decay.
MASKED = {"weight_decay": np.repeat([0.1, 0.0], [12, 8])}
DECOUPLED = {"weight_decay": 0.01, "decoupled_weight_decay": True}
OPTIONS = {
    "plain": {},
    "no momentum": {"momentum": 0.0},
    "coupled decay, no momentum": {"weight_decay": 0.1, "momentum": 0.0},
    "masked decay": {"weight_decay": 0.1, "mask": {"a": True, "b": False}},
    "decoupled decay": DECOUPLED,
    "decoupled decay, no momentum": DECOUPLED | {"momentum": 0.0},
    "decoupled_lr, maximize": {"weight_decay": 0.01, "decoupled_lr": True, "maximize": True},
}
WITH_WARM_UP = ("coupled decay, no momentum", "decoupled decay", "decoupled_lr, maximize")


@pytest.mark.parametrize("name", OPTIONS)
@each_method
def test_50_steps_follow_the_oracle(method, name):
    options, (factory, *_) = OPTIONS[name], method
    if method is METHODS["schedule-free"] and options.get("momentum") == 0:
        pytest.skip("schedule_free=True needs momentum")
    start, grads = random_tree(0), random_tree(1, 3.0, (STEPS,))
    grads["b"] += 1.0  # a part that all gradients share lets the distance grow
    factors, schedule = np.ones(STEPS), {}
    with jax.enable_x64(True):
        if name in WITH_WARM_UP:
            factors, rates = WARM_UP, jnp.asarray(WARM_UP)
            schedule = {"lr_factor": lambda count: rates[count]}
        tx = factory(**options, **schedule)
        (params, state), (distances, gammas) = scan(tx, start, grads, estimates)
        assert {leaf.dtype.name for leaf in state.estimate} == {"float64"}
    own = MASKED if "mask" in options else options
    x, *expected = expected_run(start, grads, factors, own, method)
    assert expected[0][-1] > 2 * expected[0][0]
    np.testing.assert_allclose(distances, expected[0], rtol=1e-10)
    np.testing.assert_allclose(gammas, expected[1], rtol=1e-10)
    np.testing.assert_allclose(flat(params), x, rtol=1e-10, atol=1e-12)


@each_method
def test_float32_follows_the_oracle(method):
    start, grads = random_tree(0), random_tree(1, 3.0, (STEPS,))
    (params, state), _ = scan(method[0](), *jax.tree.map(jnp.float32, (start, grads)))
    x, *_ = expected_run(start, grads, np.ones(STEPS), {}, method)
    assert {leaf.dtype.name for leaf in state.estimate} == {"float32"}
    np.testing.assert_allclose(flat(params), x, atol=1e-5)


DATA = np.random.default_rng(5).standard_normal((64, 8))
SOLUTION = np.array([3.0, -1.0, 0.5, 0.0, 2.0, -2.5, 1.0, -0.3])


def l1(x):
    """Convex, not smooth, and 0 only at SOLUTION."""
    return jnp.abs(DATA @ (x - SOLUTION)).mean()


@pytest.mark.parametrize(("scale", "momentum"), [(1e-3, 0.9), (1e3, 0.9), (1e3, 0.0)])
def test_the_size_of_the_loss_does_not_matter(scale, momentum):
    with jax.enable_x64(True):  # in float32 roundings grow to 2e-5 along the way
        tx, start = madgrad("auto", momentum=momentum, eps=0.0), jnp.full(8, 0.1)
        smooth = [lambda x, c=c: c * ((DATA @ (x - SOLUTION)) ** 2).mean() for c in (1.0, scale)]
        (plain, _), (scaled, _) = (descend(tx, start, loss, 100)[0] for loss in smooth)
        assert jnp.abs(plain - start).max() > 0.5
        # Not the values: one of them converges to 0.
        np.testing.assert_allclose(scaled - start, plain - start, rtol=1e-11)


@pytest.mark.parametrize(("start", "momentum"), [(0.0, 0.9), (1.0, 0.0), (10.0, 0.0), (10.0, 0.9)])
def test_on_a_convex_problem_the_distance_is_never_too_large(start, momentum):
    with jax.enable_x64(True):
        x0 = jnp.full(8, start)
        _, (points, distances) = descend(
            madgrad("auto", momentum=momentum),
            x0,
            l1,
            2000,
            lambda x, state: (x, state.estimate.distance),
        )
        true = np.abs(start - SOLUTION).max()
        assert (np.diff(distances) >= 0).all()
        assert distances[-1] <= true
        assert distances[-1] > 0.1 * true
        assert l1(points.mean(0)) < 0.2 * l1(x0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nothing_moves_at_factor_zero_or_before_the_first_gradient(momentum):
    start, grad = {"w": jnp.array([1.0, -0.0, 0.0])}, {"w": jnp.array([1.0, 8.0, 27.0])}
    factors = jnp.array([1.0, 0.0, 0.0, 1.0])
    tx = madgrad("auto", momentum=momentum, lr_factor=lambda count: factors[count])
    params, state, step = start, tx.init(start), stepper(tx)
    assert estimated_lr(state) == 0
    params, state = step(params, state, {"w": jnp.zeros(3)})
    assert estimated_lr(state) == 0
    params, state = step(params, state, grad)
    np.testing.assert_allclose(state.estimate.distance, 0.02 / 3**0.5, rtol=1e-6)
    assert same_bits(params, start)
    np.testing.assert_allclose(state.estimate.gradient_scale, (1 + 4 + 9) / 3, rtol=1e-6)
    params, state = step(params, state, {"w": jnp.full(3, 1e6)})
    np.testing.assert_allclose(state.estimate.gradient_scale, (1 + 4 + 9) / 3, rtol=1e-6)
    assert same_bits(params, start)
    params, state = step(params, state, grad)
    assert (params["w"] < start["w"]).all()


def test_the_first_distance_is_at_least_1e_6():
    tx = madgrad("auto")
    _, state = stepper(tx)(jnp.zeros(3), tx.init(jnp.zeros(3)), jnp.ones(3))
    np.testing.assert_allclose(state.estimate.distance, 1e-6, rtol=1e-6)


def test_a_complex_number_is_two_coordinates():
    draw = np.random.default_rng(2)
    pairs = draw.standard_normal((11, 5, 2)).astype(np.float32)
    whole = (pairs[..., 0] + 1j * pairs[..., 1]).astype(np.complex64)
    tx = madgrad("auto", momentum=0.0, weight_decay=0.1)
    (as_pairs, _), expected = scan(tx, jnp.asarray(pairs[0]), jnp.asarray(pairs[1:]), estimates)
    (as_complex, _), found = scan(tx, jnp.asarray(whole[0]), jnp.asarray(whole[1:]), estimates)
    np.testing.assert_allclose(numbers(as_complex), as_pairs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"state_dtype": "bfloat16"}])
def test_half_precision_is_estimated_in_float32(options):
    start = jax.tree.map(lambda v: jnp.asarray(v, jnp.bfloat16), random_tree(0))
    grads = jax.tree.map(lambda v: jnp.asarray(v, jnp.bfloat16), random_tree(1, 3.0, (20,)))
    exact = jax.tree.map(lambda v: v.astype(jnp.float32), (start, grads))
    tx = madgrad("auto", **options)
    (params, state), (_, rates) = scan(tx, start, grads, estimates)
    single = madgrad("auto", momentum=options.get("momentum", 0.9))
    (expected, _), (_, expected_rates) = scan(single, *exact, estimates)
    assert {leaf.dtype.name for leaf in state.estimate} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    np.testing.assert_allclose(rates, expected_rates, rtol=0.05)
    np.testing.assert_allclose(flat(params), flat(expected), rtol=0.02, atol=2e-3)


def test_totals_are_accurate_and_larger_ignores_nan():
    many = np.random.default_rng(0).random(10_000_001, dtype=np.float32)
    exact = many.sum(dtype=np.float64)
    for shaped in (many, many[:-1].reshape(1000, 10_000)):
        np.testing.assert_allclose(jax.jit(xla.total)(shaped), exact, rtol=1e-6)
    assert xla.total(jnp.ones(300, jnp.bfloat16)) == 300
    assert xla.larger(jnp.float32(2.0), jnp.float32(jnp.nan)) == 2
    assert xla.larger(jnp.float32(2.0), jnp.float32(3.0)) == 3


def test_large_leaves_are_summed_in_chunks(monkeypatch):
    # Two of them, since JAX caches a trace by its function.
    tx, chunked = (madgrad("auto", weight_decay=0.1) for _ in range(2))
    start, grads = random_tree(0), random_tree(1, 3.0, (10,))
    many = jnp.arange(35.0).reshape(7, 5)
    with jax.enable_x64(True):
        (expected, _), expected_estimates = scan(tx, start, grads, estimates)
        assert "scan" not in str(jax.make_jaxpr(tx.update)(start, tx.init(start), start))
        monkeypatch.setattr(xla, "CHUNK", 3)  # 12 numbers are 4 chunks, 8 are 2 and a rest of 2
        assert "scan" in str(jax.make_jaxpr(chunked.update)(start, tx.init(start), start))
        (params, _), found = scan(chunked, start, grads, estimates)
        (slope,) = jax.grad(lambda x: xla.sums(lambda xp, x: (xp.total(x * x),), x)[0], (0,))(many)
    np.testing.assert_allclose(flat(params), flat(expected), rtol=1e-12)
    np.testing.assert_allclose(found, expected_estimates, rtol=1e-12)
    np.testing.assert_allclose(slope, 2 * many)


def test_finite_totals():
    terms = np.arange(24.0).reshape(3, 2, 4) - 5
    terms[0, 0, 1], terms[1, 1, 2], terms[2, 0, 3], terms[2, 1, 0] = np.nan, np.inf, np.inf, np.nan
    finite = np.isfinite(terms[2])
    found = jax.jit(xla.finite_totals)(*terms)
    np.testing.assert_array_equal(found, [term[finite].sum() for term in terms])
    scales = jnp.asarray([1.0, 2.0])
    each = jax.vmap(lambda scale: xla.finite_totals(*(scale * jnp.asarray(terms))))(scales)
    np.testing.assert_array_equal(each, np.outer(found, scales))
    last = jnp.where(finite, terms[2], jnp.nan)
    slope = jax.grad(lambda x: xla.finite_totals(x * x, last)[0])(jnp.asarray(terms[1]))
    np.testing.assert_array_equal(slope, np.where(finite, 2 * terms[1], 0.0))


def test_on_a_gpu_a_leaf_is_summed_in_one_reduction(monkeypatch):
    tx, at_once = (madgrad("auto", weight_decay=0.1) for _ in range(2))
    start, grads = random_tree(0), random_tree(1, 3.0, (10,))
    narrow = jax.tree.map(jnp.float32, start)
    lowered = (
        jax.jit(tx.update)
        .trace(narrow, tx.init(narrow), narrow)
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count(":3 = stablehlo.reduce(") == len(SIZES)
    with jax.enable_x64(True):
        (expected, _), expected_estimates = scan(tx, start, grads, estimates)
        monkeypatch.setattr(jax.lax, "platform_dependent", on_a_gpu)
        (params, _), found = scan(at_once, start, grads, estimates)
    np.testing.assert_allclose(flat(params), flat(expected), rtol=1e-12)
    np.testing.assert_allclose(found, expected_estimates, rtol=1e-12)


def on_a_gpu(*arguments, default, cuda=None, **_):
    """What jax.lax.platform_dependent computes there."""
    return (cuda or default)(*arguments)


def bowl(tx, steps, scale=1.0, damage=None, start=None):
    """The last parameters and state on the way to 3; `damage(k, grad)` may change the gradient."""
    x = {"w": jnp.linspace(-1.0, 1.0, 41, dtype=jnp.float32) if start is None else start}
    state, step = tx.init(x), stepper(tx)
    for k in range(steps):
        grad = (x["w"] - 3) * scale
        x, state = step(x, state, {"w": grad if damage is None else damage(k, grad)})
    return x["w"], state


def test_a_loss_whose_squared_gradients_overflow_trains():
    plain, _ = bowl(madgrad("auto"), 60)
    huge, state = bowl(madgrad("auto"), 60, scale=1e20)
    np.testing.assert_allclose(huge, plain, rtol=1e-3)
    assert 0 < estimated_lr(state) < np.inf


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nothing_moves_while_the_first_gradients_are_not_finite(value, momentum):
    def damage(k, grad):
        return grad.at[3].set(value) if k < 2 else grad

    tx = madgrad("auto", momentum=momentum)
    params, state = bowl(tx, 2, damage=damage)
    start = jnp.linspace(-1.0, 1.0, 41, dtype=jnp.float32)
    assert same_bits(params, start)
    assert estimated_lr(state) == 0
    assert not jnp.any(state.grad_sq_sum["w"])
    moved, state = bowl(tx, 40, damage=damage)
    assert jnp.isfinite(moved).all()
    assert (moved > start).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_coordinate_that_is_not_finite_does_not_stop_the_estimate(value):
    def damage(k, grad):
        return grad.at[3].set(value) if k == 2 else grad

    _, damaged = bowl(madgrad("auto"), 3, damage=damage)
    moved, state = bowl(madgrad("auto"), 40, damage=damage)
    _, undamaged = bowl(madgrad("auto"), 40)
    assert estimated_lr(state) > 2 * estimated_lr(damaged)
    np.testing.assert_allclose(estimated_lr(state), estimated_lr(undamaged), rtol=0.2)
    assert jnp.isfinite(jnp.delete(moved, 3)).all()


@pytest.mark.parametrize("damaged", [np.nan, 0.0])
def test_the_distance_never_falls(damaged):
    """Neither when all of ν is NaN, nor when the scale of the gradients overflows."""
    tx, x = madgrad("auto"), jnp.linspace(-1.0, 1.0, 41, dtype=jnp.float32)
    state, step, distances = tx.init(x), stepper(tx), []
    for k in range(30):
        grad = (x - 3) * jnp.float32(10.0 ** min(3 * k, 37) if damaged == 0 else 1.0)
        x, state = step(x, state, jnp.full_like(x, damaged) if damaged and k == 9 else grad)
        distances.append(float(state.estimate.distance))
    assert distances == sorted(distances)
    assert distances[0] > 0


def test_a_weight_without_a_gradient_does_not_enter_the_first_distance():
    results = []
    for last in (1e30, 0.15):
        start = jnp.array([0.1, 0.2, last], jnp.float32)
        moved, state = bowl(madgrad("auto"), 20, damage=lambda _, g: g.at[2].set(0), start=start)
        assert moved[2] == start[2]
        results.append((*moved[:2].tolist(), float(estimated_lr(state))))
    assert results[0] == pytest.approx(results[1], rel=1e-5)
