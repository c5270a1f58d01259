"""Bad options and states are refused, with what was found, what is needed and the remedy."""

import re
import warnings

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import same_bits  # noqa: E402

from cubegrad import cautions  # noqa: E402
from cubegrad.optax import madgrad, mirror_madgrad  # noqa: E402

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
@pytest.mark.parametrize("factory", [madgrad, mirror_madgrad])
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

    def step(value):
        tx = madgrad(0.1, momentum=0.5, weight_decay=1e-3, **{name: value})
        return tx.update(params, tx.init(params), params)

    for value in (True, False):
        assert same_bits(step(kind(value)), step(value))


def test_adamws_decay_without_decoupling_is_warned_of_at_the_users_line(monkeypatch):
    monkeypatch.setattr(cautions, "_has_warned_of_decay", False)
    tx, params = optax.inject_hyperparams(madgrad), {"w": jnp.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        madgrad(weight_decay=1e-3)
        madgrad(weight_decay=0.1, decoupled_weight_decay=True)
        mirror_madgrad(weight_decay=0.1)
    with pytest.warns(UserWarning, match=r"weight_decay=0.1 is an L2 term .*=0.025\.") as caught:
        [tx(0.1, weight_decay=0.1).init(params) for _ in range(2)]
    assert [warning.filename for warning in caught] == [__file__]
