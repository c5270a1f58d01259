"""Which parameters a kernel steps, where, and what is done in its place elsewhere.

On its own, XLA stores what several results of a step share, and loads it again. A kernel
(pallas.py) computes x, the state and the sums of learning_rate="auto" from one load of each array.
That pays only if it writes the parameter: an update would be another array.

Other devices than NVIDIA's GPUs take the step that they always take (`Plain`), and so does a batch
of `vmap`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from cubegrad import codec
from cubegrad import rule as rules
from cubegrad.codec import BLOCK
from cubegrad.optax import xla
from cubegrad.options import Hyper
from cubegrad.rule import Rule

Buffers = dict[str, Array]
Result = tuple[Array, Buffers, xla.Sums]  # the new parameter, its buffers, the sums of the step
Plain = Callable[..., Result]  # (form, numbers, count, param, grad, old)

DTYPES = ("float32", "bfloat16", "float16")
LEAST = 2**16  # a step of fewer sums is bound by its launch, and XLA fuses it as well
INTERPRET = False  # tests run the kernels on a CPU


class At(NamedTuple):
    """Where a number of the step lies among those that a kernel loads."""

    place: int


class Form(NamedTuple):
    """What is compiled in. Parameters with the same form and shapes are traced once."""

    rule: Rule
    fixed: Any  # Hyper, with an At for each number that is not known when it is traced
    with_sums: bool
    rounds: bool  # half precision with sums, at random
    sharding: NamedSharding | None
    interpret: bool

    def hyper(self, numbers: Any) -> Any:
        """The numbers of the step."""
        known: Any = (numbers[x.place] if isinstance(x, At) else x for x in self.fixed)
        return Hyper(*known)


def numbers(rule: Rule, h: Hyper, count: Array, started: Array | None) -> tuple[Any, Array]:
    """`Form.fixed`, and what `Form.hyper` takes: λ, whether gradients count, then the others."""
    weight = rules.step_weight(rule, h.lr, count.astype(jnp.float32))
    fixed: Any = []
    values = [weight, 1 if started is None else started]
    for number in h:
        unknown = isinstance(number, Array)
        fixed.append(At(len(values)) if unknown else number)
        values += [number] if unknown else []
    return Hyper(*fixed), jnp.stack([jnp.asarray(value, jnp.float32) for value in values])


def fits(param: Array, grad: Array, old: Buffers, rounds: bool, sharding: Any) -> bool:
    """Whether a kernel can step the parameter: whole blocks, of dtypes that fit into float32."""
    coded = "root_code" in old
    arrays = (param, grad) if coded else (param, grad, *old.values())
    if any(array.dtype.name not in DTYPES for array in arrays) or param.size >= 2**31:
        return False
    shape = param.shape
    if sharding is not None:
        in_rows = coded or (rounds and param.dtype.name in codec.ROUND)  # its indices follow on
        if in_rows and any(sharding.spec[1:]):
            return False
        try:
            shape = sharding.shard_shape(shape)
        except ValueError:  # shards of different sizes
            return False
    own = jax.ShapeDtypeStruct(shape, param.dtype)
    if coded and len(shape) > 1 and codec.row_length(shape) % BLOCK:
        return False
    return width(own, old) > 0 and (coded or own.size >= LEAST)


def width(param: Any, old: Buffers) -> int:
    """The numbers of a block: a power of two. 0 if the parameter has no whole ones."""
    widths = (BLOCK,) if "root_code" in old else (4 * BLOCK, 2 * BLOCK, BLOCK)
    return next((width for width in widths if param.size % width == 0), 0)


@partial(jax.jit, static_argnums=(0, 1))
def step(
    plain: Plain, form: Form, numbers: Array, count: Array, param: Array, grad: Array, old: Buffers
) -> Result:
    """One parameter's step; `plain` takes it where there is no kernel.

    Compiled by itself, so that parameters that are alike share a kernel: for the 436 arrays of
    GPT-2 large there are 6.
    """
    arguments = numbers, count, param, grad, old
    kernel = partial(_unless_batched, plain, form)
    if form.interpret:
        return kernel(*arguments)
    return lax.platform_dependent(*arguments, cuda=kernel, default=partial(plain, form))  # type: ignore[no-any-return]


def _unless_batched(plain: Plain, form: Form, *arguments: Any) -> Result:
    tree: Any
    leaves, tree = jax.tree.flatten(arguments)

    @jax.custom_batching.custom_vmap
    def run(*leaves: Array) -> Result:
        return _over_shards(form, *tree.unflatten(leaves))

    @run.def_vmap
    def run_batch(_: int, batched: list[bool], *leaves: Array) -> Any:
        def one(*leaves: Array) -> Result:
            return plain(form, *tree.unflatten(leaves))

        new = jax.vmap(one, [0 if each else None for each in batched])(*leaves)
        return new, jax.tree.map(lambda _: True, new)

    return run(*leaves)  # type: ignore[no-any-return]


def _over_shards(
    form: Form, numbers: Array, count: Array, param: Array, grad: Array, old: Buffers
) -> Result:
    """The kernel on each device, over what lies there."""
    try:
        from cubegrad.optax import pallas
    except ImportError as error:
        raise ImportError(
            f"kernel=True needs jax.experimental.pallas.triton of JAX 0.7 or newer, and JAX "
            f"{jax.__version__} lacks it; use kernel=False"
        ) from error

    def local(
        first: Any, numbers: Array, count: Array, param: Array, grad: Array, old: Buffers
    ) -> Result:
        whole = jnp.stack([count, jnp.asarray(first, jnp.int32)])
        return pallas.step(form, numbers, whole, param, grad, old)

    if form.sharding is None:
        return local(0, numbers, count, param, grad, old)
    own, rows, none = form.sharding.spec, PartitionSpec(*form.sharding.spec[:1]), PartitionSpec()

    def shard(numbers: Array, count: Array, param: Array, grad: Array, old: Buffers) -> Result:
        parts = any(rows)
        first = lax.axis_index(rows[0]) * param.size if parts else 0
        new_param, new, sums = local(first, numbers, count, param, grad, old)
        axes = jax.tree.leaves(tuple(own))
        return new_param, new, lax.psum(sums, axes) if axes and sums else sums

    specs = {name: rows if name.endswith("scale") else own for name in old}
    sharded = jax.shard_map(
        shard,
        mesh=form.sharding.mesh,
        in_specs=(none, none, own, own, specs),
        out_specs=(own, specs, (none,) * 3 if form.with_sums else ()),
        check_vma=False,
    )
    new: Result = sharded(numbers, count, param, grad, old)
    return new
