"""Hyper-parameters: checked once, with every error message about them."""

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple, NoReturn

SWEEP = (
    "start from the default and sweep powers of two around it, or use 'auto' if the method has it"
)
REMEDY = {
    "lr": SWEEP,
    "learning_rate": SWEEP,
    "momentum": "use 0.9, or 0 to keep less state",
    "weight_decay": "use 0 for none",
    "eps": "use the default, or 0 for none",
    "reference_lr": "use the peak learning rate",
    "last_eps": "load what state_dict() returned, whole",
    "auto_lr": "load what state_dict() returned, whole",
}

# Options of torch's optimizers and of other MADGRAD packages that have no meaning here.
OTHERS = {
    "betas": "has momentum (0.9), not betas; leave betas out",
    "beta1": "has momentum (0.9), not beta1; leave beta1 out",
    "beta2": "weighs the squares of the gradients itself; leave beta2 out",
    "amsgrad": "has no amsgrad; leave it out",
    "nesterov": "has no Nesterov momentum; leave nesterov out",
    "dampening": "averages weights where SGD adds up gradients; leave dampening out",
    "alpha": "weighs the squares of the gradients itself; leave alpha out",
    "rho": "weighs the squares of the gradients itself; leave rho out",
    "centered": "has no centered form; leave it out",
    "lr_decay": "leaves the decay of lr to a scheduler; leave lr_decay out and use one of torch's",
    "initial_accumulator_value": "starts its sums at 0 and has eps; leave it out",
    "decouple": "has decoupled_weight_decay, not decouple",
    "decouple_decay": "has decoupled_weight_decay, not decouple_decay",
    "decoupled_decay": "has decoupled_weight_decay, not decoupled_decay",
    "weight_decouple": "has decoupled_weight_decay, not weight_decouple",
    "learning_rate": "has lr, not learning_rate",
    "epsilon": "has eps, not epsilon",
}
FLAGS = (
    *("decoupled_weight_decay", "decoupled_lr", "maximize", "foreach", "fused", "capturable"),
    *("differentiable", "compact", "stochastic_rounding"),
)
# What a group holds beside its options; "estimated_lr" is for loggers.
KEPT = frozenset(
    {"params", "estimate", "estimated_lr", "last_eps", "reference_lr", "rule"}
    | {"mean", "last_momentum"}
)
TAKEN = ("lr", "momentum", "weight_decay", "eps", *FLAGS)


def refuse_unknown(optimizer: str, unknown: Iterable[str]) -> None:
    """Refuse keyword arguments that the optimizer does not take, naming those that it does."""
    for name in unknown:
        why = OTHERS.get(name)
        if why is None:
            close = difflib.get_close_matches(name, TAKEN, 1)
            why = f"has {close[0]}, not {name}" if close else f"has no option {name}"
        raise TypeError(f"{optimizer} {why}. It takes params, {', '.join(TAKEN)}")


def refuse_others(optimizer: str, group: Iterable[str]) -> None:
    """Refuse other optimizers' options in a group, where torch lets users keep what they like."""
    refuse_unknown(optimizer, [name for name in group if name in OTHERS])


class Hyper(NamedTuple):
    """One group's numbers for one step, as the rule and the backends take them."""

    lr: Any  # γ_k; a float, or a tensor that is not read on the host
    momentum: Any  # 1 - c; likewise
    eps: float
    weight_decay: float  # coupled decay only; 0 when the decay is decoupled
    shrink: Any  # decoupled decay: what x and z are multiplied by, or None
    maximize: bool
    on_device: bool = False  # the step count is a tensor that is not read on the host
    differentiable: bool = False
    found_inf: Any = None  # of a GradScaler: nothing may change unless it is 0
    grad_scale: Any = None  # of a GradScaler: the gradients come multiplied by it
    sums: Any = None  # three float64 numbers to which a backend adds distance.step_sums
    mean_share: Any = 0.0  # schedule-free: the part of x_{k+1} that z_{k+1} is


def name_of(group: dict[str, Any], index: int) -> str:
    """A parameter's name in messages."""
    return str(group["param_names"][index]) if "param_names" in group else f"params[{index}]"


def flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the flags that are among the options, as plain booleans."""
    given = ((name, options[name]) for name in FLAGS if name in options)
    return {name: value if isinstance(value, bool) else flag(name, value) for name, value in given}


def flag(name: str, value: Any) -> bool | None:
    """The option as a plain boolean, or None if it may be.

    numpy's booleans are taken, and the integers 0 and 1 of command lines and of older checkpoints.
    """
    allowed = "True or False"
    if name in ("foreach", "fused"):
        allowed = "True, False or None"
        if value is None:
            return None
    if (isinstance(value, int) and value in (0, 1)) or _is_boolean_of_numpy(value):
        return bool(value)
    remedy = REMEDY.get(name, f"pass {name}=True, or leave it out")
    if name == "decoupled_weight_decay" and isinstance(value, int | float):
        remedy = f"pass weight_decay={value}, {name}=True"
    raise TypeError(f"{name}={value!r} ({type(value).__name__}) must be {allowed}; {remedy}")


def _is_boolean_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def number(name: str, value: Any) -> float:
    """The option's value on the host; a tensor's without its history."""
    if isinstance(value, str) and value.startswith("auto"):
        _refuse_auto_as_number(name, value)
    return one_number(name, value, REMEDY[name])


def one_number(name: str, value: Any, remedy: str) -> float:
    """The value as a float; the message that refuses it ends with `remedy`."""
    try:
        if isinstance(value, str) or is_boolean(value):  # float() would accept both
            raise TypeError
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        message = f"{name}={value!r} ({kind}) must be one number; {remedy}"
        # As in torch.optim, a tensor of several numbers is a wrong value, not a wrong type.
        several = hasattr(value, "shape") and math.prod(value.shape) != 1
        raise (ValueError if several else TypeError)(message) from error


def is_boolean(value: Any) -> bool:
    """Whether it is True, False, or an array or tensor of them."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


def _refuse_auto_as_number(name: str, value: str) -> NoReturn:
    if value == "auto":
        raise TypeError(
            f"{name}='auto' must be one number here; to have it estimated, build the optimizer "
            f"with it: MADGRAD(params, lr='auto')"
        )
    shown = value if len(value) < 20 else f"{value[:16]}..."
    raise TypeError(
        f"{name}={shown!r} must be one number, or 'auto' when the optimizer is built; if it is "
        "'auto' times a ratio, give that group the ratio: in MADGRAD(groups, lr='auto') a group's "
        "own lr is a factor on the estimate, as in {'params': params, 'lr': 16.0}"
    )


def factor_from_string(group: dict[str, Any]) -> float:
    """A group's lr that has become a string; only an estimated lr may be "auto" again."""
    return 1.0 if group["auto_lr"] and group["lr"] == "auto" else number("lr", group["lr"])


def momentum_of_betas(betas: Any) -> Any:
    """The first of AdamW's two betas, which is the momentum here."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(
            f"betas={betas!r} must be two numbers, as AdamW takes them, of which the first is the "
            "momentum; use momentum=0.9"
        )
    one_number("betas[1]", betas[1], "pass momentum=0.9 instead of betas")
    return betas[0]


def refuse_late_betas(group: Mapping[str, Any]) -> None:
    """Refuse betas that were put into a group of the optimizer, where nothing reads them."""
    if "betas" in group:
        raise ValueError(
            f"a param group has got betas={group['betas']!r} since it was added, which no step "
            "reads; set its momentum to the first of them instead"
        )


def auto_lr(rule: Any, lr: Any) -> bool:
    """Whether lr is "auto"; refuses it for a rule that it cannot be estimated for."""
    if not isinstance(lr, str) or lr != "auto":
        return False
    if not rule.has_estimate:
        raise ValueError(
            f"lr='auto' needs x_0, which {rule.name} does not keep; build MADGRAD or MADGRADW with "
            "it, so that all groups have it, or give a number"
        )
    return True


def check_alike(groups: list[dict[str, Any]]) -> None:
    """Refuse lr="auto" for some groups only."""
    if len({bool(group["auto_lr"]) for group in groups}) > 1:
        raise ValueError(
            "lr='auto' must be given for all groups or for none; with MADGRAD(groups, lr='auto') a "
            "group's own lr is a factor on the estimate: use lr=0.1 for a tenth of it"
        )


def check(options: dict[str, Any]) -> None:
    """Refuse a torch group's options, naming the value, the limit and the remedy."""
    flags(options)
    check_numbers(options)
    if options["foreach"] and options["fused"]:
        raise ValueError("foreach=True and fused=True exclude each other; set one of them")
    if options["differentiable"] and (options["foreach"] or options["fused"]):
        raise ValueError(
            "differentiable=True runs on the eager backend only; leave foreach and fused unset"
        )
    if options["differentiable"] and options["compact"]:
        raise ValueError(
            "differentiable=True and compact=True exclude each other: rounding to codes has no "
            "derivative; leave compact unset"
        )
    if options["differentiable"] and options["stochastic_rounding"]:
        raise ValueError(
            "differentiable=True and stochastic_rounding=True exclude each other: rounding at "
            "random has no derivative; leave stochastic_rounding unset"
        )


def check_numbers(options: dict[str, Any], lr_name: str = "lr") -> None:
    """Refuse numbers out of range; `options` leaves out those that are not known yet."""
    for name in (lr_name, "momentum", "weight_decay", "eps", "last_eps", "reference_lr"):
        if name in options:
            value = number(name, options[name])
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be finite and >= 0; {REMEDY[name]}")
    if not number("momentum", options.get("momentum", 0.0)) < 1:
        raise ValueError(f"momentum={options['momentum']} must be in [0, 1); {REMEDY['momentum']}")
    _check_decay(options, lr_name)


def _check_decay(options: dict[str, Any], lr_name: str) -> None:
    decay = number("weight_decay", options.get("weight_decay", 0.0))
    lr = number(lr_name, options[lr_name]) if lr_name in options else None
    if options["decoupled_lr"]:
        name = "reference_lr" if "reference_lr" in options else lr_name
        reference = options.get(name)
        if reference is not None and not reference > 0:
            raise ValueError(
                f"{name}=0 must be > 0 with decoupled_lr=True, which decays by lr / the lr the "
                "group was built with; build with the peak lr and let a scheduler lower it"
            )
        if decay > 1:
            raise ValueError(
                f"weight_decay={decay} must be <= 1 with decoupled_lr=True: weights shrink by "
                "1 - weight_decay a step; use about lr times the decay you would give AdamW"
            )
    elif options.get("auto_lr"):  # lr is a factor on the estimate, which is not known yet
        return
    elif is_decoupled(options) and lr is not None and lr * decay > 1:
        raise ValueError(
            f"{lr_name}*weight_decay={lr * decay} must be <= 1 with decoupled_weight_decay=True: "
            f"weights shrink by 1 - {lr_name}*weight_decay a step; lower one of them"
        )


def check_schedule_free(options: Mapping[str, Any]) -> None:
    """Refuse what a mean of all z cannot have."""
    momentum = options["momentum"]
    if not isinstance(momentum, int | float):
        raise TypeError(
            f"momentum={momentum!r} must be a plain number with schedule_free=True, where the "
            "weights depend on it; use 0.9"
        )
    if not 0 < momentum < 1:
        raise ValueError(
            f"momentum={momentum} must be above 0 and below 1 with schedule_free=True: it is the "
            "part of the mean in the point at which gradients are taken; use 0.9"
        )
    steps = options["warmup_steps"]
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0:
        raise ValueError(
            f"warmup_steps={steps!r} must be a whole number of at least 0; use about a twentieth "
            "of the steps of the run"
        )


def rounds_at_random(options: dict[str, Any]) -> bool:
    """Whether half-precision weights are rounded at random; with codes they always are.

    So are schedule-free ones, as a mean keeps the errors that rounding to nearest repeats.
    """
    if "mean" in options and not options["differentiable"]:
        return True
    return bool(options["stochastic_rounding"] or options["compact"])


def is_decoupled(options: dict[str, Any]) -> bool:
    """Whether weight decay shrinks the weights instead of being added to the gradient."""
    return bool(options["decoupled_weight_decay"] or options["decoupled_lr"])


def decay_factor(options: dict[str, Any], lr: Any) -> Any:
    """What decoupled decay multiplies x and z by at this lr, unchecked."""
    rate = lr / options["reference_lr"] if options["decoupled_lr"] else lr
    return 1 - options["weight_decay"] * rate


def shrink(options: dict[str, Any], lr: Any) -> Any:
    """What decoupled decay multiplies x and z by at this lr, never below 0; None without it."""
    decay = options["weight_decay"]
    if not decay or not is_decoupled(options):
        return None
    factor = decay_factor(options, lr)
    # The compiler knows what a number is, and cannot ask one for an attribute.
    if not isinstance(factor, float | int) and hasattr(factor, "clamp"):
        return factor.clamp(min=0)
    if factor < 0 and options.get("auto_lr"):  # the user cannot foresee the estimate, so clamp
        return 0.0
    if factor < 0:
        raise ValueError(
            f"weight_decay={decay} at lr={lr} multiplies the weights by {factor}, which must be "
            ">= 0; lower weight_decay, or build the optimizer with the peak lr if decoupled_lr=True"
        )
    return factor


def decay(options: dict[str, Any], lr: Any, factor: Any) -> tuple[float, Any]:
    """Coupled decay, and what decoupled decay multiplies by: `Hyper.weight_decay` and `.shrink`.

    `lr` is `factor` times the estimate if lr="auto". decoupled_lr decays by the factor alone.
    """
    if not is_decoupled(options):
        return options["weight_decay"], None
    return 0.0, shrink(options, factor if options["decoupled_lr"] else lr)
