"""Bad options and states are refused, with what was found, what is needed and the remedy."""

import re
import warnings
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import same_bits, stepper  # noqa: E402

from cubegrad import cautions  # noqa: E402
from cubegrad.optax import Estimate, madgrad, madgradw, mirror_madgrad  # noqa: E402

NUMBERS = ("lr_factor", "reference_lr", "learning_rate", "momentum", "weight_decay", "eps")
FLAGS = ("decoupled_weight_decay", "decoupled_lr", "maximize", "compact", "stochastic_rounding")


@pytest.mark.parametrize("bad", [True, False, np.True_, jnp.array(True)], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_boolean_is_no_number(name, bad):
    options = {"learning_rate": "auto"} if name == "lr_factor" else {}
    with pytest.raises(TypeError, match=rf"{name}={re.escape(repr(bad))}.* must be one number; "):
        madgrad(**options, **{name: bad})


@pytest.mark.parametrize("bad", [0.1, "yes", None, 2, jnp.array(True)], ids=str)
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("factory", [madgrad, mirror_madgrad, madgradw])
def test_a_flag_that_is_no_boolean_is_refused(factory, name, bad):
    """decoupled_weight_decay=0.1 meant no decay at all: weight_decay was still 0."""
    remedy = f"pass {name}=True, or leave it out"
    if name == "decoupled_weight_decay" and isinstance(bad, float | int):
        remedy = f"pass weight_decay={bad}, decoupled_weight_decay=True"
    message = rf"{name}={re.escape(repr(bad))} \(.*\) must be True or False; {remedy}"
    with pytest.raises(TypeError, match=message):
        factory(**{name: bad})


@pytest.mark.parametrize("kind", [int, np.bool_])
@pytest.mark.parametrize("name", FLAGS)
def test_numpys_booleans_and_0_and_1_are_taken_as_booleans(name, kind):
    """0 and 1 come from command lines, and cannot mean anything else."""
    params = jnp.linspace(-1, 1, 64 * 64).reshape(64, 64)

    def first_step(value):
        tx = madgrad(0.1, momentum=0.5, weight_decay=1e-3, **{name: value})
        return tx.update(params, tx.init(params), params)

    for value in (True, False):
        assert same_bits(first_step(kind(value)), first_step(value))


def test_adamws_decay_without_decoupling_is_warned_of_at_the_users_line(monkeypatch):
    monkeypatch.setattr(cautions, "_has_warned_of_decay", False)
    tx, params = optax.inject_hyperparams(madgrad), {"w": jnp.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        madgrad(weight_decay=1e-3)
        madgrad(weight_decay=0.1, decoupled_weight_decay=True)
        mirror_madgrad(weight_decay=0.1)
        madgradw(weight_decay=0.1)
    with pytest.warns(UserWarning, match=r"weight_decay=0.1 is an L2 term .*=0.025\.") as caught:
        [tx(0.1, weight_decay=0.1).init(params) for _ in range(2)]
    assert [warning.filename for warning in caught] == [__file__]


PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.ones(3)}
FACTORIES = {
    "madgrad": madgrad,
    'madgrad("auto")': partial(madgrad, "auto"),
    "madgrad(compact=True)": partial(madgrad, compact=True),
    'madgrad("auto", compact=True)': partial(madgrad, "auto", compact=True),
    "mirror_madgrad": mirror_madgrad,
    "mirror_madgrad(compact=True)": partial(mirror_madgrad, compact=True),
    "madgradw": madgradw,
    "madgradw(compact=True)": partial(madgradw, compact=True),
    "madgradw(schedule_free=True)": partial(madgradw, schedule_free=True),
    "madgradw(schedule_free=True, compact=True)": partial(
        madgradw, schedule_free=True, compact=True
    ),
}


def step(tx, state, params=PARAMS, grads=None):
    return jax.eval_shape(stepper(tx), params, state, params if grads is None else grads)


@pytest.mark.parametrize("made_by", FACTORIES)
@pytest.mark.parametrize("given_to", FACTORIES)
def test_the_state_of_another_transformation_is_refused_while_tracing(made_by, given_to):
    state = FACTORIES[made_by]().init(PARAMS)
    tx, own = FACTORIES[given_to](), FACTORIES[given_to]().init(PARAMS)
    if made_by == given_to:
        assert jax.tree.structure(step(tx, state)[1]) == jax.tree.structure(state)
        return
    message = (
        f"the state is the {type(state).__name__} of {made_by}, and {given_to} needs its own "
        f"{type(own).__name__} of {len(own)} fields; go on with {made_by}, or start over from the "
        "weights as they are: state = tx.init(params)"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        step(tx, state)


OTHER_STATES = {
    "adam's": (optax.scale_by_adam().init(PARAMS), r"of type ScaleByAdamState, .* init\(\)"),
    "of a chain": ((madgrad().init(PARAMS), ()), "of type tuple with 2 members, .* a chain's"),
    "a dict": (madgrad().init(PARAMS)._asdict(), r"of type dict, .*; pass MadgradState\(\*\*state"),
    "none": (None, "of type NoneType, and madgrad needs its own MadgradState of 4 fields; pass"),
}


@pytest.mark.parametrize("kind", OTHER_STATES)
def test_what_is_no_state_of_ours_is_refused(kind):
    state, message = OTHER_STATES[kind]
    with pytest.raises(TypeError, match=f"the state is {message}"):
        step(madgrad(), state)


OTHER_PARAMS = {
    "another name": (
        {"v": PARAMS["w"], "b": PARAMS["b"]},
        r"the state's \w+ is not a tree like params: it lacks \['v'\] and has \['w'\]; pass",
    ),
    "another container": (
        list(PARAMS.values()),
        r"it lacks \[0\], \[1\] and has \['b'\], \['w'\];",
    ),
    "one more": (PARAMS | {"a": jnp.ones(3)}, r"like params: it lacks \['a'\]; .*tx\.init\(params"),
    "an ordered dict": (OrderedDict(PARAMS), "like params: it has other containers"),
    "another shape": (
        PARAMS | {"w": jnp.ones((128, 64))},
        r"the state's \w+ of params\['w'\] has shape \(64, 64\), and must have \(128, 64\); pass",
    ),
}


@pytest.mark.parametrize("kind", OTHER_PARAMS)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_state_of_other_parameters_is_refused_while_tracing(factory, kind):
    params, message = OTHER_PARAMS[kind]
    tx = FACTORIES[factory]()
    with pytest.raises(ValueError, match=message):
        step(tx, tx.init(PARAMS), params)


def test_gradients_of_other_parameters_are_refused_while_tracing():
    tx = madgrad()
    with pytest.raises(ValueError, match=r"the tree of gradients is not .* it lacks \['b'\]; pass"):
        step(tx, tx.init(PARAMS), grads={"w": PARAMS["w"]})


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("factory", [madgrad, mirror_madgrad, madgradw])
def test_a_momentum_that_the_state_has_no_buffer_for_is_refused(factory, compact):
    """The step would take x for z, which it is for one step only."""
    state = factory(momentum=0.0, compact=compact).init({"w": PARAMS["w"]})
    tx, params = factory(momentum=0.9, compact=compact), {"w": PARAMS["w"]}
    points = {madgrad: "initial_param", mirror_madgrad: "z", madgradw: "dual_offset"}
    missing = "offset_code, offset_scale" if compact else points[factory]
    message = rf"params\['w'\] lacks {missing}, which momentum=0 does not keep and momentum=0\.9 "
    with pytest.raises(ValueError, match=message):
        step(tx, state, params)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_count_that_is_no_array_of_jax_is_taken(factory):
    tx = FACTORIES[factory]()
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    same = tx.update(PARAMS, state, PARAMS)
    for count in (1, np.int64(1), np.array(1)):
        assert same_bits(tx.update(PARAMS, state._replace(count=count), PARAMS), same)


@pytest.mark.parametrize("kind", [tuple, list, lambda estimate: Estimate(*map(float, estimate))])
def test_an_estimate_of_plain_numbers_or_in_a_plain_tuple_is_taken(kind):
    tx = madgrad("auto")
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    restored = state._replace(estimate=kind(state.estimate))
    assert same_bits(tx.update(PARAMS, restored, PARAMS), tx.update(PARAMS, state, PARAMS))


@pytest.mark.parametrize("bad", [None, (1.0, 2.0), {"distance": 1.0}])
def test_an_estimate_that_is_none_is_refused(bad):
    state = madgrad("auto").init(PARAMS)._replace(estimate=bad)
    with pytest.raises(TypeError, match=r"estimate is of type .* the 7 numbers of Estimate"):
        step(madgrad("auto"), state)


@pytest.mark.parametrize("bad", [0.5, None, True, -1, 2**31, "1", jnp.ones(()), jnp.zeros(2, int)])
def test_a_count_that_is_none_is_refused(bad):
    state = madgrad().init(PARAMS)._replace(count=bad)
    with pytest.raises(ValueError, match=r"the state's count is .* whole number .*init\(params\)"):
        madgrad().update(PARAMS, state, PARAMS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("offset_code", lambda code: code.astype(jnp.uint8), "is uint8, and must be int8; load it"),
        ("root_code", lambda code: code.astype(jnp.int32), "is int32, and must be uint8; load it"),
        (
            "root_scale",
            lambda scale: scale.astype(jnp.bfloat16),
            "is bfloat16, and must be",
        ),
        (
            "root_scale",
            lambda scale: scale[:1],
            r"has shape \(1, 1\), and must have \(64, 1\);",
        ),
        (
            "offset_scale",
            lambda scale: scale.sum(),
            r"has shape \(\), and must have \(64, 1\);",
        ),
    ],
)
@pytest.mark.parametrize("factory", [madgrad, mirror_madgrad, madgradw])
def test_codes_of_another_form_are_refused(factory, name, change, message):
    """offset_code as uint8 moved the weights wrongly."""
    tx = factory(compact=True)
    state = tx.init(PARAMS)
    codes = getattr(state, name)
    state = state._replace(**{name: codes | {"w": change(codes["w"])}})
    with pytest.raises(ValueError, match=rf"the state's {name} of params\['w'\] {message}"):
        step(tx, state)


def test_a_state_that_lacks_a_buffer_is_refused():
    state = madgrad(compact=True).init(PARAMS)._replace(root_scale={"w": None, "b": None})
    with pytest.raises(ValueError, match=r"state of params\['w'\] lacks root_scale; go on with"):
        step(madgrad(compact=True), state)
