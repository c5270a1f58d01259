"""MADGRAD for JAX: optax transformations over the same rule that the PyTorch backends run."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from cubegrad import options, rule
from cubegrad.optax import auto, xla
from cubegrad.optax.auto import Estimate, parts, wide
from cubegrad.optax.checks import (
    NUMBERS,
    Settings,
    Tree,
    check_gradient,
    check_param,
    checked,
    refuse_auto,
)
from cubegrad.options import Hyper

__all__ = [
    "AutoMadgradState",
    "Estimate",
    "MadgradState",
    "MirrorMadgradState",
    "estimated_lr",
    "madgrad",
    "mirror_madgrad",
]


class MadgradState(NamedTuple):
    """k, and trees shaped as the parameters; x_0 is None where it need not be kept."""

    count: Array  # type: ignore[assignment]  # k; optax's name for it, and a tuple's method
    grad_sum: Tree  # s_k
    grad_sq_sum: Tree  # ν_k
    initial_param: Tree  # x_0


class AutoMadgradState(NamedTuple):
    """As `MadgradState`, and what the learning rate is estimated from."""

    count: Array  # type: ignore[assignment]
    grad_sum: Tree
    grad_sq_sum: Tree
    initial_param: Tree
    estimate: Estimate


class MirrorMadgradState(NamedTuple):
    """k, and trees shaped as the parameters."""

    count: Array  # type: ignore[assignment]  # k; optax's name for it, and a tuple's method
    grad_sq_sum: Tree  # ν_k
    z: Tree  # z_k


def madgrad(
    learning_rate: optax.ScalarOrSchedule | Literal["auto"] = 1e-2,
    momentum: optax.ScalarOrSchedule = 0.9,
    weight_decay: ArrayLike = 0.0,
    eps: ArrayLike = 1e-6,
    *,
    decoupled_weight_decay: bool = False,
    decoupled_lr: bool = False,
    reference_lr: ArrayLike | None = None,
    maximize: bool = False,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    state_dtype: DTypeLike | None = None,
    lr_factor: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MADGRAD: momentumized, adaptive, dual averaged gradients (Defazio & Jelassi), Algorithm 1.

    Args:
        learning_rate: γ, a number or a schedule. Not comparable to SGD's or Adam's: sweep it, or
            say "auto" and have it estimated in every step (docs/jax.md).
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
        lr_factor: what an estimated learning_rate is multiplied by, a number or a schedule; 1 by
            default. decoupled_lr then decays by lr_factor alone, with a reference_lr of 1.
    """
    settings = checked(Settings(**locals()))
    state_type = AutoMadgradState if settings.auto else MadgradState
    return _transformation(rule.madgrad, state_type, settings)


def mirror_madgrad(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    momentum: optax.ScalarOrSchedule = 0.9,
    weight_decay: ArrayLike = 0.0,
    eps: ArrayLike = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    decoupled_lr: bool = False,
    reference_lr: ArrayLike | None = None,
    maximize: bool = False,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    state_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The mirror-descent form of MADGRAD, as `cubegrad.MirrorMADGRAD` derives it.

    z remembers where it is, so there is no x_0 and nothing pulls back to it. Arguments as for
    `madgrad`, with eps 0 by default. No learning rate can be estimated without a sum of gradients.
    """
    refuse_auto(learning_rate)
    return _transformation(rule.mirror_madgrad, MirrorMadgradState, checked(Settings(**locals())))


def estimated_lr(state: Tree) -> Array:
    """γ that the next step of `madgrad(learning_rate="auto")` takes, without lr_factor.

    `state` may hold the optimizer's anywhere, as those of `optax.chain` and flax do. The result is
    0 before the first gradient; a batch of runs has one each.
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Estimate))
    found = [node for node in nodes if isinstance(node, Estimate)]
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} estimates of a learning rate and must have 1; pass the "
            'state of one madgrad(learning_rate="auto")'
        )
    return auto.rate(found[0])


def _transformation(
    update_rule: Callable[..., tuple[Array, ...]],
    state_type: type[MadgradState] | type[AutoMadgradState] | type[MirrorMadgradState],
    settings: Settings,
) -> optax.GradientTransformationExtraArgs:
    names = [name for name in state_type._fields if name not in ("count", "estimate")]

    def init(params: Tree) -> NamedTuple:
        jax.tree_util.tree_map_with_path(check_param, params)
        trees = (jax.tree.map(partial(_fresh, settings, name), params) for name in names)
        estimates = [auto.nothing_yet()] if settings.auto else []
        return state_type(jnp.zeros([], jnp.int32), *trees, *estimates)

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra_args: Any
    ) -> tuple[Tree, NamedTuple]:
        del extra_args  # meant for other members of a chain
        if params is None:
            raise ValueError("params=None, but x averages z; call update(grads, state, params)")
        treedef: Any = jax.tree.structure(params)
        count, trees, estimate = state[0], state[1 : 1 + len(names)], state[-1]
        rows = list(zip(*map(treedef.flatten_up_to, (params, updates, *trees)), strict=True))
        for index, (param, grad, *_) in enumerate(rows):
            check_gradient(params, index, param, grad)
        decaying, size = _decaying(settings.mask, params), auto.coordinates(params)
        h = _hyper(settings, count)
        if settings.auto:
            leaves = [(_for_leaf(h, d), *row[:2]) for d, row in zip(decaying, rows, strict=True)]
            estimate = auto.begun(estimate, leaves, size)
            h = _hyper(settings, count, auto.rate(estimate))
            # Before there is a scale the gradients are all 0, or not finite and not to be used.
            begun = estimate.gradient_scale > 0
            rows = [(p, jnp.where(begun, jnp.asarray(g), 0), *rest) for p, g, *rest in rows]
        steps = [
            _step(update_rule, _for_leaf(h, decays), count, settings.auto, *row)
            for decays, row in zip(decaying, rows, strict=True)
        ]
        if settings.auto:
            weight = rule.step_weight(h.lr, count.astype(h.lr.dtype))
            told = [(d, t) for d, (_, sums) in zip(decaying, steps, strict=True) for t in sums]
            estimate = auto.after(estimate, h, weight, told, size)
        columns = zip(*(arrays for arrays, _ in steps), strict=True)
        moves, *trees = map(treedef.unflatten, columns if steps else [()] * (1 + len(names)))
        estimates = [estimate] if settings.auto else []
        return moves, state_type(optax.safe_increment(count), *trees, *estimates)

    return optax.GradientTransformationExtraArgs(init, update)


def _for_leaf(h: Hyper, decays: bool) -> Hyper:
    return h if decays else h._replace(weight_decay=0.0, shrink=None)


def _step(
    update_rule: Callable[..., tuple[Array, ...]],
    h: Hyper,
    count: Array,
    summed: bool,
    param: ArrayLike,
    grad: ArrayLike,
    *buffers: Array | None,
) -> tuple[tuple[Array | None, ...], list[tuple[Array, ...]]]:
    """What to add to the parameter, its new buffers, and the step sums of each part if `summed`.

    Both parts of a complex number are stepped alike.
    """
    param, grad = jnp.asarray(param), jnp.asarray(grad)
    kept = [buffer for buffer in buffers if buffer is not None]
    dtype = jnp.result_type(wide(param), *kept)
    x, *arrays = (array.astype(dtype) for array in (param, grad, *kept))
    real = jnp.finfo(dtype).dtype
    cast: Any = [v.astype(real) if isinstance(v, Array) else v for v in h]
    numbers = xla, Hyper(*cast), count.astype(real)
    old = list(zip(*map(parts, (x, *arrays)), strict=True))
    results = [update_rule(*numbers, *p) for p in old]
    sums = []
    for i in range(len(old) if summed else 0):
        sums.append(auto.sums(numbers[1:], old[i], results[i][1:]))
        results[i] = xla.not_before(sums[i][0], results[i][0], old[i][0]), *results[i][1:]
    new, *values = (lax.complex(*v) if len(v) == 2 else v[0] for v in zip(*results, strict=True))
    # Where nothing moves, x - x is 0 and this is -0, which changes no bit when it is added.
    move = (-(x - new)).astype(param.dtype)
    stored = (value.astype(buffer.dtype) for value, buffer in zip(values, kept, strict=True))
    return (move, *stored, *[None] * (len(buffers) - len(kept))), sums


def _fresh(settings: Settings, name: str, param: ArrayLike) -> Array | None:
    """The buffer of this name before the first step; the points are copies, never aliases."""
    param = jnp.asarray(param)
    sums = points = wide(param)
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


def _hyper(settings: Settings, count: Array, estimated: ArrayLike = 1.0) -> Hyper:
    """The numbers of this step; `estimated` is what learning_rate="auto" stands for."""

    def now(value: Any) -> Any:
        value = value(count) if callable(value) else value
        if value is None or isinstance(value, float | int):
            return value
        value = jnp.asarray(value)  # 1 - γ wd in bfloat16 would be 1
        return value.astype(jnp.promote_types(value.dtype, jnp.float32))

    numbers = {name: now(getattr(settings, name)) for name in NUMBERS if name != "learning_rate"}
    momentum, decay, eps, _ = numbers.values()
    given = now(settings.lr_factor if settings.auto else settings.learning_rate)
    lr = given * estimated if settings.auto else given
    shrink = None
    if settings.decoupled and not _is_zero(decay):
        rate = given if settings.decoupled_lr else lr  # what decays apart from lr needs no estimate
        factor = options.decay_factor(settings._asdict() | numbers, rate)
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
