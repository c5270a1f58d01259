"""flax, equinox and checkpoints; lazy imports; refused arguments."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import cubegrad

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import same_bits, stepper  # noqa: E402

from cubegrad.optax import (  # noqa: E402
    AutoMadgradState,
    MadgradState,
    MadgradwState,
    MirrorMadgradState,
    ScheduleFreeMadgradwState,
    madgrad,
    madgradw,
    mirror_madgrad,
)

NAN = float("nan")
TARGET = jnp.array([3.0, -2.0, 0.5])


def test_flax_train_state():
    train_state = pytest.importorskip("flax.training.train_state")
    state = train_state.TrainState.create(
        apply_fn=None, params={"w": jnp.zeros(3)}, tx=madgrad(0.1, weight_decay=1e-4)
    )

    @jax.jit
    def step(state):
        grads = jax.grad(lambda p: ((p["w"] - TARGET) ** 2).sum())(state.params)
        return state.apply_gradients(grads=grads)

    for _ in range(200):
        state = step(state)
    np.testing.assert_allclose(state.params["w"], TARGET, atol=0.05)


@pytest.mark.compilation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_equinox_module(dtype):
    """Static fields and integers are None in the filtered tree; a module can be a decay mask."""
    equinox = pytest.importorskip("equinox")

    class Model(equinox.Module):
        weight: jax.Array
        calls: jax.Array
        name: str = equinox.field(static=True)

        def __call__(self, x):
            return self.weight * x

    model = Model(jnp.zeros(3, dtype), jnp.zeros((), jnp.int32), "line")
    params = equinox.filter(model, equinox.is_inexact_array)
    tx = madgrad(0.1, weight_decay=1e-4, mask=jax.tree.map(lambda _: True, params))
    state = tx.init(params)

    @equinox.filter_jit
    def step(model, state):
        grads = equinox.filter_grad(lambda m: ((m(1.0) - TARGET) ** 2).sum())(model)
        params = equinox.filter(model, equinox.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return equinox.apply_updates(model, updates), state

    for _ in range(200):
        model, state = step(model, state)
    assert model.weight.dtype == dtype
    np.testing.assert_allclose(model.weight.astype(jnp.float32), TARGET, atol=0.05)
    assert model.calls == 0


def by_msgpack(state, fresh):
    serialization = pytest.importorskip("flax.serialization")
    return serialization.from_bytes(fresh, serialization.to_bytes(state))


STATES = (MadgradState, MirrorMadgradState, MadgradwState, AutoMadgradState)
STATES += (ScheduleFreeMadgradwState,)


def by_pickle(state, _):
    return pickle.loads(pickle.dumps(state))


@pytest.mark.compilation
@pytest.mark.parametrize("round_trip", [by_msgpack, by_pickle])
@pytest.mark.parametrize(
    "tx",
    [
        madgrad(0.1),
        madgrad(0.1, momentum=0.0),
        mirror_madgrad(0.1),
        madgradw(0.1),
        madgradw(0.1, schedule_free=True, warmup_steps=4),
        madgrad("auto"),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tx, round_trip):
    params = {"w": jnp.ones(5), "half": jnp.ones(4, jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.arange(p.size, dtype=p.dtype), params)
    state, step = tx.init(params), stepper(tx)
    for k in range(6):
        if k == 3:
            saved = round_trip(state, tx.init(params))
            assert isinstance(saved, STATES)
            resumed, resumed_state = params, saved
        params, state = step(params, state, grads)
        if k >= 3:
            resumed, resumed_state = step(resumed, resumed_state, grads)
    assert same_bits((params, state), (resumed, resumed_state))


IMPORTS = {
    "cubegrad": "import cubegrad; assert cubegrad.__version__; assert 'torch' not in sys.modules; "
    "cubegrad.MADGRAD; assert not {'jax', 'optax'} & set(sys.modules)",
    "cubegrad.optax": "import cubegrad.optax; assert 'torch' not in sys.modules",
    "cubegrad.optax without torch": "sys.modules['torch'] = None; import cubegrad.optax; "
    "import jax.numpy as jnp; tx = cubegrad.optax.madgrad(0.1); p = jnp.ones(3); "
    "u, _ = tx.update(p, tx.init(p), p); assert (u < 0).all()",
}


@pytest.mark.processes
@pytest.mark.parametrize("name", IMPORTS)
def test_neither_side_imports_the_other(name):
    code = f"import sys; {IMPORTS[name]}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed_before_torch_is_loaded():
    assert set(cubegrad.__all__) <= set(dir(cubegrad))
    assert pickle.loads(pickle.dumps(cubegrad.MADGRAD)) is cubegrad.MADGRAD
    assert issubclass(cubegrad.MirrorMADGRAD, torch.optim.Optimizer)
    assert pickle.loads(pickle.dumps(cubegrad.MADGRADW)) is cubegrad.MADGRADW
    assert cubegrad.interop.convert
    with pytest.raises(AttributeError, match="module 'cubegrad' has no attribute 'Madgrad'"):
        _ = cubegrad.Madgrad


INVALID = [
    ({"learning_rate": -1.0}, "learning_rate=-1.0 must be finite and >= 0; start from the default"),
    ({"learning_rate": NAN}, "learning_rate=nan must be finite"),
    ({"learning_rate": jnp.float32(-0.5)}, "learning_rate=-0.5 must be finite"),
    ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\); use 0.9"),
    ({"momentum": np.float32(-0.5)}, "momentum=-0.5 must be finite and >= 0; use 0.9"),
    ({"eps": -1e-6}, "eps=-1e-06 must be finite and >= 0; use the default, or 0"),
    ({"weight_decay": -1.0}, "weight_decay=-1.0 must be finite and >= 0; use 0"),
    ({"learning_rate": 0.0, "decoupled_lr": True}, "learning_rate=0 must be > 0 with decoupled_lr"),
    ({"decoupled_lr": True, "reference_lr": 0.0}, "reference_lr=0 must be > 0 with decoupled_lr"),
    (
        {"decoupled_lr": True, "learning_rate": lambda _: 0.1},
        "reference_lr=None must be a number > 0 .* use the peak learning rate",
    ),
    (
        {"decoupled_lr": True, "weight_decay": 0.5, "learning_rate": 0.3, "reference_lr": 0.1},
        "weight_decay=0.5 at lr=0.3 multiplies the weights by -0.49.*must be >= 0; lower",
    ),
    ({"weight_decay": 1.5, "decoupled_lr": True}, "weight_decay=1.5 must be <= 1"),
    (
        {"learning_rate": 2.0, "weight_decay": 0.6, "decoupled_weight_decay": True},
        r"learning_rate\*weight_decay=1.2 must be <= 1",
    ),
    ({"state_dtype": "float16"}, "state_dtype=float16 must be one of .*bfloat16.* use float32"),
    ({"state_dtype": jnp.float64}, "state_dtype=float64 must be enabled in JAX; use float32"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
@pytest.mark.parametrize("factory", [madgrad, mirror_madgrad, madgradw])
def test_invalid_options_are_refused(factory, options, message):
    with pytest.raises(ValueError, match=message):
        factory(**options)


@pytest.mark.parametrize(
    ("bad", "error"), [("fast", TypeError), (jnp.ones(2), ValueError), (np.ones(2), ValueError)]
)
def test_a_learning_rate_that_is_not_a_number_is_refused(bad, error):
    with pytest.raises(error, match=r"learning_rate=.*must be one number"):
        madgrad(bad)
    with pytest.raises(ValueError, match=r"learning_rate=.*\(shape \(2,\)\) must be one number"):
        jax.jit(lambda lr: madgrad(lr).init(jnp.ones(2)))(jnp.ones(2))


def test_integer_parameters_are_refused():
    with pytest.raises(TypeError, match=r"params\['n'\] has dtype int32; .* optax.masked"):
        madgrad().init({"n": jnp.arange(3), "w": jnp.ones(3)})


def test_missing_and_misshapen_gradients_are_refused():
    tx, params = madgrad(), {"w": jnp.ones((2, 3))}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"params=None.*call update\(grads, state, params\)"):
        tx.update(params, state)
    with pytest.raises(ValueError, match=r"of params\['w'\] is None, .*optax.partition"):
        tx.update({"w": None}, state, params)
    with pytest.raises(ValueError, match=r"of params\['w'\] is of shape \(3,\), .* \(2, 3\)"):
        tx.update({"w": jnp.ones(3)}, state, params)
