"""MADGRAD and its relatives for JAX: optax transformations that run rule.py."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import optax
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from cubegrad import cautions, rule
from cubegrad.optax import auto, mean
from cubegrad.optax.apply import apply_gradients
from cubegrad.optax.auto import Distance, Estimate
from cubegrad.optax.checks import (
    Settings,
    Tree,
    checked,
    checked_mean,
    refuse_auto,
    warn_of_coupled_decay,
)
from cubegrad.optax.transform import transformation

__all__ = [
    "AutoMadgradState",
    "AutoMadgradwState",
    "AutoScheduleFreeMadgradwState",
    "CompactAutoMadgradState",
    "CompactAutoMadgradwState",
    "CompactAutoScheduleFreeMadgradwState",
    "CompactMadgradState",
    "CompactMadgradwState",
    "CompactMirrorMadgradState",
    "CompactScheduleFreeMadgradwState",
    "Distance",
    "Estimate",
    "MadgradState",
    "MadgradwState",
    "MirrorMadgradState",
    "ScheduleFreeMadgradwState",
    "apply_gradients",
    "averaged_params",
    "estimated_lr",
    "madgrad",
    "madgradw",
    "mirror_madgrad",
]


class MadgradState(NamedTuple):
    """The step count, and trees shaped like the parameters; x_0 is None where it is not kept."""

    count: Array  # type: ignore[assignment]  # k, by optax's name; tuple has a method of that name
    grad_sum: Tree  # s_k
    grad_sq_sum: Tree  # ν_k
    initial_param: Tree  # x_0


class AutoMadgradState(NamedTuple):
    """`MadgradState` and the numbers that the learning rate is estimated from."""

    count: Array  # type: ignore[assignment]
    grad_sum: Tree
    grad_sq_sum: Tree
    initial_param: Tree
    estimate: Estimate


class MirrorMadgradState(NamedTuple):
    """The step count, and trees shaped like the parameters."""

    count: Array  # type: ignore[assignment]  # k
    grad_sq_sum: Tree  # ν_k
    z: Tree  # z_k


class CompactMadgradState(NamedTuple):
    """`MadgradState` with compact=True: a parameter has either sums or codes, and None for others.

    The codes are those of PyTorch's `MADGRAD(compact=True)`, in the shape of the parameter (with a
    last dimension of 2 for a complex one). A scale belongs to a block of up to 256 codes in a row.
    """

    count: Array  # type: ignore[assignment]
    grad_sum: Tree
    grad_sq_sum: Tree
    initial_param: Tree
    offset_code: Tree  # int8: z - x and the lowest bit of ∛ν; None without momentum
    offset_scale: Tree
    root_code: Tree  # uint8: ∛ν
    root_scale: Tree
    initial_code: Tree  # x_0 in int16, or in the dtype of half precision
    initial_scale: Tree


class CompactAutoMadgradState(NamedTuple):
    """`CompactMadgradState` and the numbers that the learning rate is estimated from."""

    count: Array  # type: ignore[assignment]
    grad_sum: Tree
    grad_sq_sum: Tree
    initial_param: Tree
    offset_code: Tree
    offset_scale: Tree
    root_code: Tree
    root_scale: Tree
    initial_code: Tree
    initial_scale: Tree
    estimate: Estimate


class CompactMirrorMadgradState(NamedTuple):
    """`MirrorMadgradState` with compact=True, as `CompactMadgradState`."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    z: Tree
    offset_code: Tree
    offset_scale: Tree
    root_code: Tree
    root_scale: Tree


class MadgradwState(NamedTuple):
    """The step count, and trees shaped like the parameters; z - x is None where it is not kept."""

    count: Array  # type: ignore[assignment]  # k
    grad_sq_sum: Tree  # ν_k, a mean
    dual_offset: Tree  # z_k - x_k


class CompactMadgradwState(NamedTuple):
    """`MadgradwState` with compact=True, as `CompactMadgradState`."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree
    offset_code: Tree
    offset_scale: Tree
    root_code: Tree  # uint8: √ν
    root_scale: Tree


class ScheduleFreeMadgradwState(NamedTuple):
    """`MadgradwState` with schedule_free=True, and the numbers that the mean of all z needs.

    The parameters are y: z - y is kept, and `averaged_params` finds the mean.
    """

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree  # z_k - y_k
    largest_lr: Array  # so far; its square is the weight of the newest z
    weight_sum: Array  # of all z, relative to that weight
    momentum: Array


class CompactScheduleFreeMadgradwState(NamedTuple):
    """`ScheduleFreeMadgradwState` with compact=True, as `CompactMadgradState`."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree
    offset_code: Tree
    offset_scale: Tree
    root_code: Tree
    root_scale: Tree
    largest_lr: Array
    weight_sum: Array
    momentum: Array


class AutoMadgradwState(NamedTuple):
    """`MadgradwState` with x_0, and the numbers that the learning rate is estimated from."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree
    initial_param: Tree
    estimate: Distance


class CompactAutoMadgradwState(NamedTuple):
    """`AutoMadgradwState` with compact=True, as `CompactMadgradState`."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree
    initial_param: Tree
    offset_code: Tree
    offset_scale: Tree
    root_code: Tree
    root_scale: Tree
    initial_code: Tree
    initial_scale: Tree
    estimate: Distance


class AutoScheduleFreeMadgradwState(NamedTuple):
    """`ScheduleFreeMadgradwState` with x_0 and an estimated learning rate."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree
    initial_param: Tree
    largest_lr: Array
    weight_sum: Array
    momentum: Array
    estimate: Distance


class CompactAutoScheduleFreeMadgradwState(NamedTuple):
    """`AutoScheduleFreeMadgradwState` with compact=True, as `CompactMadgradState`."""

    count: Array  # type: ignore[assignment]
    grad_sq_sum: Tree
    dual_offset: Tree
    initial_param: Tree
    offset_code: Tree
    offset_scale: Tree
    root_code: Tree
    root_scale: Tree
    initial_code: Tree
    initial_scale: Tree
    largest_lr: Array
    weight_sum: Array
    momentum: Array
    estimate: Distance


# The states of `madgradw`, by schedule_free, whether the rate is estimated, and compact.
_MADGRADW_STATES: dict[tuple[bool, bool, bool], Any] = {
    (False, False, False): MadgradwState,
    (False, False, True): CompactMadgradwState,
    (False, True, False): AutoMadgradwState,
    (False, True, True): CompactAutoMadgradwState,
    (True, False, False): ScheduleFreeMadgradwState,
    (True, False, True): CompactScheduleFreeMadgradwState,
    (True, True, False): AutoScheduleFreeMadgradwState,
    (True, True, True): CompactAutoScheduleFreeMadgradwState,
}


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
    compact: bool = False,
    stochastic_rounding: bool = False,
    lr_factor: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """MADGRAD: momentumized, adaptive, dual averaged gradients (Defazio & Jelassi), Algorithm 1.

    Args:
        learning_rate: γ, a number or a schedule. Not comparable to SGD's or Adam's: sweep it, or
            pass "auto" to have it estimated at every step (docs/jax.md).
        momentum: 1 - c, in [0, 1), a number or a schedule. A plain 0 keeps no x_0: 8 instead of 12
            bytes of state per float32 parameter (half precision keeps it).
        weight_decay: the paper's L2 term, or decoupled decay. MADGRAD needs less of it than SGD or
            Adam.
        eps: ε, added to the cube root and nowhere else. At 0, a coordinate that has had no
            gradient yet stays where it started.
        decoupled_weight_decay: multiply x and z by 1 - learning_rate * weight_decay at each step.
        decoupled_lr: multiply them by 1 - weight_decay * learning_rate / reference_lr instead, so
            that decay follows the schedule but not the size of learning_rate.
        reference_lr: for decoupled_lr, the peak learning rate; by default learning_rate, if that
            is a plain number.
        maximize: maximize the objective instead of minimizing it.
        mask: which parameters decay, a tree of booleans or a function of the parameters that
            returns one, as in `optax.adamw`. All of them by default.
        state_dtype: the dtype of the sums s and ν; by default float32, or the parameter's dtype if
            that is wider. x_0 and z are never narrower than the default.
        compact: keep 4 bytes of state for a parameter instead of 12 (3 without momentum), in arrays
            of at least 4,096 elements with rows of at least 64, or 65,536 in one dimension
            (docs/jax.md). Smaller ones keep what they keep otherwise, and state_dtype is for those
            alone.
        stochastic_rounding: round bfloat16 and float16 parameters up or down at random, so that
            moves below their last place are made on average. Their updates are float32, and
            `optax.apply_updates` gives the rounded parameter. compact=True does so in any case.
        lr_factor: multiplies the estimated learning rate, a number or a schedule; 1 by default.
            decoupled_lr then decays by lr_factor alone, with a reference_lr of 1.
    """
    settings = checked(Settings(**locals()))
    warn_of_coupled_decay(settings)
    if settings.compact:
        state_type: Any = CompactAutoMadgradState if settings.auto else CompactMadgradState
    else:
        state_type = AutoMadgradState if settings.auto else MadgradState
    return transformation(rule.MADGRAD, state_type, settings)


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
    compact: bool = False,
    stochastic_rounding: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """The mirror-descent form of MADGRAD, as `cubegrad.MirrorMADGRAD` derives it.

    z is part of the state, unless momentum is a plain 0, so there is no pull to x_0. Arguments as
    for `madgrad`, with eps 0 by default; compact=True keeps 2 bytes instead of 8. Without a sum of
    gradients the learning rate cannot be estimated.
    """
    refuse_auto("mirror_madgrad", learning_rate)
    settings = checked(Settings(**locals()))
    state_type = CompactMirrorMadgradState if compact else MirrorMadgradState
    return transformation(rule.MIRROR_MADGRAD, state_type, settings)


def madgradw(
    learning_rate: optax.ScalarOrSchedule | Literal["auto"] = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.9,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 1e-4,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    *,
    b1: ArrayLike | None = None,
    b2: ArrayLike | None = None,
    decoupled_weight_decay: bool = True,
    decoupled_lr: bool = False,
    reference_lr: ArrayLike | None = None,
    maximize: bool = False,
    state_dtype: DTypeLike | None = None,
    compact: bool = False,
    stochastic_rounding: bool = False,
    schedule_free: bool = False,
    warmup_steps: int = 0,
    lr_factor: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The member of MADGRAD's family that takes the settings of `optax.adamw` as they are.

    See `cubegrad.MADGRADW` for the method. learning_rate, eps, weight_decay (decoupled) and mask
    mean what they do there, with the same defaults. b1 is another name for momentum, and b2 is not
    needed. The other arguments as for `madgrad`; compact=True keeps 2 bytes instead of 8. An
    estimated learning rate needs x_0: 12 bytes, or 4 in codes.

    With schedule_free=True the learning rate needs no schedule. The parameters are then y, where
    gradients are taken, and `averaged_params` returns x, the mean of all z, to evaluate and to keep
    (docs/madgradw.md). momentum must be a plain number above 0. Over the first warmup_steps the
    learning rate grows from 0.
    """
    momentum = momentum if b1 is None else b1
    if b2 is not None:
        cautions.warn_of_betas(momentum, b2)
    given = {k: v for k, v in locals().items() if k not in ("b1", "b2")}
    settings = checked_mean(checked(Settings(**given)))
    state_type = _MADGRADW_STATES[settings.schedule_free, settings.auto, settings.compact]
    if settings.schedule_free:
        used = rule.SCHEDULE_FREE_AUTO if settings.auto else rule.SCHEDULE_FREE
    else:
        used = rule.MADGRADW_AUTO if settings.auto else rule.MADGRADW
    return transformation(used, state_type, settings)


def averaged_params(state: Tree, params: Tree) -> Tree:
    """x of `madgradw(schedule_free=True)`: the parameters to evaluate and to keep.

    `params` are y, as training has them, and training goes on with them. As for `estimated_lr`, the
    optimizer's state may be anywhere in `state`. Parameters that it does not step, such as masked
    ones, are returned as they are. After `vmap` use `jax.vmap(averaged_params)`.
    """
    return mean.averaged(state, params)


def estimated_lr(state: Tree) -> Array:
    """γ of the next step with learning_rate="auto", without lr_factor.

    The optimizer's state may be anywhere in `state`, as in those of `optax.chain` and flax; an
    `nnx.Optimizer` or its `nnx.state` will do as well. The result is 0 before the first gradient.
    After `vmap` there is one for each run.
    """
    estimates = auto.find(state)
    if len(estimates) != 1:
        raise ValueError(
            f"the state has {len(estimates)} estimates of a learning rate and must have 1; pass "
            'the state of one madgrad or madgradw with learning_rate="auto"'
        )
    return auto.learning_rate(estimates[0])
