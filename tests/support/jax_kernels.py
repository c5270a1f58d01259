"""Steps by apply_gradients with kernels and without, what they are lowered to, a tree for them."""

from contextlib import nullcontext
from functools import partial

import jax
import pytest
from jax_cases import randn

from cubegrad.optax import apply_gradients

SHAPE = (64, 1024)
thorough = partial(pytest.param, marks=pytest.mark.thorough)
marks = [
    pytest.mark.compilation,
    # From JAX 0.11 on, and about the backend alone.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


def interpret(monkeypatch):
    """Run kernels on a CPU; on a GPU they run on it."""
    monkeypatch.setattr("cubegrad.optax.kernel.INTERPRET", jax.default_backend() != "gpu")


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
