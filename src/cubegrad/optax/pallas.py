"""A step as one Pallas kernel, whose body is codec.step or rule.step.

A kernel sees an array as rows of one block each. It loads every number once and writes the new one
where the old one was. On an NVIDIA GPU Pallas lowers it to Triton.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import CompilerParams, elementwise_inline_asm

from cubegrad import codec, distance
from cubegrad import rule as rules
from cubegrad.codec import Codes
from cubegrad.optax import codes, xla
from cubegrad.optax.kernel import Buffers, Form, Result, width
from cubegrad.options import Hyper

SPAN = 2  # blocks of codes that one program steps, one after the other
WARP = 256  # numbers of a block that 32 threads share
SMALLEST = 2.0**-126  # normal number: the instructions below take smaller ones for 0
MAGIC = 12582912.0  # 1.5 · 2^23: float32 numbers beside it are integers
New = tuple[Array, Mapping[str, Any], Any]  # x, the buffers, and sums or None


def _special(instruction: str, x: Array) -> Array:
    """One instruction of a GPU's special-function unit, two ulps off at most."""
    (result,) = elementwise_inline_asm(
        f"{instruction}.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


EXACT: dict[str, Callable[[Array], Array]] = {
    "lg2": jnp.log2,
    "ex2": jnp.exp2,
    "rcp": lambda x: 1 / x,
    "sqrt": jnp.sqrt,
}


def functions(form: Form) -> Any:
    """What rule.py, codec.py and distance.py take as xp inside of a kernel.

    The interpreter is compiled by XLA, which leaves out conversions there and back and additions of
    what is taken away again; both round in Triton.
    """
    interpret, eps = form.interpret, form.fixed.eps

    def special(instruction: str, x: Array) -> Array:
        return EXACT[instruction](x) if interpret else _special(instruction, x)

    def cbrt(x: Array) -> Array:
        inverse = special("ex2", special("lg2", x) * (-1 / 3))
        root = x * inverse * inverse
        root = root + root * ((1 - root * inverse) * (2 / 3))  # what it lacks of ∛x
        return jnp.where(x < SMALLEST, 0.0, jnp.where(x < jnp.inf, root, x))

    def sqrt(x: Array) -> Array:
        """0 for subnormal numbers, where ε is so large that this makes no difference."""
        return special("sqrt", x) if isinstance(eps, float) and eps > 1e-30 else jnp.sqrt(x)

    def quotient(numerator: Any, denominator: Array) -> Array:
        """As `xla.quotient`: the choices keep the product apart from a subtraction after it."""
        ratio = numerator * special("rcp", denominator)
        ratio = jnp.where(denominator < SMALLEST, 0.0, ratio)
        return jnp.where(ratio == 0, 0.0, ratio)

    def nearest(x: Array, dtype: str) -> Array:
        return xla.nearest(x, dtype) if interpret else x.astype(dtype).astype(x.dtype)

    def isfinite(x: Array) -> Array:
        return abs(x) < jnp.inf

    own = {
        "cbrt": cbrt,
        "sqrt": sqrt,
        "quotient": quotient,
        "nearest": nearest,
        "isfinite": isfinite,
        "where_finite": lambda x, value: jnp.where(isfinite(x), value, 0.0),
        "round": jnp.round if interpret else lambda x: (x + MAGIC) - MAGIC,
        "total": jnp.sum,
    }
    return SimpleNamespace(**vars(xla.CODEC) | own)


class Block(NamedTuple):
    """One block of a parameter, and the step that it takes."""

    form: Form
    h: Hyper  # its lr is λ
    step: Array  # k
    first: Array  # index of the first coordinate
    dtype: str  # of the parameter
    x: Array  # in float32, as g
    g: Array
    old: Buffers

    def place(self) -> Array:
        return lax.broadcasted_iota(jnp.int32, self.x.shape, 1)

    def rule(self) -> tuple[rules.Rule, Any]:
        """The rule and the step for which lr is λ, so that no kernel raises k+1 to a power.

        Where ν is a sum nothing else depends on the step: at step 0, λ is lr for distance.py too.
        """
        rule = self.form.rule
        step = 0 if rule.never_falls else self.step.astype(jnp.float32)
        return rule._replace(growth_root=None), step


def step_codes(xp: Any, block: Block) -> New:
    rule, k = block.rule()
    bits = codec.spread_bits(block.step, block.first, block.place())
    kept, with_sums = Codes(*map(block.old.get, codes.BUFFERS)), block.form.with_sums
    x, new, sums = codec.step(
        xp, rule, block.h, k, bits, block.x, block.g, kept, block.dtype, with_sums
    )
    return x, dict(zip(codes.BUFFERS, new, strict=True)), sums


def step_sums(xp: Any, block: Block) -> New:
    rule, k = block.rule()
    old = {name: buffer.astype(jnp.float32) for name, buffer in block.old.items()}
    exact, new = rules.step(xp, rule, block.h, k, block.x, block.g, old)
    sums = None
    if block.form.with_sums:
        sums = distance.step_sums(xp, rule, block.h, k, block.x, block.g, old, exact, new)
    if block.dtype not in codec.ROUND:
        return exact, new, sums
    if block.form.rounds:
        index = block.first + block.place()
        stored = codec.round_param(xp, block.dtype, exact, block.step, index, block.h.momentum)
    else:
        stored = xp.nearest(exact, block.dtype)
    rules.take_rounding(new, exact, stored)
    return stored, new, sums


def _program(form: Form, names: list[str], written: list[str], span: int, *refs: Any) -> None:
    """`span` blocks. The references are those of `step`: what is read, then what is written."""
    numbers, whole, param, grad, *others = refs
    old, others = dict(zip(names, others, strict=False)), others[len(names) :]
    new_param, *others = others
    new, xp = dict(zip(written, others, strict=False)), functions(form)
    run = step_codes if "root_code" in names else step_sums
    h, program = form.hyper(numbers)._replace(lr=numbers[0]), pl.program_id(0)

    def one(i: Any, so_far: xla.Sums) -> xla.Sums:
        at = pl.ds(i, 1), slice(None)
        x, g = param[at].astype(jnp.float32), grad[at].astype(jnp.float32)
        if form.with_sums:  # before there is an estimate all gradients count as 0
            g = jnp.where(numbers[1] > 0, g, 0.0)
        first = whole[1] + (program * span + i) * param.shape[1]
        kept = {name: ref[at] for name, ref in old.items()}
        x, buffers, sums = run(xp, Block(form, h, whole[0], first, param.dtype.name, x, g, kept))
        new_param[at] = x.astype(new_param.dtype)
        for name, ref in new.items():
            ref[at] = buffers[name].astype(ref.dtype)
        return tuple(map(jnp.add, so_far, sums)) if form.with_sums else ()

    zeros = (jnp.float32(0),) * 3 if form.with_sums else ()
    sums = lax.fori_loop(0, span, one, zeros) if span > 1 else one(0, zeros)
    for column, number in enumerate(sums):
        others[-1][0, column] = number


def step(
    form: Form, numbers: Array, whole: Array, param: Array, grad: Array, old: Buffers
) -> Result:
    """The kernel over the arrays of one device.

    `numbers` are for `Form.hyper`, `whole` has the step and the index of the first coordinate.
    """
    length = width(param, old)
    rows, span = param.size // length, SPAN if "root_code" in old else 1
    span = span if rows % span == 0 else 1
    written = [name for name in old if name != "initial_code"]
    if form.fixed.shrink is None:  # only decay moves x_0
        written = [name for name in written if not name.startswith("initial")]

    def shape(name: str) -> tuple[int, int]:
        return rows, 1 if name.endswith("scale") else length

    def spec(name: str) -> Any:
        return pl.BlockSpec((span, shape(name)[1]), lambda i: (i, 0))

    known = [pl.BlockSpec(array.shape, lambda _: (0,)) for array in (numbers, whole)]
    results = {"param": param} | {name: old[name] for name in written}
    shapes = [jax.ShapeDtypeStruct(shape(name), array.dtype) for name, array in results.items()]
    specs = [spec(name) for name in results]
    if form.with_sums:
        shapes.append(jax.ShapeDtypeStruct((rows // span, 4), jnp.float32))
        specs.append(pl.BlockSpec((1, 4), lambda i: (i, 0)))
    names = [*old]
    new_param, *new = pl.pallas_call(
        partial(_program, form, names, written, span),
        out_shape=shapes,
        grid=(rows // span,),
        in_specs=[*known, *map(spec, ("param", "grad", *names))],
        out_specs=specs,
        input_output_aliases={2: 0} | {4 + names.index(n): 1 + i for i, n in enumerate(written)},
        compiler_params=CompilerParams(num_warps=length // WARP, num_stages=1),
        interpret=form.interpret,
        name=f"{form.rule.name}_{'codes' if 'root_code' in old else 'sums'}",
    )(
        numbers,
        whole,
        *(a.reshape(shape(name)) for name, a in ({"param": param, "grad": grad} | old).items()),
    )
    stored = {n: a.reshape(old[n].shape) for n, a in zip(written, new, strict=False)}
    sums = tuple(jnp.sum(new[-1][:, i]) for i in range(3)) if form.with_sums else ()
    return new_param.reshape(param.shape), old | stored, sums
