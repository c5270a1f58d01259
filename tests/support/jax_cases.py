"""The grid of cases.py for JAX, ways to build and wrap the transformations, and to run them."""

from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax import lax

from cubegrad.optax import madgrad, madgradw, mirror_madgrad

each_method = pytest.mark.parametrize("method", cases.METHODS, ids=str)
FACTORIES = {
    "madgrad": madgrad,
    "mirror": mirror_madgrad,
    "madgradw": madgradw,
    "schedule-free": partial(madgradw, schedule_free=True),
}
VARIANTS = {
    "madgrad": lambda lr=0.1, **options: madgrad(lr, **options),
    "madgrad, no momentum": lambda lr=0.1, **options: madgrad(lr, momentum=0.0, **options),
    "madgrad, estimated": lambda lr=None, **options: madgrad("auto", lr_factor=lr, **options),
    "mirror_madgrad": lambda lr=0.1, **options: mirror_madgrad(lr, **options),
    "madgradw": lambda lr=0.1, **options: madgradw(lr, **{"weight_decay": 0.0} | options),
    "schedule-free": lambda lr=0.1, **options: madgradw(
        lr, **{"weight_decay": 0.0, "schedule_free": True} | options
    ),
    "madgradw, estimated": lambda lr=None, **options: madgradw(
        "auto", lr_factor=lr, **{"weight_decay": 0.0} | options
    ),
    "schedule-free, estimated": lambda lr=None, **options: madgradw(
        "auto", lr_factor=lr, **{"weight_decay": 0.0, "schedule_free": True} | options
    ),
}
each_variant = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.thorough)
        if name == "schedule-free, estimated"
        else name
        for name in VARIANTS
    ],
)
# The masks leave only the parameter "w" to the transformation.
WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(100.0), tx),
    "named_chain": lambda tx: optax.named_chain(("ours", tx), ("half", optax.scale(0.5))),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, every_k_schedule=1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, lambda params: {name: name == "w" for name in params}),
    "partition": lambda tx: optax.partition(
        {True: tx, False: optax.set_to_zero()},
        lambda params: {name: name == "w" for name in params},
    ),
    "flatten": optax.flatten,
}
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}


def build(method: cases.Method, options: dict[str, Any]) -> optax.GradientTransformation:
    """The method with the grid's defaults; lr is its `learning_rate`."""
    base = {"lr": 1e-2, "momentum": 0.9, "eps": 1e-6, "weight_decay": 0.0} | options
    base.setdefault("decoupled_weight_decay", False)
    return FACTORIES[method.name](base.pop("lr"), **base)


def scheduled(method: cases.Method, options: dict[str, Any], steps: int) -> Any:
    """The method with the learning rates of cases.lr_at as a schedule."""
    base = options.get("lr", 1e-2)
    rates = jnp.asarray([cases.lr_at(k, base) for k in range(steps)])
    reference = {"reference_lr": base} if options.get("decoupled_lr") else {}
    return build(method, options | {"lr": lambda count: rates[count], **reference})


def injected(variant: str) -> Any:
    """The variant under optax.inject_hyperparams."""
    name, _, how = variant.partition(", ")
    factory = {"mirror_madgrad": mirror_madgrad, "madgradw": madgradw}.get(name, madgrad)
    given: dict[str, Any] = {"learning_rate": 0.1}
    if how == "estimated":
        given = {"learning_rate": "auto", "lr_factor": 1.0}
    if name == "schedule-free":
        schedule_free = optax.inject_hyperparams(madgradw, static_args="momentum")
        return schedule_free(**given, weight_decay=0.0, schedule_free=True)
    if how == "estimated":
        return optax.inject_hyperparams(factory)(**given, weight_decay=0.0)
    momentum = 0.0 if variant == "madgrad, no momentum" else 0.9
    return optax.inject_hyperparams(factory)(0.1, momentum=momentum, weight_decay=0.0)


def stepper(tx: optax.GradientTransformation, **jit: Any) -> Any:
    """One compiled step: (params, state, grads) -> (params, state)."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, **jit)


def run(tx: optax.GradientTransformation, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """The last parameters and state, by a compiled step for each gradient."""
    state, step = tx.init(params), stepper(tx)
    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def _no_record(params: Any, state: Any) -> None:
    """Record nothing."""


def scan(
    tx: optax.GradientTransformation, params: Any, grads: Any, record: Any = _no_record
) -> Any:
    """All steps in one program; each leaf of `grads` has the steps as its first dimension.

    Returns the last (parameters, state), and record(parameters, state) after each step.
    """
    return _scan(tx, params, lambda _, grad: grad, grads, None, record)


def descend(
    tx: optax.GradientTransformation,
    params: Any,
    loss: Any,
    steps: int,
    record: Any = _no_record,
) -> Any:
    """As `scan`, with the gradients of `loss`."""

    def gradient(params: Any, _: None) -> Any:
        # JAX's gradient of a complex parameter is the conjugate of the direction of ascent.
        return jax.tree.map(jnp.conj, jax.grad(loss)(params))

    return _scan(tx, params, gradient, None, steps, record)


def _scan(tx: Any, params: Any, gradient: Any, xs: Any, length: int | None, record: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient(params, x), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), record(params, state)

    return jax.jit(lambda *carry: lax.scan(step, carry, xs, length))(params, tx.init(params))


def array(tensor: torch.Tensor) -> jax.Array:
    """The same numbers in the same dtype; numpy has no bfloat16.

    A copy: JAX reads a numpy array when it gets to it, and by then the tensor may have changed.
    """
    exact = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return jnp.asarray(exact.numpy().copy()).astype(str(tensor.dtype).removeprefix("torch."))


def randn(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    return array(cases.randn(shape, DTYPES[dtype], seed))


def numbers(value: jax.Array) -> np.ndarray:
    """The array as float64 coordinates; a complex number is two."""
    if jnp.iscomplexobj(value):
        value = jnp.stack([value.real, value.imag], axis=-1)
    return np.asarray(value).astype(np.float64)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees are equal in every bit, even in the sign of a zero."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )
