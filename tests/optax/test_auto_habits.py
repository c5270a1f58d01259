"""`madgrad(learning_rate="auto")` under JAX's and optax's transformations; what it refuses."""

import cases
import numpy as np
import oracle
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_cases import WRAPPERS, descend, injected, same_bits, stepper  # noqa: E402

from cubegrad.optax import (  # noqa: E402
    AutoMadgradState,
    Estimate,
    MadgradState,
    estimated_lr,
    madgrad,
    madgradw,
    mirror_madgrad,
)


@pytest.mark.compilation
def test_runs_in_a_batch_have_their_own_estimates():
    data = np.random.default_rng(5).standard_normal((64, 8))
    solution = np.array([3.0, -1.0, 0.5, 0.0, 2.0, -2.5, 1.0, -0.3])
    starts = jnp.stack([jnp.zeros(8), jnp.full(8, -2.0)])
    tx = madgrad("auto")

    def loss(x):
        return jnp.abs(data @ (x - solution)).mean()

    @jax.jit
    def final(start):
        return descend(tx, start, loss, 30)[0]

    with jax.default_matmul_precision("highest"):  # on a GPU a batch is multiplied in TF32
        together, states = jax.vmap(final)(starts)
        separate = [final(start) for start in starts]
    assert estimated_lr(states).shape == (2,)
    for i, (alone, state) in enumerate(separate):
        np.testing.assert_allclose(together[i], alone, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(estimated_lr(states)[i], estimated_lr(state), rtol=1e-4)


@pytest.mark.compilation
def test_derivatives_through_steps_are_those_of_finite_differences():
    """At 0, where the derivatives of the roots are infinite, those of the step are finite."""
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


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "inject_hyperparams"])
def test_the_estimate_is_found_inside_a_wrapper(wrapper):
    if wrapper == "inject_hyperparams":
        tx = injected("madgrad, estimated")
    else:
        tx = WRAPPERS[wrapper](madgrad("auto"))
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.array([1.0, 8.0, 27.0])}
    _, state = stepper(tx)(params, tx.init(params), grads)
    expected = oracle.Estimate([oracle.Madgrad(np.ones(3))])
    expected.step([np.array([1.0, 8.0, 27.0])], cases.settings({}))
    np.testing.assert_allclose(estimated_lr(state), expected.lr, rtol=1e-5)


def test_an_injected_factor_may_change_between_steps():
    params = {"w": jnp.ones(3)}
    tx = injected("madgrad, estimated")
    state, step = tx.init(params), stepper(tx)
    state.hyperparams["lr_factor"] = jnp.float32(0.0)
    unmoved, state = step(params, state, params)
    assert same_bits(unmoved, params)
    state.hyperparams["lr_factor"] = jnp.float32(1.0)
    moved, _ = step(params, state, params)
    assert (moved["w"] < 1).all()


def test_only_an_estimated_rate_has_an_estimate_in_its_state():
    params = {"w": jnp.ones(3)}
    assert type(madgrad(0.1, lr_factor=1).init(params)) is MadgradState
    assert "lr_factor" not in optax.inject_hyperparams(madgrad)(0.1).init(params).hyperparams
    state = madgrad("auto").init(params)
    assert type(state) is AutoMadgradState
    assert state._fields == (*MadgradState._fields, "estimate")
    marked = optax.tree_utils.tree_map_params(
        madgrad("auto"), lambda _: "buffer", state, transform_non_params=lambda _: "other"
    )
    assert marked.estimate == Estimate(*["other"] * 7)


def test_a_tree_without_parameters_has_no_rate():
    tx = madgrad("auto")
    _, state = tx.update({}, tx.init({}), {})
    assert estimated_lr(state) == 0


INVALID = [
    ({"learning_rate": 0.1, "lr_factor": 2.0}, "lr_factor=2.0 must be left at 1 with learning_r"),
    ({"learning_rate": 0.1, "lr_factor": lambda _: 1.0}, "must be left at 1 .*multiply learning_r"),
    ({"learning_rate": "auto", "lr_factor": -1.0}, "lr_factor=-1.0 must be finite and >= 0; use 1"),
    ({"learning_rate": "auto", "lr_factor": float("nan")}, "lr_factor=nan must be finite and >= 0"),
    (
        {"learning_rate": "auto", "lr_factor": 3, "weight_decay": 0.5, "decoupled_lr": True},
        "weight_decay=0.5 at lr=3.0 multiplies the weights by -0.5, which must be >= 0",
    ),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        madgrad(**options)


def test_a_rate_that_cannot_be_estimated_or_found_is_refused():
    with pytest.raises(ValueError, match=r"'auto' must be .* no x_0 .* use madgrad or madgradw"):
        mirror_madgrad("auto")
    with pytest.raises(TypeError, match=r"lr_factor=.* must be one number; use 1"):
        madgrad("auto", lr_factor=jnp.ones(2))
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="has 0 estimates of a learning rate and must have 1"):
        estimated_lr(madgrad(0.1).init(params))
    two = optax.chain(madgrad("auto"), madgrad("auto"))
    with pytest.raises(ValueError, match=r"has 2 estimates .* pass the state of one"):
        estimated_lr(two.init(params))


@pytest.mark.parametrize("factory", [madgrad, madgradw])
def test_nothing_decays_while_it_waits_for_a_gradient(factory):
    """As in PyTorch, also where decay does not depend on the rate."""
    tx = factory("auto", weight_decay=0.1, decoupled_lr=True)
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
    step, state = stepper(tx), tx.init(params)
    for _ in range(3):
        params, state = step(params, state, grads)
    assert same_bits(params["w"], jnp.ones(3))
    params, _ = step(params, state, {"w": jnp.ones(3)})
    assert (params["w"] < 0.95).all()


def test_coupled_decay_leaves_no_trace_while_it_waits():
    tx = madgradw("auto", weight_decay=0.1, decoupled_weight_decay=False)
    params = {"w": jnp.ones(3)}
    _, state = stepper(tx)(params, tx.init(params), {"w": jnp.array([1.0, jnp.nan, 1.0])})
    assert not state.grad_sq_sum["w"].any()


def test_a_state_without_its_start_is_refused_without_momentum_too():
    tx, params = madgradw("auto", momentum=0.0), {"w": jnp.ones(3)}
    state = tx.init(params)._replace(initial_param={"w": None})
    with pytest.raises(ValueError, match="lacks initial_param; go on with the options"):
        tx.update(params, state, params)
