"""The arrays of one parameter: which buffers are kept, in which dtype, how the rule sees them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from cubegrad.optax import codes
from cubegrad.optax.checks import Settings

SUMS = ("grad_sum", "grad_sq_sum")  # start at 0
POINTS = ("initial_param", "z")  # start as copies of the parameter
OFFSET = "dual_offset"  # starts at 0


def buffer_names(state_type: Any) -> tuple[str, ...]:
    """The fields of a state that are trees of buffers, in the order of the rule's arguments."""
    known = (*SUMS, *POINTS, OFFSET, *codes.BUFFERS)
    return tuple(name for name in state_type._fields if name in known)


def compute_dtype(param: Array, *others: Any) -> Any:
    """The dtype a step is computed in: at least float32, and no narrower than `others`.

    In float16 the square of a gradient of 300 overflows.
    """
    return jnp.result_type(jnp.promote_types(param.dtype, jnp.float32), *others)


def initial_buffers(
    settings: Settings, names: Sequence[str], param: ArrayLike
) -> dict[str, Array | None]:
    """The buffers before the first step, never an alias of `param`; None for one not kept."""
    param, kept = jnp.asarray(param), dict[str, Array | None]()
    if settings.compact and codes.why_not_coded(param) is None:
        coded = [name for name in names if name in codes.BUFFERS]
        if settings.no_momentum:  # x is z
            coded = [name for name in coded if not name.startswith("offset")]
        kept |= codes.initial_codes(param, coded)
    else:
        sums = [name for name in names if name not in codes.BUFFERS]
        keeps_all = {OFFSET, "initial_param"} <= set(sums)  # an estimate asks for both
        kept |= {name: _initial_buffer(settings, name, param, keeps_all) for name in sums}
    return {name: kept.get(name) for name in names}


def _initial_buffer(settings: Settings, name: str, param: Array, keeps_all: bool) -> Array | None:
    sum_dtype = point_dtype = compute_dtype(param)
    if settings.state_dtype is not None:
        point_dtype = compute_dtype(param, settings.state_dtype)
        # JAX has no complex numbers with parts narrower than float32.
        sum_dtype = point_dtype if jnp.iscomplexobj(param) else jnp.dtype(settings.state_dtype)
    if name in SUMS:
        return jnp.zeros_like(param, dtype=sum_dtype)
    # Without momentum z is x, and x_0 can be recovered, unless something is stored rounded.
    if settings.no_momentum and not keeps_all and param.dtype == sum_dtype == point_dtype:
        return None
    if name == OFFSET:
        return jnp.zeros_like(param, dtype=point_dtype)
    return jnp.array(param, dtype=point_dtype, copy=True)


def real_parts(arrays: dict[str, Array]) -> list[dict[str, Array]]:
    """The real and imaginary parts of complex arrays; real arrays as they are, in a list of one."""
    if not any(map(jnp.iscomplexobj, arrays.values())):
        return [arrays]
    return [{n: a.real for n, a in arrays.items()}, {n: a.imag for n, a in arrays.items()}]


def from_real_parts(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """The inverse of `real_parts`."""
    real, *imag = parts
    return {n: lax.complex(real[n], imag[0][n]) for n in real} if imag else real
