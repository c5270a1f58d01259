"""Parameters whose state is kept in codes: which ones, what they start with, their step.

codec.py says what a code means. A block is up to 256 numbers that follow each other in one row of
the parameter, and a row is all that has one index in the first dimension. The first dimension is
never merged with another, so the scales are sharded as the parameter is. A parameter of one
dimension is stepped as rows of one block each.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from cubegrad import cautions, codec
from cubegrad.codec import BLOCK, Codes, row_length
from cubegrad.optax import xla

Shape = tuple[int, ...]
Result = tuple[Array, Codes, xla.Sums | None]
Run = Callable[..., Any]  # codec.step of a rule, with the numbers of the step

# The buffers of a state, in the order of `codec.Codes`.
BUFFERS = tuple(name if name.endswith("scale") else f"{name}_code" for name in Codes._fields)
SCALES = tuple(name.endswith("scale") for name in Codes._fields)


def why_not_coded(param: Array) -> str | None:
    """What keeps the parameter's state from being in codes.

    How it is sharded does not count: inside `jit` that is not known.
    """
    return codec.why_not_coded(param.dtype.name, _real_shape(param))


def warn_of_uncoded(params: Any) -> None:
    tensors = jax.tree_util.tree_leaves_with_path(params)
    cautions.warn_of_uncoded(
        (f"params{jax.tree_util.keystr(path)}", jnp.size(param), why_not_coded(jnp.asarray(param)))
        for path, param in tensors
    )


def _real_shape(param: Array) -> Shape:
    return (*param.shape, 2) if jnp.iscomplexobj(param) else param.shape


def _real(array: Array) -> Array:
    """The real numbers that the rule works on; a complex number is two."""
    return jnp.stack([array.real, array.imag], -1) if jnp.iscomplexobj(array) else array


def _blocks(array: Array) -> Array:
    """(rows, blocks, numbers of a block); the last block of a row is filled up with zeros."""
    if array.ndim == 1:  # each block a row
        return jnp.pad(array, (0, -len(array) % BLOCK)).reshape(-1, 1, BLOCK)
    rows = array.reshape(len(array), row_length(array.shape))
    width = min(BLOCK, rows.shape[1])
    if lacking := -rows.shape[1] % width:
        rows = jnp.pad(rows, ((0, 0), (0, lacking)))
    return rows.reshape(len(rows), -1, width)


def _joined(blocks: Array, shape: Shape) -> Array:
    """The inverse of `_blocks`."""
    if len(shape) == 1:
        return blocks.reshape(-1)[: shape[0]]
    return blocks.reshape(len(blocks), -1)[:, : row_length(shape)].reshape(shape)


def initial_codes(param: Array, names: Sequence[str]) -> dict[str, Array]:
    """The named buffers before the first step, none of them an alias."""
    real, scale = jax.jit(_parts)(param)
    found = {
        "offset_code": jnp.zeros_like(real, dtype=jnp.int8),
        "offset_scale": jnp.zeros_like(scale),
        "root_code": jnp.zeros_like(real, dtype=jnp.uint8),
        "root_scale": jnp.zeros_like(scale),
    }
    if "initial_code" in names:
        found["initial_code"], found["initial_scale"] = _initial(real, scale)
    return {name: found[name] for name in names}


def _initial_dtype(param: Array) -> Any:
    """Of the codes of x_0: half precision is small enough as it is."""
    return param.dtype if param.dtype.itemsize == 2 else jnp.dtype(jnp.int16)


def _parts(param: Array) -> tuple[Array, Array]:
    """Arrays that are sharded as the codes and the scales have to be."""
    real = _real(param)
    scale = _blocks(real)[..., 0].astype(jnp.float32)
    return real, scale[:, 0] if real.ndim == 1 else scale


def _initial(real: Array, scale: Array) -> tuple[Array, Array]:
    """Codes and scales of x_0."""
    if _initial_dtype(real) == real.dtype:  # exact; decoupled decay changes the scale
        return jnp.array(real, copy=True), jnp.ones_like(scale)
    return jax.jit(_encode_initial)(real)  # type: ignore[no-any-return]


def _encode_initial(real: Array) -> tuple[Array, Array]:
    codes, scale = codec.encode_integers(xla.CODEC, _blocks(real), codec.LARGEST_INITIAL)
    own = scale[..., 0]
    return _joined(codes, real.shape).astype(jnp.int16), own[:, 0] if real.ndim == 1 else own


def offset(param: Array, code: Array, scale: Array) -> Array:
    """z - x of a parameter, as its codes have it."""
    blocks = _blocks(code) >> 1  # the lowest bit is the root's
    numbers = blocks.astype(jnp.float32) * scale.reshape(*blocks.shape[:2], 1)
    real = _joined(numbers, code.shape)
    return lax.complex(real[..., 0], real[..., 1]) if jnp.iscomplexobj(param) else real


def step(
    run: Run, count: Array, param: Array, grad: Array, codes: Codes, with_sums: bool
) -> Result:
    """The move of the parameter, the codes after it, and the sums if they are wanted.

    The move is in float32, also for half precision. There x is rounded at random, z - x is taken
    from the rounded x, and no move of the parameter's own dtype would lead to all of its numbers.

    Compiled for a CPU, some rows are stepped at a time: on its own, XLA stores seven intermediate
    results for each number, and allocating the memory for that takes longer than the step.
    """
    if codes.initial is not None and codes.initial.dtype != _initial_dtype(_real(param)):
        raise ValueError(
            f"a parameter is {param.dtype}, and must have the dtype with which its state was made, "
            f"where x_0 is {codes.initial.dtype}; use optax.apply_updates, which keeps the dtype"
        )
    if param.ndim == 1:
        return _step_flat(run, count, param, grad, codes, with_sums)
    whole = partial(_step, run, count, with_sums, 0)
    rows = max(1, xla.CHUNK // 2 // row_length(_real_shape(param)))
    compiled = isinstance(param, jax.core.Tracer) or isinstance(grad, jax.core.Tracer)
    if not compiled or xla.may_be_sharded_on_cpu() or len(param) < 2 * rows:
        return whole(param, grad, codes)
    by_rows = partial(_step_by_rows, run, count, with_sums, rows)
    return lax.platform_dependent(param, grad, codes, cpu=by_rows, default=whole)  # type: ignore[no-any-return]


def _step_flat(
    run: Run, count: Array, param: Array, grad: Array, codes: Codes, with_sums: bool
) -> Result:
    """A parameter of one dimension, as rows of one block each."""
    rows = Codes(
        *(
            None if code is None else code[:, None] if is_scale else _blocks(code)[:, 0]
            for code, is_scale in zip(codes, SCALES, strict=True)
        )
    )
    x, g = _blocks(param)[:, 0], _blocks(grad)[:, 0]
    move, new, sums = step(run, count, x, g, rows, with_sums)
    flat = (
        None if before is None else code.reshape(-1)[: len(before)]
        for code, before in zip(new, codes, strict=True)
    )
    return move.reshape(-1)[: len(param)], Codes(*flat), sums


def _step_by_rows(
    run: Run, count: Array, with_sums: bool, rows: int, param: Array, grad: Array, codes: Codes
) -> Result:
    dtype = jnp.promote_types(param.dtype, jnp.float32)
    # Moves overwrite the gradient: inside a jitted training step its memory is free by then.
    in_place = grad.dtype == dtype
    moves = grad if in_place else jnp.zeros(param.shape, dtype)
    sums = tuple(jnp.zeros([], jnp.float32) for _ in range(3)) if with_sums else None

    def step_rows(first: Any, rows: int, so_far: Result) -> Result:
        def cut(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(array, first, rows)

        moves, codes, sums = so_far
        old = cut(param), cut(moves if in_place else grad), jax.tree.map(cut, codes)
        # A condition that XLA cannot know to be true: it does not fuse what is inside with what is
        # outside. Otherwise it would read rows that are written already, and copy all of them.
        move, new, added = lax.cond(
            count >= 0,
            partial(_step, run, count, with_sums, first),
            lambda _, move, codes: (move.astype(dtype), codes, sums),
            *old,
        )

        def put(array: Array, piece: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(array, piece, first, 0)

        new = jax.tree.map(put, codes, new)
        return put(moves, move), new, jax.tree.map(jnp.add, sums, added)

    pieces, rest = divmod(len(param), rows)
    result = (moves, codes, sums)
    result = lax.fori_loop(0, pieces, lambda i, so_far: step_rows(i * rows, rows, so_far), result)
    return step_rows(pieces * rows, rest, result) if rest else result


def _step(
    run: Run,
    count: Array,
    with_sums: bool,
    first_row: Any,
    param: Array,
    grad: Array,
    codes: Codes,
) -> Result:
    real = _real(param)
    x, g = (_blocks(a.astype(jnp.float32)) for a in (real, _real(grad)))
    bits = codec.block_bits(count, _indices(x.shape, first_row, row_length(real.shape)))
    k, old = count.astype(jnp.float32), _in_blocks(codes)
    new_x, new, sums = run(k, bits, x, g, old, param.dtype.name, with_sums)
    move = _joined(-(x - new_x), real.shape)  # -0 where nothing moves, which changes no bit
    if jnp.iscomplexobj(param):
        move = lax.complex(move[..., 0], move[..., 1])
    return move, _stored(new, codes), sums


def _indices(shape: Shape, first_row: Any, length: int) -> Array:
    """The coordinates' indices in the whole parameter, modulo 2^32; `length` is that of a row."""
    i, j, k = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    indices: Array = (i + first_row) * length + j * shape[-1] + k
    return indices


def _in_blocks(codes: Codes) -> Codes:
    cut = (
        None if code is None else code[..., None] if name.endswith("scale") else _blocks(code)
        for name, code in zip(codes._fields, codes, strict=True)
    )
    return Codes(*cut)


def _stored(blocks: Codes, old: Codes) -> Codes:
    """The codes as the state has them, the inverse of `_in_blocks`."""
    stored = (
        None if before is None else _joined(code, before.shape).astype(before.dtype)
        for code, before in zip(blocks, old, strict=True)
    )
    return Codes(*stored)
