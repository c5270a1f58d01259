"""`madgrad(learning_rate="auto")`: the estimate, against its formulas and in JAX's habits."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_cases import numbers, same_bits, stepper  # noqa: E402

from cubegrad.optax import (  # noqa: E402
    AutoMadgradState,
    Estimate,
    MadgradState,
    estimated_lr,
    madgrad,
    mirror_madgrad,
    xla,
)

pytestmark = pytest.mark.compilation

STEPS = 50
SIZES = {"a": (4, 3), "b": (8,)}
FACTORS = np.concatenate([[0.0, 0.0], np.linspace(0.1, 1.0, 10), np.full(38, 1.0)])


def drawn(seed, scale=1.0, steps=()):
    """A tree of float64 numbers, of a size of its own in each leaf."""
    draw = np.random.default_rng(seed)
    return {
        name: scale * 10.0**-i * draw.standard_normal((*steps, *shape))
        for i, (name, shape) in enumerate(SIZES.items())
    }


def flat(tree):
    return np.concatenate([numbers(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def reference(x0, grads, factors, momentum=0.9, decay=0.0, shrink=None, sign=1.0):
    """The formulas in numpy, all coordinates in one vector; decay may differ between them.

    `shrink(γ, factor)` is what decoupled decay multiplies by.
    """
    x, origin, s, v = x0.copy(), x0.copy(), np.zeros_like(x0), np.zeros_like(x0)
    moved = (sign * grads[0] + decay * x0) != 0
    distance, agreement, weights = max(0.02 * np.sqrt(np.mean(x0[moved] ** 2)), 1e-6), 0.0, 0.0
    seen = []
    for k, (grad, factor) in enumerate(zip(grads, factors, strict=True)):
        g = sign * grad + decay * x
        if k == 0:
            scale = np.mean(np.abs(g) ** (2 / 3))  # H^{2/3}
        elif weights > 0:
            scale = np.mean(np.cbrt(v)) / np.cbrt(weights)
        gamma = distance**1.5 / np.sqrt(scale**1.5)
        seen.append((distance, gamma))
        weight = factor * gamma * np.sqrt(k + 1)
        rho = 1.0 if shrink is None else shrink(gamma, factor)
        agreement = rho * agreement + weight * sign * grad @ (origin - x)
        x, origin, s = rho * x, rho * origin, rho * s
        s, v, weights = s + weight * g, v + weight * g * g, weights + weight
        u = s / (np.cbrt(v) + 1e-6)
        if weight > 0:
            distance = max(distance, agreement / np.sqrt(s @ u * np.cbrt(v).sum()))
        x = momentum * x + (1 - momentum) * (origin - u)
    return x, np.array(seen)


def scanned(tx, params, grads):
    """The last parameters and state; D_k and γ_{k+1} of each step."""

    def body(carry, grad):
        params, state = carry
        updates, later = tx.update(grad, state, params)
        # Before the first gradient there is no D; after the first step it is still D_0.
        distance = jnp.where(state.estimate.distance > 0, state.estimate[0], later.estimate[0])
        seen = distance, estimated_lr(later)
        return (optax.apply_updates(params, updates), later), seen

    return jax.jit(lambda *carry: lax.scan(body, carry, grads))(params, tx.init(params))


CASES = {
    "plain": ({}, {}),
    "no momentum": ({"momentum": 0.0}, {"momentum": 0.0}),
    "coupled decay, no momentum": (
        {"weight_decay": 0.1, "momentum": 0.0},
        {"decay": 0.1, "momentum": 0.0},
    ),
    "some decay": (
        {"weight_decay": 0.1, "mask": {"a": True, "b": False}},
        {"decay": np.repeat([0.1, 0.0], [12, 8])},
    ),
    "decoupled decay": (
        {"weight_decay": 0.01, "decoupled_weight_decay": True},
        {"shrink": lambda gamma, factor: max(1 - 0.01 * gamma * factor, 0.0)},
    ),
    "decoupled decay, no momentum": (
        {"weight_decay": 0.01, "decoupled_weight_decay": True, "momentum": 0.0},
        {"shrink": lambda gamma, factor: max(1 - 0.01 * gamma * factor, 0.0), "momentum": 0.0},
    ),
    "decay apart from lr, maximize": (
        {"weight_decay": 0.01, "decoupled_lr": True, "maximize": True},
        {"shrink": lambda _, factor: 1 - 0.01 * factor, "sign": -1.0},
    ),
}
WARM_UPS = ("coupled decay, no momentum", "decoupled decay", "decay apart from lr, maximize")


@pytest.mark.parametrize("case", CASES)
def test_50_steps_are_those_of_the_formulas(case):
    options, expected = CASES[case]
    warm_up = case in WARM_UPS
    factors = FACTORS if warm_up else np.ones(STEPS)
    start, grads = drawn(0), drawn(1, 3.0, (STEPS,))
    grads["b"] += 1.0  # what agrees from step to step lets the distance grow
    with jax.enable_x64(True):
        rates = jnp.asarray(factors)
        schedule = {"lr_factor": lambda count: rates[count]} if warm_up else {}
        tx = madgrad("auto", **options, **schedule)
        (params, state), (distances, gammas) = scanned(tx, start, grads)
        assert {leaf.dtype.name for leaf in state.estimate} == {"float64"}
    rows = np.concatenate([leaf.reshape(STEPS, -1) for leaf in jax.tree.leaves(grads)], axis=1)
    x, seen = reference(flat(start), rows, factors, **expected)
    assert seen[-1, 0] > 2 * seen[0, 0]
    np.testing.assert_allclose(distances, seen[:, 0], rtol=1e-10)
    np.testing.assert_allclose(gammas[:-1], seen[1:, 1], rtol=1e-10)
    np.testing.assert_allclose(flat(params), x, rtol=1e-10, atol=1e-12)


def test_float32_follows_the_formulas_too():
    start, grads = drawn(0), drawn(1, 3.0, (STEPS,))
    single = jax.tree.map(jnp.float32, (start, grads))
    (params, state), _ = scanned(madgrad("auto"), *single)
    rows = np.concatenate([leaf.reshape(STEPS, -1) for leaf in jax.tree.leaves(grads)], axis=1)
    x, _ = reference(flat(start), rows, np.ones(STEPS))
    assert {leaf.dtype.name for leaf in state.estimate} == {"float32"}
    np.testing.assert_allclose(flat(params), x, atol=1e-5)


DATA = np.random.default_rng(5).standard_normal((64, 8))
SOLUTION = np.array([3.0, -1.0, 0.5, 0.0, 2.0, -2.5, 1.0, -0.3])


def l1(x):
    """Convex, not smooth, and 0 at SOLUTION alone."""
    return jnp.abs(DATA @ (x - SOLUTION)).mean()


def trained(tx, loss, start, steps):
    """The last x, and after each step it and the state."""

    def body(carry, _):
        x, state = carry
        updates, state = tx.update(jax.grad(loss)(x), state, x)
        carry = optax.apply_updates(x, updates), state
        return carry, carry

    final, each = jax.jit(lambda c: lax.scan(body, c, length=steps))((start, tx.init(start)))
    return final[0], each


@pytest.mark.parametrize(("scale", "momentum"), [(1e-3, 0.9), (1e3, 0.9), (1e3, 0.0)])
def test_the_size_of_the_loss_does_not_matter(scale, momentum):
    with jax.enable_x64(True):  # in float32 roundings grow to 2e-5 along the way
        tx, start = madgrad("auto", momentum=momentum, eps=0.0), jnp.full(8, 0.1)
        smooth = [lambda x, c=c: c * ((DATA @ (x - SOLUTION)) ** 2).mean() for c in (1.0, scale)]
        (plain, _), (scaled, _) = (trained(tx, loss, start, 100) for loss in smooth)
        assert jnp.abs(plain - start).max() > 0.5
        np.testing.assert_allclose(scaled, plain, rtol=1e-11)


@pytest.mark.parametrize(("start", "momentum"), [(0.0, 0.9), (1.0, 0.0), (10.0, 0.0), (10.0, 0.9)])
def test_on_a_convex_problem_the_distance_is_never_too_large(start, momentum):
    with jax.enable_x64(True):
        x0 = jnp.full(8, start)
        _, (each, states) = trained(madgrad("auto", momentum=momentum), l1, x0, 2000)
        true = np.abs(start - SOLUTION).max()
        distances = np.asarray(states.estimate.distance)
        assert (np.diff(distances) >= 0).all()
        assert distances[-1] <= true
        assert distances[-1] > 0.1 * true
        assert l1(each.mean(0)) < 0.2 * l1(x0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_a_factor_or_a_gradient_nothing_moves(momentum):
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


def test_a_start_at_the_origin_has_a_least_distance():
    tx = madgrad("auto")
    _, state = stepper(tx)(jnp.zeros(3), tx.init(jnp.zeros(3)), jnp.ones(3))
    np.testing.assert_allclose(state.estimate.distance, 1e-6, rtol=1e-6)


def test_a_complex_number_is_two_coordinates():
    draw = np.random.default_rng(2)
    pairs = draw.standard_normal((11, 5, 2)).astype(np.float32)
    whole = (pairs[..., 0] + 1j * pairs[..., 1]).astype(np.complex64)
    tx = madgrad("auto", momentum=0.0, weight_decay=0.1)
    (real, _), of_real = scanned(tx, jnp.asarray(pairs[0]), jnp.asarray(pairs[1:]))
    (joint, _), of_joint = scanned(tx, jnp.asarray(whole[0]), jnp.asarray(whole[1:]))
    np.testing.assert_allclose(numbers(joint), real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_joint, of_real, rtol=1e-5)


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"state_dtype": "bfloat16"}])
def test_half_precision_is_estimated_in_float32(options):
    start = jax.tree.map(lambda v: jnp.asarray(v, jnp.bfloat16), drawn(0))
    grads = jax.tree.map(lambda v: jnp.asarray(v, jnp.bfloat16), drawn(1, 3.0, (20,)))
    exact = jax.tree.map(lambda v: v.astype(jnp.float32), (start, grads))
    tx = madgrad("auto", **options)
    (params, state), (_, rates) = scanned(tx, start, grads)
    momentum = options.get("momentum", 0.9)
    (twin, _), (_, expected) = scanned(madgrad("auto", momentum=momentum), *exact)
    assert {leaf.dtype.name for leaf in state.estimate} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    np.testing.assert_allclose(rates, expected, rtol=0.05)
    np.testing.assert_allclose(flat(params), flat(twin), rtol=0.02, atol=2e-3)


def test_runs_in_a_batch_have_their_own_estimates():
    starts = jnp.stack([jnp.zeros(8), jnp.full(8, -2.0)])
    tx = madgrad("auto")

    @jax.jit
    def final(start):
        x, (_, states) = trained(tx, l1, start, 30)
        return x, jax.tree.map(lambda leaf: leaf[-1], states)

    with jax.default_matmul_precision("highest"):  # on a GPU a batch is multiplied in TF32
        together, states = jax.vmap(final)(starts)
        ones = [final(start) for start in starts]
    assert estimated_lr(states).shape == (2,)
    for i, (alone, state) in enumerate(ones):
        np.testing.assert_allclose(together[i], alone, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(estimated_lr(states)[i], estimated_lr(state), rtol=1e-4)


@pytest.mark.parametrize("init", [lambda tx: tx.init, lambda tx: jax.jit(tx.init)])
def test_parameters_and_state_are_donated(init):
    tx, params = madgrad("auto"), {"w": jnp.ones((64, 8)), "b": jnp.ones(8)}
    state, step = init(tx)(params), stepper(tx, donate_argnums=(0, 1))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    memory = step.lower(params, state, params).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size
    grads = jax.tree.map(lambda p: p + 1.0, params)
    for _ in range(2):
        old = jax.tree.leaves((params, state))
        params, state = step(params, state, grads)
        assert all(leaf.is_deleted() for leaf in old)
    assert (params["w"] < 1).all()


def test_derivatives_through_steps_are_those_of_finite_differences():
    """Not where D stops being the larger; at 0, where roots have none, they are finite."""
    with jax.enable_x64(True):

        @jax.jit
        def outcome(begin, slope, factor):
            tx = madgrad("auto", eps=1e-2, lr_factor=factor)
            params, state = begin, tx.init(begin)
            for k in range(2):
                updates, state = tx.update((params - k) * slope, state, params)
                params = optax.apply_updates(params, updates)
            return (params**2).sum()

        at = (jnp.array([0.5, -1.0, 2.0]), jnp.array([1.0, 2.0, 1.0]), jnp.float64(0.7))
        check_grads(outcome, at, order=1, modes=("rev",), eps=1e-6)
        slopes = jax.grad(outcome, (0, 1, 2))(jnp.zeros(3), jnp.zeros(3), at[2])
        assert all(bool(jnp.isfinite(slope).all()) for slope in slopes)


def injected():
    return optax.inject_hyperparams(madgrad)("auto", lr_factor=1.0)


WRAPPED = {
    "alone": lambda: madgrad("auto"),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1e6), madgrad("auto")),
    "masked": lambda: optax.masked(madgrad("auto"), {"w": True}),
    "MultiSteps": lambda: optax.MultiSteps(madgrad("auto"), every_k_schedule=1),
    "apply_if_finite": lambda: optax.apply_if_finite(madgrad("auto"), 3),
    "inject_hyperparams": injected,
    "flatten": lambda: optax.flatten(madgrad("auto")),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_the_estimate_is_found_inside(wrapped):
    tx, params = WRAPPED[wrapped](), {"w": jnp.ones(3)}
    grads = {"w": jnp.array([1.0, 8.0, 27.0])}
    _, state = stepper(tx)(params, tx.init(params), grads)
    # ν = λ g² gives the mean of H_i^{2/3} back, and D_1 is D_0, as x_0 - x_0 agrees with nothing.
    np.testing.assert_allclose(estimated_lr(state), 0.02**1.5 * (14 / 3) ** -0.75, rtol=1e-5)


def test_an_injected_factor_may_change_between_steps():
    params = {"w": jnp.ones(3)}
    tx = injected()
    state, step = tx.init(params), stepper(tx)
    state.hyperparams["lr_factor"] = jnp.float32(0.0)
    rested, state = step(params, state, params)
    assert same_bits(rested, params)
    state.hyperparams["lr_factor"] = jnp.float32(1.0)
    moved, _ = step(params, state, params)
    assert (moved["w"] < 1).all()


def test_a_given_rate_leaves_the_state_as_it_was():
    params = {"w": jnp.ones(3)}
    assert type(madgrad(0.1, lr_factor=1).init(params)) is MadgradState
    assert "lr_factor" not in optax.inject_hyperparams(madgrad)(0.1).init(params).hyperparams
    state = madgrad("auto").init(params)
    assert type(state) is AutoMadgradState
    assert state._fields == (*MadgradState._fields, "estimate")
    marked = optax.tree_utils.tree_map_params(
        madgrad("auto"), lambda _: "buffer", state, transform_non_params=lambda _: "other"
    )
    assert marked.estimate == Estimate(*["other"] * 5)


def test_a_tree_without_parameters_only_counts():
    tx = madgrad("auto")
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {}
    assert state.count == 1
    assert estimated_lr(state) == 0


def test_sums_are_accurate_and_the_larger_is_a_number():
    many = np.random.default_rng(0).random(10_000_001, dtype=np.float32)
    exact = many.sum(dtype=np.float64)
    for shaped in (many, many[:-1].reshape(1000, 10_000)):
        np.testing.assert_allclose(jax.jit(xla.total)(shaped), exact, rtol=1e-6)
    assert xla.total(jnp.ones(300, jnp.bfloat16)) == 300
    assert xla.larger(jnp.float32(2.0), jnp.float32(jnp.nan)) == 2
    assert xla.larger(jnp.float32(2.0), jnp.float32(3.0)) == 3


def test_large_leaves_are_summed_in_chunks(monkeypatch):
    tx, later = (madgrad("auto", weight_decay=0.1) for _ in range(2))  # a trace is kept by its tx
    start, grads = drawn(0), drawn(1, 3.0, (10,))
    many = jnp.arange(35.0).reshape(7, 5)
    with jax.enable_x64(True):
        (whole, _), seen = scanned(tx, start, grads)
        assert "scan" not in str(jax.make_jaxpr(tx.update)(start, tx.init(start), start))
        monkeypatch.setattr(xla, "CHUNK", 3)  # 12 numbers are 4 chunks, 8 leave 2 over
        assert "scan" in str(jax.make_jaxpr(later.update)(start, tx.init(start), start))
        (cut, _), also_seen = scanned(later, start, grads)
        (slope,) = jax.grad(lambda x: xla.sums(lambda xp, x: (xp.total(x * x),), x)[0], (0,))(many)
    np.testing.assert_allclose(flat(cut), flat(whole), rtol=1e-12)
    np.testing.assert_allclose(also_seen, seen, rtol=1e-12)
    np.testing.assert_allclose(slope, 2 * many)


BAD = [
    ({"learning_rate": 0.1, "lr_factor": 2.0}, "lr_factor=2.0 must be left at 1 with learning_r"),
    ({"learning_rate": 0.1, "lr_factor": lambda _: 1.0}, "must be left at 1 .*multiply learning_r"),
    ({"learning_rate": "auto", "lr_factor": -1.0}, "lr_factor=-1.0 must be finite and >= 0; use 1"),
    ({"learning_rate": "auto", "lr_factor": float("nan")}, "lr_factor=nan must be finite and >= 0"),
    (
        {"learning_rate": "auto", "lr_factor": 3, "weight_decay": 0.5, "decoupled_lr": True},
        "weight_decay=0.5 at lr=3.0 multiplies the weights by -0.5, which must be >= 0",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        madgrad(**options)


def test_what_cannot_be_estimated_or_found_is_refused():
    with pytest.raises(ValueError, match=r"'auto' must be .* no gradient sum .* use madgrad"):
        mirror_madgrad("auto")
    with pytest.raises(TypeError, match=r"lr_factor=.* must be one number; use 1"):
        madgrad("auto", lr_factor=jnp.ones(2))
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="has 0 estimates of a learning rate and must have 1"):
        estimated_lr(madgrad(0.1).init(params))
    two = optax.chain(madgrad("auto"), madgrad("auto"))
    with pytest.raises(ValueError, match=r"has 2 estimates .* pass the state of one"):
        estimated_lr(two.init(params))


def bowl(tx, steps, scale=1.0, damage=None, start=None):
    """Down to 3, with a gradient that `damage` may change; the last parameters and state."""
    x = {"w": jnp.linspace(-1.0, 1.0, 41, dtype=jnp.float32) if start is None else start}
    state, step = tx.init(x), stepper(tx)
    for k in range(steps):
        grad = (x["w"] - 3) * scale
        x, state = step(x, state, {"w": grad if damage is None else damage(k, grad)})
    return x["w"], state


def test_a_large_loss_trains():
    """g² overflows float32, and the scale of the gradients does not need it."""
    plain, _ = bowl(madgrad("auto"), 60)
    huge, state = bowl(madgrad("auto"), 60, scale=1e20)
    np.testing.assert_allclose(huge, plain, rtol=1e-3)
    assert 0 < estimated_lr(state) < np.inf


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_rests_while_the_first_gradients_are_damaged(value, momentum):
    def damage(k, grad):
        return grad.at[3].set(value) if k < 2 else grad

    tx = madgrad("auto", momentum=momentum)
    rested, state = bowl(tx, 2, damage=damage)
    assert same_bits({"w": rested}, {"w": jnp.linspace(-1.0, 1.0, 41, dtype=jnp.float32)})
    assert estimated_lr(state) == 0
    assert not jnp.any(state.grad_sq_sum["w"])
    moved, state = bowl(tx, 40, damage=damage)
    assert jnp.isfinite(moved).all()
    assert (moved > rested).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_damaged_coordinate_does_not_stop_the_estimate(value):
    def damage(k, grad):
        return grad.at[3].set(value) if k == 2 else grad

    _, early = bowl(madgrad("auto"), 3, damage=damage)
    moved, state = bowl(madgrad("auto"), 40, damage=damage)
    _, sound = bowl(madgrad("auto"), 40)
    assert estimated_lr(state) > 2 * estimated_lr(early)
    np.testing.assert_allclose(estimated_lr(state), estimated_lr(sound), rtol=0.2)
    assert jnp.isfinite(jnp.delete(moved, 3)).all()


@pytest.mark.parametrize("damaged", [np.nan, 0.0])
def test_the_distance_never_falls(damaged):
    """Neither where all of ν is damaged, nor where the gradients' scale overflows."""
    tx, x = madgrad("auto"), jnp.linspace(-1.0, 1.0, 41, dtype=jnp.float32)
    state, step, seen = tx.init(x), stepper(tx), []
    for k in range(30):
        grad = (x - 3) * jnp.float32(10.0 ** min(3 * k, 37) if damaged == 0 else 1.0)
        x, state = step(x, state, jnp.full_like(x, damaged) if damaged and k == 9 else grad)
        seen.append(float(state.estimate.distance))
    assert seen == sorted(seen)
    assert seen[0] > 0


def test_a_huge_weight_without_a_gradient_says_nothing():
    seen = []
    for last in (1e30, 0.15):
        start = jnp.array([0.1, 0.2, last], jnp.float32)
        moved, state = bowl(madgrad("auto"), 20, damage=lambda _, g: g.at[2].set(0), start=start)
        assert moved[2] == start[2]
        seen.append((*moved[:2].tolist(), float(estimated_lr(state))))
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)
