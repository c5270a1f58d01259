"""apply_gradients(kernel=True): the kernels of a step, in Pallas' interpreter and up to PTX."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import cases
import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_cases import VARIANTS, WRAPPERS, build, each_method, randn, same_bits  # noqa: E402

from cubegrad import options  # noqa: E402
from cubegrad.optax import (  # noqa: E402
    apply_gradients,
    codes,
    estimated_lr,
    kernel,
    madgrad,
    madgradw,
    pallas,
)
from cubegrad.optax.apply import Written, _applied  # noqa: E402
from cubegrad.optax.layout import OFFSET, POINTS, SUMS  # noqa: E402
from cubegrad.rule import MADGRAD  # noqa: E402

pytestmark = [
    pytest.mark.compilation,
    # From JAX 0.11 on, and about the backend alone.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
SHAPE = (64, 1024)
HYPER = options.Hyper(0.1, 0.9, 1e-6, 0.0, None, False)
FORM = kernel.Form(MADGRAD, HYPER, False, False, None, True)
BUFFERS = (*SUMS, *POINTS, OFFSET, *codes.BUFFERS)


@pytest.fixture
def interpreted(monkeypatch):
    """On a GPU the kernels run on it."""
    monkeypatch.setattr(kernel, "INTERPRET", jax.default_backend() != "gpu")


def plain_step(tx):
    return partial(apply_gradients, tx)


def kernel_step(tx, **options):
    return partial(apply_gradients, tx, kernel=True, **options)


def kernels(step, *arguments):
    return str(jax.make_jaxpr(step)(*arguments)).count("pallas_call")


def lowered(step, *arguments):
    """For a GPU, without one; since JAX 0.11 this needs to be told which."""
    where = nullcontext()
    if hasattr(jax.sharding, "AbstractDevice"):
        gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
        where = jax.sharding.use_abstract_mesh(
            jax.sharding.AbstractMesh((), (), abstract_device=gpu)
        )
    with where:
        return jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def tree(dtype="float32", seed=0, shape=SHAPE):
    """A parameter that has a kernel, and one that is too small for it."""
    return {"w": randn(shape, dtype, seed), "b": randn((7,), dtype, seed + 1)}


def check_codes(name, code, expected):
    apart = np.abs(np.asarray(code, np.int64) - np.asarray(expected, np.int64))
    if name == "offset_code":
        apart = apart // 2  # the lowest bit is the root's
    assert np.mean(apart > 0) <= 1e-4
    assert apart.max() <= 1


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


thorough = partial(pytest.param, marks=pytest.mark.thorough)
STEPS = [
    ("plain", "float32", False),
    ("plain", "bfloat16", False),
    ("decoupled", "float32", True),
    ("plain", "bfloat16", True),
    *(thorough(options, "float32", True) for options in ("plain", "l2-maximize")),
    *(thorough(options, "float32", False) for options in ("decoupled", "l2-maximize")),
    *(thorough("plain", "float16", compact) for compact in (False, True)),
]


@pytest.mark.usefixtures("interpreted")
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


@pytest.mark.usefixtures("interpreted")
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


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factory", [madgrad, madgradw])
def test_half_precision_is_rounded_with_the_same_bits(factory, dtype):
    tx = factory(0.1, stochastic_rounding=True)
    params, grads = tree(dtype), tree(dtype, 10)
    state = tx.init(params)
    ours, plain = (jax.jit(step(tx)) for step in (kernel_step, plain_step))
    new, expected = ours(grads, state, params)[0]["w"], plain(grads, state, params)[0]["w"]
    assert np.mean(np.asarray(new) != np.asarray(expected)) <= 1e-3


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("bad", [np.nan, thorough(np.inf)])
@pytest.mark.parametrize("compact", [False, True])
def test_a_gradient_that_is_not_finite_stays_in_its_coordinate(compact, bad):
    tx, params, grads = madgrad(0.1, eps=0.0, compact=compact), tree(), tree(seed=10)
    state, ours = tx.init(params), jax.jit(kernel_step(tx))
    spoilt = {**grads, "w": grads["w"].at[2, 3].set(bad)}
    new, expected = ours(spoilt, state, params)[0]["w"], ours(grads, state, params)[0]["w"]
    assert np.sum(np.asarray(new) != np.asarray(expected)) <= 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compact", [thorough(False), True])
@each_method
def test_lr_zero_moves_no_bit(method, compact):
    tx = build(method, {"lr": lambda _: jnp.float32(0), "eps": 0.0, "compact": compact})
    params = tree()
    params["w"] = params["w"].at[0, :2].set(jnp.array([0.0, -0.0]))
    new, _ = jax.jit(kernel_step(tx))(tree(seed=10), tx.init(params), params)
    assert same_bits(new, params)


@pytest.mark.usefixtures("interpreted")
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


@pytest.mark.usefixtures("interpreted")
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


# ---------------------------------------------------------------- where there is no kernel
@pytest.mark.parametrize("variant", ["madgrad", "madgrad, estimated", "madgradw"])
def test_without_a_gpu_the_step_is_that_of_update(variant):
    """Compiled for this machine: the kernels are traced, and the parameters are the same."""
    tx, params = VARIANTS[variant](), tree()
    state = tx.init(params)
    assert kernels(kernel_step(tx), params, state, params) == 1
    new, expected = (
        jax.jit(step(tx))(tree(seed=10), state, params) for step in (kernel_step, plain_step)
    )
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "compact"),
    [
        ((64, 1000), "float32", True),  # the last block of a row is shorter
        ((64, 1000), "float32", False),  # less than 65,536
        ((65, 1009), "float32", False),  # no whole blocks
        ((64, 1024), "complex64", False),
    ],
)
def test_other_parameters_are_left_to_xla(shape, dtype, compact):
    tx, params = madgrad(0.1, compact=compact), {"w": randn(shape, dtype, 0)}
    arguments = params, tx.init(params), params
    assert kernels(kernel_step(tx), *arguments) == 0
    assert same_bits(*(jax.jit(step(tx))(*arguments) for step in (kernel_step, plain_step)))


def test_vmap_takes_the_step_of_xla():
    tx = madgrad(0.1, compact=True)
    params = jax.vmap(lambda scale: tree()["w"] * scale)(jnp.arange(1.0, 3.0))
    state = jax.vmap(tx.init)(params)
    text = lowered(jax.vmap(kernel_step(tx)), params, state, params)
    assert "triton" not in text
    new = jax.jit(jax.vmap(kernel_step(tx)))(params, state, params)
    for k in range(2):
        alone = jax.jit(plain_step(tx))(*jax.tree.map(lambda a, k=k: a[k], (params, state, params)))
        np.testing.assert_allclose(new[0][k], alone[0], rtol=0, atol=1e-3)


USED = {"alone", "chain", "masked", "partition", "inject_hyperparams"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "inject_hyperparams", "followed by another"])
def test_inside_a_wrapper(wrapper, monkeypatch):
    """A kernel is used unless another transformation looks at the update."""
    applied = []
    monkeypatch.setattr(
        "cubegrad.optax.apply._applied", lambda *trees: applied.append(trees) or _applied(*trees)
    )
    if wrapper == "inject_hyperparams":
        tx = optax.inject_hyperparams(madgrad)(0.1, momentum=0.9)
    elif wrapper == "followed by another":
        tx = optax.chain(madgrad(0.1), optax.add_decayed_weights(0.1))
    else:
        tx = WRAPPERS[wrapper](madgrad(0.1))
    params, grads = tree(), tree(seed=10)
    state, ours = tx.init(params), kernel_step(tx)
    new, expected = (jax.jit(step)(grads, state, params) for step in (ours, plain_step(tx)))
    used = any(isinstance(leaf, Written) for leaf in jax.tree.leaves(applied))
    assert used == (wrapper in USED)
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-6)


def test_other_transformations_and_errors_pass_through():
    params = tree()
    for tx in (optax.adamw(1e-3), optax.sgd(0.1)):
        state = tx.init(params)
        updates, expected = tx.update(params, state, params)
        new = kernel_step(tx)(params, state, params)
        assert same_bits(new, (optax.apply_updates(params, updates), expected))
    tx = madgrad(0.1)
    with pytest.raises(ValueError, match=r"must have the parameter's shape"):
        kernel_step(tx)({**params, "b": jnp.ones(8)}, tx.init(params), params)
    reducing = optax.chain(madgrad(0.1), optax.contrib.reduce_on_plateau())
    arguments = params, reducing.init(params), params
    assert same_bits(
        kernel_step(reducing, value=1.0)(*arguments), plain_step(reducing)(*arguments, value=1.0)
    )


def test_a_missing_backend_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delitem(sys.modules, "cubegrad.optax.pallas", raising=False)
    monkeypatch.delattr("cubegrad.optax.pallas", raising=False)
    jax.clear_caches()
    tx, params = madgrad(0.1), tree(shape=(64, 2048))
    with pytest.raises(ImportError, match="use kernel=False"):
        kernel_step(tx)(params, tx.init(params), params)


@pytest.mark.usefixtures("interpreted")
def test_modules_of_flax_and_equinox():
    nnx, equinox = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    tx = madgrad(1e-4)

    def loss(model):
        return (model(jnp.ones(256)) ** 2).sum()

    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    state = tx.init(nnx.state(model, nnx.Param))

    @nnx.jit
    def nnx_step(model, state):
        grads = nnx.grad(loss)(model)
        params, state = kernel_step(tx)(grads, state, nnx.state(model, nnx.Param))
        nnx.update(model, params)
        return state

    before = loss(model)
    nnx_step(model, state)
    assert loss(model) < before

    module = equinox.nn.Linear(256, 256, key=jax.random.key(0))

    @equinox.filter_jit
    def equinox_step(module, state):
        grads = equinox.filter_grad(loss)(module)
        params, rest = equinox.partition(module, equinox.is_inexact_array)
        params, state = kernel_step(tx)(grads, state, params)
        return equinox.combine(params, rest), state

    moved, _ = equinox_step(module, tx.init(equinox.filter(module, equinox.is_inexact_array)))
    assert loss(moved) < loss(module)


# ---------------------------------------------------------------- on a GPU, as far as a CPU gets
LOWERED = {
    "madgrad": lambda **options: madgrad(0.1, **options),
    "decoupled": lambda **o: madgrad(0.1, weight_decay=0.1, decoupled_weight_decay=True, **o),
    "estimated": lambda **options: madgrad("auto", **options),
    "no momentum": lambda **options: madgrad(0.1, momentum=0.0, **options),
    "mirror_madgrad": lambda **options: VARIANTS["mirror_madgrad"](**options),
    "madgradw": lambda **options: madgradw(1e-3, **options),
    "schedule-free": lambda **options: madgradw(1e-3, schedule_free=True, **options),
}


@pytest.fixture
def modules(monkeypatch):
    """The modules that Pallas hands to Triton, as text; JAX has no public way to them."""
    lowering = pytest.importorskip("jax._src.pallas.triton.lowering")
    lower, found = lowering.lower_jaxpr_to_triton_module, []

    def note(*arguments, **options):
        result = lower(*arguments, **options)
        found.append(result.module.operation.get_asm(enable_debug_info=False))
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", note)
    jax.clear_caches()
    return found


@pytest.mark.parametrize("dtype", [thorough("float32"), "bfloat16", thorough("float16")])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("variant", LOWERED)
def test_each_kernel_compiles_for_a_gpu(variant, compact, dtype, modules, tmp_path):
    """Lowered by Pallas, then compiled by the triton package, without a GPU.

    Arrays are read by 16 bytes a thread, all numbers stay in registers, and nothing is called.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    tx = LOWERED[variant](compact=compact)
    params = jax.ShapeDtypeStruct((1024, 512), dtype)
    text = lowered(kernel_step(tx), params, jax.eval_shape(tx.init, params), params)
    assert text.count("xla.gpu.triton") == 1
    path = tmp_path / "kernel.ttir"
    path.write_text("".join(modules))
    options = {"num_warps": 1 if compact else 4, "num_stages": 1, "enable_fp_fusion": True}
    ptx = triton.compile(str(path), target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert not re.search(r"\b(ld|st)\.local|\bcall\b", ptx)
    assert ("lg2.approx" in ptx) == (variant not in ("madgradw", "schedule-free"))


@pytest.mark.parametrize("learning_rate", [0.1, "auto"])
def test_nothing_becomes_wider_with_float64_enabled(learning_rate):
    with jax.enable_x64(True):
        tx, params = madgrad(learning_rate, compact=True), {"w": jnp.ones(SHAPE)}
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        state, step = tx.init(params), kernel_step(tx)
        assert lowered(step, params, state, params).count("xla.gpu.triton") == 1
        new = jax.eval_shape(step, params, state, params)
    assert jax.tree.map(lambda leaf: leaf.dtype, new) == jax.tree.map(
        lambda leaf: leaf.dtype, (params, state)
    )


def test_parameters_that_are_alike_share_a_kernel():
    """Or compiling hundreds of them would take minutes: those of GPT-2 large."""
    from shared.shapes import gpt2

    tx = madgrad(0.1, compact=True)
    params = [jax.ShapeDtypeStruct(s, "float32") for s in gpt2(36, 1280, 50257, 1024)]
    assert len(params) == 436
    text = lowered(kernel_step(tx), params, jax.eval_shape(tx.init, params), params)
    assert text.count("xla.gpu.triton") == 6
    assert len(re.findall(r"call @step", text)) == 36 * 4 + 2


def test_everything_that_a_kernel_writes_is_written_in_place():
    tx = madgrad("auto", compact=True, weight_decay=0.1, decoupled_weight_decay=True)
    params = jnp.ones(SHAPE)
    text = lowered(kernel_step(tx), params, tx.init(params), params)
    (call,) = re.findall(r"custom_call @__gpu\$xla\.gpu\.triton.*", text)
    # x, the codes and scales of z - x and ∛ν, and the scale of x_0
    assert call.count("output_operand_alias<") == 6


@pytest.mark.processes
def test_kernels_step_shards():
    script = Path(__file__).parents[1] / "support" / "jax_sharded_kernels.py"
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sharded"
