"""What `cubegrad.family` refuses, always before anything changes."""

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad.options import flag, is_boolean, name_of, one_number
from cubegrad.state import layout, state_dicts

Group = dict[str, Any]
ChoiceNames = dict[str, tuple[str, ...]]  # option -> the names it accepts

BUFFERS = ("grad_sum", "grad_sq_sum", "centre")  # shaped as the parameter
SCALARS = ("step", "weight_sum")
FLAGS = ("mirror", "holds", "decoupled_weight_decay", "maximize")
GRAD_BOUND_REMEDY = "pass the largest absolute value a coordinate of a gradient can take"


class Limit(NamedTuple):
    holds: Callable[[float], bool]
    text: str
    remedy: str


def _not_negative(remedy: str) -> Limit:
    return Limit(lambda value: 0 <= value < math.inf, "finite and >= 0", remedy)


LIMITS = {
    "lr": _not_negative("each method has its own scale: sweep it"),
    "power": _not_negative("use 0.5, the paper's"),
    "momentum": Limit(
        lambda value: 0 <= value < 1, "in [0, 1)", "use 0.9, or averaging='none' for no momentum"
    ),
    "r": Limit(lambda value: 0 <= value <= 1, "in [0, 1]", "use the power of the weights, 0.5"),
    "j": _not_negative("use 1, which with r=0.5 is (3/2)/(k+3/2)"),
    "weight_decay": _not_negative("use 0"),
    "eps": _not_negative("use 1e-6, or 0 for none"),
}


def check_options(options: Group, choices: ChoiceNames) -> None:
    """Refuse a group's options, or the defaults of all groups."""
    for name, known in choices.items():
        if options[name] not in known:
            listed = ", ".join(map(repr, known))
            raise ValueError(f"{name}={options[name]!r} must be one of {listed}; pick one of them")
    for name, limit in LIMITS.items():
        value = one_number(name, options[name], limit.remedy)
        if not limit.holds(value):
            raise ValueError(f"{name}={value} must be {limit.text}; {limit.remedy}")
    for name in FLAGS:
        flag(name, options[name])
    if options["weights"] == "one" and float(options["lr"]) != 1:
        raise ValueError(
            f"lr={float(options['lr'])} must be 1 with weights='one', which have no step size; "
            "use weights='lr'"
        )
    if options["denominator"] == "theory" and options["grad_bound"] is None:
        raise ValueError(
            "grad_bound=None must be a number or one per coordinate with denominator='theory'; "
            + GRAD_BOUND_REMEDY
        )


def check_group(group: Group, choices: ChoiceNames) -> None:
    """Refuse a group's options, its parameters, or a grad_bound that does not fit them."""
    check_options(group, choices)
    for index, param in enumerate(group["params"]):
        name = name_of(group, index)
        if not param.is_floating_point():
            raise TypeError(
                f"{name} has dtype {param.dtype}; parameters must be real and floating point: for "
                "complex ones use cubegrad.MADGRAD"
            )
        if group["grad_bound"] is not None:
            _check_grad_bound(group["grad_bound"], name, param)


def _check_grad_bound(value: Any, name: str, param: Tensor) -> None:
    try:
        bound = torch.as_tensor(value)
        is_number = not (is_boolean(bound) or bound.is_complex())
        if not is_number or bound.layout != torch.strided or bound.is_meta:
            raise TypeError
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"grad_bound={value!r} must be a real number or a dense tensor of one per coordinate; "
            + GRAD_BOUND_REMEDY
        ) from error
    if not bool(((bound >= 0) & bound.isfinite()).all()):
        raise ValueError(
            f"grad_bound={bound.tolist()} must be finite and >= 0; {GRAD_BOUND_REMEDY}"
        )
    if bound.dim() and bound.shape != param.shape:
        raise ValueError(
            f"grad_bound has shape {tuple(bound.shape)}, {name} has {tuple(param.shape)}; pass one "
            "number, or one per coordinate with each parameter in its own group"
        )


def check_dense(group: Group) -> None:
    """Refuse sparse gradients."""
    for index, param in enumerate(group["params"]):
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"{name_of(group, index)} has a gradient of layout {param.grad.layout}; it must be "
                "dense: use cubegrad.MADGRAD with momentum=0, or grad.to_dense()"
            )


def checked_copies(
    groups: list[Group], state_dict: dict[str, Any], choices: ChoiceNames
) -> tuple[dict[Any, Any], list[Group]]:
    """Copies of the state and groups in `state_dict`, if they fit the optimizer's `groups`."""
    saved_groups, saved_state = state_dicts.parts(state_dict)
    owners = state_dicts.owners(groups, saved_groups)
    new_groups = [
        _copied_group(group, saved, choices)
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    state: dict[Any, Any] = dict(state_dicts.shared(saved_state, owners, ("grad_sq_sum",)))
    checks = state_dicts.Checks()
    for key, entries in saved_state.items():
        if key in owners:
            param, _ = owners[key]
            state[param] = _copied_state(key, param, entries, checks)
    checks.run()
    return state, new_groups


def _copied_group(group: Group, saved: Group, choices: ChoiceNames) -> Group:
    for name in choices:
        if saved.get(name) != group[name]:
            raise ValueError(
                f"the state dict has {name}={saved.get(name)!r}, the optimizer {group[name]!r}; "
                "build the optimizer with the choices it was saved with"
            )
    new = group | deepcopy(saved) | {"params": group["params"]}
    check_group(new, choices)
    return new


def _copied_state(
    key: Any, param: Tensor, entries: Any, checks: state_dicts.Checks
) -> dict[str, Any]:
    entries = state_dicts.entries(key, entries)
    ours = {*SCALARS, *BUFFERS}
    state = {
        name: state_dicts.carried(value, param)
        for name, value in entries.items()
        if name not in ours
    }
    if not ours & entries.keys():
        return state
    if not ours <= entries.keys():
        raise ValueError(
            f"the state of parameter {key!r} is {sorted(map(str, entries))}, it must have "
            f"{sorted(ours)}; load what state_dict() of the same class returned"
        )
    label = {name: f"{name} of parameter {key!r}" for name in ours}
    step = checks.count(label["step"], entries["step"])
    weight_sum = state_dicts.number(label["weight_sum"], entries["weight_sum"], torch.float64)
    checks.add(weight_sum, label["weight_sum"], lambda v: not v < 0, ">= 0, as a sum of weights is")
    state |= {"step": step.to("cpu", copy=True), "weight_sum": weight_sum.to("cpu", copy=True)}
    for name in BUFFERS:
        value = state_dicts.buffer(label[name], entries[name], param, param)
        state[name] = value.to(param.device, layout.state_dtype(param), copy=True)
    checks.sum_of_squares(label["grad_sq_sum"], state["grad_sq_sum"])
    return state
