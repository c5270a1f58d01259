"""apply_gradients(kernel=True) as far as a CPU gets: up to a GPU's machine code, over shards."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
from jax import numpy as jnp  # noqa: E402
from jax_cases import VARIANTS  # noqa: E402
from jax_kernels import SHAPE, kernel_step, lowered, marks, thorough  # noqa: E402

from cubegrad.optax import madgrad, madgradw  # noqa: E402

pytestmark = marks


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
