"""Half-precision parameters with sums, rounded at random as those with codes are."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from cubegrad import codec
from cubegrad.optax import xla
from cubegrad.options import Hyper


def rounded(h: Hyper, count: Array, dtype: str, param: Array) -> Array:
    """A new parameter as one of its own dtype, still as float32."""
    x, index = param.astype(jnp.float32), _indices(param.shape)
    new: Array = codec.round_param(xla.CODEC, dtype, x, count, index, h.momentum)
    return new


def _indices(shape: tuple[int, ...]) -> Any:
    """The coordinates' indices, modulo 2^32; by axes, so that a sharded array stays sharded."""
    strides = (math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    wrapped = ((stride + 2**31) % 2**32 - 2**31 for stride in strides)
    axes = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape)))
    return sum((i * stride for i, stride in zip(axes, wrapped, strict=True)), jnp.int32(0))
