"""MADGRAD for JAX: optax transformations over the same rule that the PyTorch backends run."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from cubegrad import options, rule, xla
from cubegrad.optax_checks import (
    NUMBERS,
    Schedule,
    Settings,
    Tree,
    check_gradient,
    check_param,
    checked,
)
from cubegrad.options import Hyper

__all__ = ["MadgradState", "MirrorMadgradState", "madgrad", "mirror_madgrad"]


class MadgradState(NamedTuple):
    """k, and trees shaped as the parameters; x_0 is None where it need not be kept."""

    count: Array  # type: ignore[assignment]  # k; optax's name for it, and a tuple's method
    grad_sum: Tree  # s_k
    grad_sq_sum: Tree  # ν_k
    initial_param: Tree  # x_0


class MirrorMadgradState(NamedTuple):
    """k, and trees shaped as the parameters."""

    count: Array  # type: ignore[assignment]  # k; optax's name for it, and a tuple's method
    grad_sq_sum: Tree  # ν_k
    z: Tree  # z_k


def madgrad(
    learning_rate: ArrayLike | Schedule = 1e-2,
    momentum: ArrayLike | Schedule = 0.9,
    weight_decay: ArrayLike = 0.0,
    eps: ArrayLike = 1e-6,
    *,
    decoupled_weight_decay: bool = False,
    decoupled_lr: bool = False,
    reference_lr: ArrayLike | None = None,
    maximize: bool = False,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """MADGRAD: momentumized, adaptive, dual averaged gradients (Defazio & Jelassi), Algorithm 1.

    Args:
        learning_rate: γ, a number or a schedule. Not comparable to SGD's or Adam's: sweep it.
        momentum: 1 - c, in [0, 1), a number or a schedule. A plain 0 keeps no x_0: 8 instead of 12
            bytes of state per float32 parameter (half precision keeps it).
        weight_decay: the paper's L2 term, or decoupled decay. MADGRAD needs less than others.
        eps: ε, added to the cube root and nowhere else. At 0, a coordinate that has had no
            gradient yet stays where it started.
        decoupled_weight_decay: shrink x and z by 1 - learning_rate * weight_decay a step.
        decoupled_lr: shrink them by 1 - weight_decay * learning_rate / reference_lr instead, which
            does not depend on the size of learning_rate; implies decoupled decay.
        reference_lr: learning_rate if that is a plain number; needed for decoupled_lr if not.
        maximize: ascend.
        mask: which parameters decay, a tree of booleans or a function of the parameters that
            returns one, as in `optax.adamw`. All of them by default.
        state_dtype: of the sums s and ν; float32, or the parameter's dtype if that is wider, by
            default. x_0 and z never get less than that.
    """
    return _transformation(rule.madgrad, MadgradState, checked(Settings(**locals())))


def mirror_madgrad(
    learning_rate: ArrayLike | Schedule = 1e-2,
    momentum: ArrayLike | Schedule = 0.9,
    weight_decay: ArrayLike = 0.0,
    eps: ArrayLike = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    decoupled_lr: bool = False,
    reference_lr: ArrayLike | None = None,
    maximize: bool = False,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """The mirror-descent form of MADGRAD, as `cubegrad.MirrorMADGRAD` derives it.

    z remembers where it is, so there is no x_0 and nothing pulls back to it. Arguments as for
    `madgrad`, with eps 0 by default.
    """
    return _transformation(rule.mirror_madgrad, MirrorMadgradState, checked(Settings(**locals())))


def _transformation(
    update_rule: Callable[..., tuple[Array, ...]],
    state_type: type[MadgradState] | type[MirrorMadgradState],
    settings: Settings,
) -> optax.GradientTransformation:
    def init(params: Tree) -> NamedTuple:
        jax.tree_util.tree_map_with_path(check_param, params)
        trees = (
            jax.tree.map(partial(_fresh, settings, name), params) for name in state_type._fields[1:]
        )
        return state_type(jnp.zeros([], jnp.int32), *trees)

    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, NamedTuple]:
        if params is None:
            raise ValueError("params=None, but x averages z; call update(grads, state, params)")
        treedef: Any = jax.tree.structure(params)
        count, *trees = state
        rows = zip(*map(treedef.flatten_up_to, (params, updates, *trees)), strict=True)
        h = _hyper(settings, count)
        undecayed = h._replace(weight_decay=0.0, shrink=None)
        results: list[tuple[Array | None, ...]] = []
        for row, decays in zip(rows, _decaying(settings.mask, params), strict=True):
            check_gradient(params, len(results), *row[:2])
            results.append(_step(update_rule, h if decays else undecayed, count, *row))
        columns = zip(*results, strict=True) if results else [()] * (1 + len(trees))
        moves, *trees = map(treedef.unflatten, columns)
        return moves, state_type(optax.safe_increment(count), *trees)

    return optax.GradientTransformation(init, update)


def _step(
    update_rule: Callable[..., tuple[Array, ...]],
    h: Hyper,
    count: Array,
    param: ArrayLike,
    grad: ArrayLike,
    *buffers: Array | None,
) -> tuple[Array | None, ...]:
    """What to add to the parameter, and its new buffers; both parts of a complex number alike."""
    param, grad = jnp.asarray(param), jnp.asarray(grad)
    kept = [buffer for buffer in buffers if buffer is not None]
    wide = jnp.result_type(_wide(param), *kept)
    x, *arrays = (array.astype(wide) for array in (param, grad, *kept))
    real = jnp.finfo(wide).dtype
    cast: Any = [v.astype(real) if isinstance(v, Array) else v for v in h]
    split = zip(*map(_parts, (x, *arrays)), strict=True)
    parts = [update_rule(xla, Hyper(*cast), count.astype(real), *part) for part in split]
    new, *values = (lax.complex(*v) if len(v) == 2 else v[0] for v in zip(*parts, strict=True))
    # Where nothing moves, x - x is 0 and this is -0, which changes no bit when it is added.
    move = (-(x - new)).astype(param.dtype)
    stored = (value.astype(buffer.dtype) for value, buffer in zip(values, kept, strict=True))
    return move, *stored, *[None] * (len(buffers) - len(kept))


def _parts(array: Array) -> tuple[Array, ...]:
    return (array.real, array.imag) if jnp.iscomplexobj(array) else (array,)


def _wide(param: Array) -> Any:
    """What is computed in: at least float32, since ν of a float16 gradient of 300 overflows."""
    return jnp.promote_types(param.dtype, jnp.float32)


def _fresh(settings: Settings, name: str, param: ArrayLike) -> Array | None:
    """The buffer of this name before the first step; the points are copies, never aliases."""
    param = jnp.asarray(param)
    sums = points = _wide(param)
    if settings.state_dtype is not None:
        points = jnp.promote_types(points, settings.state_dtype)
        # The parts of a complex number cannot be narrower than float32.
        sums = points if jnp.iscomplexobj(param) else jnp.dtype(settings.state_dtype)
    if name in ("grad_sum", "grad_sq_sum"):
        return jnp.zeros_like(param, dtype=sums)
    # Without momentum x is z and gives x_0 back, if neither x nor the sums are rounded for storage.
    recoverable = param.dtype == sums == points
    if name == "initial_param" and recoverable and _is_zero(settings.momentum):
        return None
    return jnp.array(param, dtype=points, copy=True)


def _is_zero(value: Any) -> bool:
    """Whether the number is 0 in this step and all others."""
    return isinstance(value, float | int) and value == 0


def _hyper(settings: Settings, count: Array) -> Hyper:
    """The numbers of this step."""

    def now(value: Any) -> Any:
        value = value(count) if callable(value) else value
        if value is None or isinstance(value, float | int):
            return value
        value = jnp.asarray(value)  # 1 - γ wd in bfloat16 would be 1
        return value.astype(jnp.promote_types(value.dtype, jnp.float32))

    numbers = {name: now(getattr(settings, name)) for name in NUMBERS}
    lr, momentum, decay, eps, _ = numbers.values()
    shrink = None
    if settings.decoupled and not _is_zero(decay):
        factor = options.decay_factor(settings._asdict() | numbers, lr)
        shrink = factor if isinstance(factor, float) else jnp.maximum(factor, 0.0)
    return Hyper(
        lr=lr,
        momentum=momentum,
        eps=eps,
        weight_decay=0.0 if settings.decoupled else decay,
        shrink=shrink,
        maximize=settings.maximize,
    )


def _decaying(mask: Any, params: Tree) -> list[bool]:
    """For each parameter whether it decays; a branch of the mask may stand for what is below."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    if callable(mask) and jax.tree_util.all_leaves([mask]):  # a module can be called and is a tree
        mask = mask(params)
    spread = jax.tree.map(lambda m, below: jax.tree.map(lambda _: bool(m), below), mask, params)
    return jax.tree.leaves(spread)
