"""The arguments of the optax transformations, checked once, and checks of their trees."""

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from cubegrad import cautions, options

Tree = Any
Schedule = Callable[[Array], ArrayLike]

NUMBERS = ("learning_rate", "momentum", "weight_decay", "eps", "reference_lr")
PARAM_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# Not float16, where the square of a gradient of 300 overflows.
STATE_DTYPES = ("bfloat16", "float32", "float64")


class Settings(NamedTuple):
    """The arguments, as `madgrad` documents them."""

    learning_rate: ArrayLike | Schedule | Literal["auto"]
    momentum: ArrayLike | Schedule
    weight_decay: ArrayLike
    eps: ArrayLike
    decoupled_weight_decay: bool
    decoupled_lr: bool
    reference_lr: ArrayLike | None
    maximize: bool
    mask: Tree | Callable[[Tree], Tree] | None
    state_dtype: DTypeLike | None
    compact: bool
    stochastic_rounding: bool
    lr_factor: ArrayLike | Schedule | None = None
    schedule_free: bool = False
    warmup_steps: ArrayLike = 0

    @property
    def auto(self) -> bool:
        return is_auto(self.learning_rate)

    @property
    def decoupled(self) -> bool:
        return self.decoupled_weight_decay or self.decoupled_lr

    @property
    def rounds_at_random(self) -> bool:
        """Whether half-precision parameters are; those with codes always are."""
        return self.compact or self.stochastic_rounding

    @property
    def no_momentum(self) -> bool:
        return is_zero(self.momentum)

    def at(self, count: Array) -> Any:
        """The settings at step `count`: schedules evaluated, arrays in at least float32."""

        def number(value: Any) -> Any:
            value = value(count) if callable(value) else value
            if value is None or isinstance(value, float | int | str):  # a str is "auto"
                return value
            value = jnp.asarray(value)  # in bfloat16, 1 - γ wd would round to 1
            return value.astype(jnp.promote_types(value.dtype, jnp.float32))

        names = (*NUMBERS, "lr_factor")
        now: Any = self._replace(**{name: number(getattr(self, name)) for name in names})
        if not self.schedule_free or is_zero(self.warmup_steps):
            return now
        name = "lr_factor" if self.auto else "learning_rate"
        return now._replace(**{name: getattr(now, name) * self._warmth(count)})

    def _warmth(self, count: Array) -> Array:
        """What the warm-up leaves of the learning rate; 1 if it has no steps."""
        done = (count + 1).astype(jax.dtypes.canonicalize_dtype(float))
        return jnp.minimum(done / jnp.maximum(self.warmup_steps, 1), 1.0)


def is_zero(value: Any) -> bool:
    """Whether the setting is 0 at every step; a schedule or an array may change."""
    return isinstance(value, float | int) and value == 0


def is_auto(learning_rate: Any) -> bool:
    return isinstance(learning_rate, str) and learning_rate == "auto"


def refuse_auto(method: str, learning_rate: Any) -> None:
    """Refuse "auto" for a method without an estimate."""
    if is_auto(learning_rate):
        raise ValueError(
            f"learning_rate='auto' must be a number or a schedule in {method}, which keeps no x_0 "
            "to estimate it from; use madgrad or madgradw"
        )


def checked(settings: Settings) -> Settings:
    """The settings with plain numbers as floats. Schedules and traced numbers are not checked."""
    settings = settings._replace(**options.flags(settings._asdict()))
    known = {}  # the numbers that have a value now
    for name in NUMBERS:
        value = getattr(settings, name)
        scheduled = name in ("learning_rate", "momentum") and callable(value)
        estimated = name == "learning_rate" and settings.auto
        if not (scheduled or estimated or _is_traced(value) or value is None):
            known[name] = options.number(name, value)
    flags = {
        "decoupled_weight_decay": settings.decoupled_weight_decay,
        "decoupled_lr": settings.decoupled_lr,
    }
    options.check_numbers(flags | known, lr_name="learning_rate")
    # Arrays stay arrays, with and without jit: under jit their values are not known.
    plain: dict[str, Any] = {
        k: v for k, v in known.items() if not isinstance(getattr(settings, k), Array)
    }
    factor = plain["lr_factor"] = _checked_factor(settings)
    if settings.decoupled_lr and settings.reference_lr is None:
        if "learning_rate" not in plain and not settings.auto:
            raise ValueError(
                "reference_lr=None must be a number > 0 with decoupled_lr=True and a learning_rate "
                "that is a schedule or an array; use the peak learning rate"
            )
        reference = 1.0 if settings.auto else plain["learning_rate"]
        plain["reference_lr"] = known["reference_lr"] = reference
    if settings.auto and settings.decoupled_lr and isinstance(factor, float):
        known["learning_rate"] = factor  # decoupled_lr decays by the factor, not by the estimate
    if set(NUMBERS) <= known.keys():
        options.shrink(flags | known, known["learning_rate"])
    _check_state_dtype(settings.state_dtype)
    return settings._replace(**plain)


def checked_mean(settings: Settings) -> Settings:
    """The settings, of which those of a mean are checked once the others are."""
    schedule_free = bool(options.flag("schedule_free", settings.schedule_free))
    steps, momentum = _whole(settings.warmup_steps), settings.momentum
    if schedule_free:
        if callable(momentum) or isinstance(momentum, Array):
            raise TypeError(
                f"momentum={momentum!r:.60} must be a plain number with schedule_free=True, where "
                "the weights depend on it; use momentum=0.9, and name it in the static_args of "
                "optax.inject_hyperparams"
            )
        known = 0 if _is_traced(steps) else steps
        options.check_schedule_free({"momentum": momentum, "warmup_steps": known})
    elif not _is_traced(steps) and steps:
        raise ValueError(
            f"warmup_steps={steps!r} needs schedule_free=True; without it use a learning_rate of "
            "optax.warmup_constant_schedule"
        )
    return settings._replace(schedule_free=schedule_free, warmup_steps=steps)


def _whole(steps: Any) -> Any:
    """A plain integer, where it is one; optax.inject_hyperparams makes an array of it."""
    if isinstance(steps, bool) or _is_traced(steps):
        return steps
    try:
        return operator.index(steps)
    except TypeError:
        return steps


def warn_of_coupled_decay(settings: Settings) -> None:
    decay = settings.weight_decay
    if not (settings.decoupled or _is_traced(decay)):
        cautions.warn_of_coupled_decay(options.number("weight_decay", decay))


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer) and value.shape == ()


def _checked_factor(settings: Settings) -> Any:
    """lr_factor, with a plain number as a float and None as 1."""
    factor: Any = settings.lr_factor
    if factor is None:
        return 1.0
    wrong = TypeError(f"lr_factor={factor!r} must be one number; use 1")
    if isinstance(factor, str) or options.is_boolean(factor):  # float() would accept both
        raise wrong
    if not settings.auto and not (isinstance(factor, float | int) and factor == 1):
        raise ValueError(
            f"lr_factor={factor!r} must be left at 1 with learning_rate="
            f"{settings.learning_rate!r}; multiply learning_rate by it, or use "
            'learning_rate="auto"'
        )
    if callable(factor) or _is_traced(factor):
        return factor
    try:
        number = float(factor)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not 0 <= number < math.inf:
        raise ValueError(f"lr_factor={number} must be finite and >= 0; use 1")
    return factor if isinstance(factor, Array) else number


def _check_state_dtype(dtype: DTypeLike | None) -> None:
    if dtype is None:
        return
    if (name := jnp.dtype(dtype).name) not in STATE_DTYPES:
        raise ValueError(f"state_dtype={name} must be one of {STATE_DTYPES}; use float32")
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(
            f"state_dtype={name} must be enabled in JAX; use float32, or "
            'jax.config.update("jax_enable_x64", True)'
        )


def check_param(path: Any, param: ArrayLike) -> None:
    dtype = jnp.asarray(param).dtype
    if dtype.name not in PARAM_DTYPES:
        raise TypeError(
            f"params{jax.tree_util.keystr(path)} has dtype {dtype}; parameters must be float16, "
            "bfloat16, float32, float64 or complex: convert it, or leave it out with optax.masked "
            "or equinox.filter(model, equinox.is_inexact_array)"
        )


def check_gradient(params: Tree, index: int, param: ArrayLike, grad: ArrayLike | None) -> None:
    if grad is None or jnp.shape(grad) != jnp.shape(param):
        path = jax.tree_util.tree_flatten_with_path(params)[0][index][0]
        actual = "None" if grad is None else f"of shape {jnp.shape(grad)}"
        raise ValueError(
            f"the gradient of params{jax.tree_util.keystr(path)} is {actual}, but must have the "
            f"parameter's shape {jnp.shape(param)}; wrap parameters without a gradient in "
            "optax.masked or optax.partition, which count their own steps"
        )
