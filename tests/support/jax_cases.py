"""The grid of cases.py for JAX: the same methods, options and numbers."""

from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import cubegrad.optax

FACTORIES = {"madgrad": cubegrad.optax.madgrad, "mirror": cubegrad.optax.mirror_madgrad}
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


def build(method: cases.Method, options: dict[str, Any]) -> optax.GradientTransformation:
    """With the grid's defaults, and lr as `learning_rate`."""
    base = {"lr": 1e-2, "momentum": 0.9, "eps": 1e-6} | options
    return FACTORIES[method.name](base.pop("lr"), **base)


def scheduled(method: cases.Method, options: dict[str, Any], steps: int) -> Any:
    """With the learning rates of cases.lr_at, as a schedule."""
    base = options.get("lr", 1e-2)
    rates = jnp.asarray([cases.lr_at(k, base) for k in range(steps)])
    reference = {"reference_lr": base} if options.get("decoupled_lr") else {}
    return build(method, options | {"lr": lambda count: rates[count], **reference})


def stepper(tx: optax.GradientTransformation, **jit: Any) -> Any:
    """One compiled step: (params, state, grads) -> (params, state)."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, **jit)


def array(tensor: torch.Tensor) -> jax.Array:
    """The tensor's numbers, in its dtype."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return jnp.asarray(wide.numpy()).astype(str(tensor.dtype).removeprefix("torch."))


def randn(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return array(cases.randn(shape, DTYPES[dtype], seed))


def numbers(value: jax.Array) -> np.ndarray:
    """As float64 coordinates; a complex number is two."""
    if jnp.iscomplexobj(value):
        value = jnp.stack([value.real, value.imag], axis=-1)
    return np.asarray(value).astype(np.float64)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the sign of a zero."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )
