"""apply_gradients(kernel=True): what the kernels of a step compute, in Pallas' interpreter."""

import cases
import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_cases import build, each_method, same_bits  # noqa: E402
from jax_kernels import (  # noqa: E402
    interpret,
    kernel_step,
    kernels,
    marks,
    plain_step,
    thorough,
    tree,
)

from cubegrad import options  # noqa: E402
from cubegrad.optax import (  # noqa: E402
    codes,
    estimated_lr,
    kernel,
    madgrad,
    madgradw,
    pallas,
)
from cubegrad.optax.layout import OFFSET, POINTS, SUMS  # noqa: E402
from cubegrad.rule import MADGRAD  # noqa: E402

pytestmark = marks
HYPER = options.Hyper(0.1, 0.9, 1e-6, 0.0, None, False)
FORM = kernel.Form(MADGRAD, HYPER, False, False, None, True)
BUFFERS = (*SUMS, *POINTS, OFFSET, *codes.BUFFERS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    interpret(monkeypatch)


def check_codes(name, code, expected):
    apart = np.abs(np.asarray(code, np.int64) - np.asarray(expected, np.int64))
    assert np.mean(apart > 0) <= 1e-4
    assert apart.max() <= (3 if name == "offset_code" else 1)  # its lowest bit is the root's


def check_close(new, expected):
    """Parameters and state of two ways to take the same step: one code in 10,000 may differ."""
    params, other_params = new[0], expected[0]
    apart = np.abs(np.float64(params["w"]) - np.float64(other_params["w"]))
    assert np.mean(apart > 1e-6 * (1 + np.abs(np.float64(params["w"])))) <= 1e-4
    check_states(new, expected)
    assert same_bits(params["b"], other_params["b"])


def check_states(new, expected):
    (params, state), (other_params, other) = new, expected
    for name in BUFFERS:
        if getattr(other, name, None) is None or other._asdict()[name]["w"] is None:
            continue
        ours, theirs = getattr(state, name)["w"], getattr(other, name)["w"]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if jnp.issubdtype(ours.dtype, jnp.integer):
            check_codes(name, ours, theirs)
            continue
        if name == "dual_offset":  # z stays where it is, whichever way x is rounded
            ours, theirs = ours + params["w"], theirs + other_params["w"]
        np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=2e-6, atol=2e-6)


def check_rounded(params, tx, grads, state, old):
    """Of half precision with sums, what a step of float32 rounds to.

    An update is in half precision and is rounded, and then its sum with the parameter is.
    """
    grads, old = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (grads, old))
    exact, _ = jax.jit(plain_step(tx))(grads, state, old)
    nearest = exact["w"].astype(params["w"].dtype)
    assert np.mean(np.asarray(params["w"]) != np.asarray(nearest)) <= 1e-3


STEPS = [
    ("plain", "float32", False),
    ("plain", "bfloat16", False),
    ("decoupled", "float32", True),
    ("plain", "bfloat16", True),
    *(thorough(options, "float32", True) for options in ("plain", "l2-maximize")),
    *(thorough(options, "float32", False) for options in ("decoupled", "l2-maximize")),
    *(thorough("plain", "float16", compact) for compact in (False, True)),
]


@pytest.mark.parametrize(("options", "dtype", "compact"), STEPS)
@pytest.mark.parametrize("method", [*cases.METHODS, thorough(cases.SCHEDULE_FREE)], ids=str)
def test_a_kernel_takes_the_step_of_xla(method, options, dtype, compact):
    tx = build(method, cases.OPTIONS[options] | {"compact": compact})
    params = tree(dtype)
    state, ours, plain = tx.init(params), jax.jit(kernel_step(tx)), jax.jit(plain_step(tx))
    assert kernels(ours, params, state, params) == 1
    for k in range(2):
        grads = tree(dtype, 10 + k)
        new, expected = ours(grads, state, params), plain(grads, state, params)
        if dtype == "float32" or compact:
            check_close(new, expected)
        else:
            check_rounded(new[0], tx, grads, state, params)
            check_states(new, expected)
        params, state = expected


@pytest.mark.parametrize(("compact", "decay"), [(False, 0.1), (True, 0.0)])
def test_a_kernel_has_the_sums_of_the_estimate(compact, decay):
    """Before the first gradient, too, when nothing may move."""
    tx = madgrad("auto", compact=compact, weight_decay=decay)
    params = tree()
    state, ours, plain = tx.init(params), jax.jit(kernel_step(tx)), jax.jit(plain_step(tx))
    still, idle = ours(jax.tree.map(jnp.zeros_like, params), state, params)
    if decay == 0:
        assert same_bits(still, params)
        assert estimated_lr(idle) == 0
    for k in range(3):
        grads = tree(seed=10 + k)
        new, expected = ours(grads, state, params), plain(grads, state, params)
        check_close(new, expected)
        # The terms of the agreement all but cancel out here.
        np.testing.assert_allclose(new[1].estimate, expected[1].estimate, rtol=1e-5, atol=1e-7)
        params, state = expected
    assert estimated_lr(state) > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factory", [madgrad, madgradw])
def test_half_precision_is_rounded_with_the_same_bits(factory, dtype):
    tx = factory(0.1, stochastic_rounding=True)
    params, grads = tree(dtype), tree(dtype, 10)
    state = tx.init(params)
    ours, plain = (jax.jit(step(tx)) for step in (kernel_step, plain_step))
    new, expected = ours(grads, state, params)[0]["w"], plain(grads, state, params)[0]["w"]
    assert np.mean(np.asarray(new) != np.asarray(expected)) <= 1e-3


@pytest.mark.parametrize("bad", [np.nan, thorough(np.inf)])
@pytest.mark.parametrize("compact", [False, True])
def test_a_gradient_that_is_not_finite_stays_in_its_coordinate(compact, bad):
    tx, params, grads = madgrad(0.1, eps=0.0, compact=compact), tree(), tree(seed=10)
    state, ours = tx.init(params), jax.jit(kernel_step(tx))
    spoilt = {**grads, "w": grads["w"].at[2, 3].set(bad)}
    new, expected = ours(spoilt, state, params)[0]["w"], ours(grads, state, params)[0]["w"]
    assert np.sum(np.asarray(new) != np.asarray(expected)) <= 1


@pytest.mark.parametrize("compact", [thorough(False), True])
@each_method
def test_lr_zero_moves_no_bit(method, compact):
    tx = build(method, {"lr": lambda _: jnp.float32(0), "eps": 0.0, "compact": compact})
    params = tree()
    params["w"] = params["w"].at[0, :2].set(jnp.array([0.0, -0.0]))
    new, _ = jax.jit(kernel_step(tx))(tree(seed=10), tx.init(params), params)
    assert same_bits(new, params)


def test_a_scan_of_kernels_equals_steps():
    tx, params = madgradw(1e-2, compact=True), tree()
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree(seed=10 + k) for k in range(3)))
    step = kernel_step(tx)
    together = jax.jit(
        lambda carry: lax.scan(lambda c, g: (step(g, c[1], c[0]), None), carry, grads)[0]
    )((params, tx.init(params)))
    state = tx.init(params)
    for k in range(3):
        params, state = jax.jit(step)(jax.tree.map(lambda g, k=k: g[k], grads), state, params)
    check_close(together, (params, state))


def test_the_mask_selects_what_decays():
    given = {"weight_decay": 0.5, "decoupled_weight_decay": True, "mask": {"w": False, "b": True}}
    decaying, plain = madgrad(0.1, compact=True, **given), madgrad(0.1, compact=True)
    params, grads = tree(), tree(seed=10)
    (new, state), (expected, _) = (
        jax.jit(kernel_step(tx))(grads, tx.init(params), params) for tx in (decaying, plain)
    )
    assert same_bits(new["w"], expected["w"])
    assert not same_bits(new["b"], expected["b"])
    assert same_bits(state.initial_scale["w"], plain.init(params).initial_scale["w"])


@pytest.mark.parametrize("error", [-(2.0**-22), 0.0, 2.0**-22])
def test_cube_root_and_quotient_within_two_ulps(error, monkeypatch):
    """With special-function units that are as wrong as NVIDIA's may be: by about 2^-22."""
    exact = pallas.EXACT
    for name in ("lg2", "ex2"):
        monkeypatch.setitem(exact, name, lambda x, f=exact[name]: f(x) * (1 + error))
    xp = pallas.functions(FORM)
    x = jnp.float32(2.0) ** jnp.linspace(-125.9, 127.9, 10_001)
    root = np.float64(jax.jit(xp.cbrt)(x))
    assert np.abs(root / np.cbrt(np.float64(x)) - 1).max() <= 2.0**-22
    ends = jnp.float32([0.0, 2.0**-127, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(xp.cbrt(ends), [0.0, 0.0, np.inf, np.nan])
    np.testing.assert_array_equal(xp.quotient(jnp.float32(2.0), ends[:3]), [0.0, 0.0, 0.0])
    zero = xp.quotient(jnp.float32(-0.0), jnp.float32(1.0))
    assert not np.signbit(zero)
