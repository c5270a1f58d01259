"""What `cubegrad.family` refuses, and a state dict checked before anything changes."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from cubegrad import options
from cubegrad.state import state_dicts

Group = dict[str, Any]

BUFFERS = ("grad_sum", "grad_sq_sum", "centre")  # shaped as the parameter
SCALARS = ("step", "weight_sum")


def state_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def check_params(group: Group) -> None:
    for index, param in enumerate(group["params"]):
        name = options.name_of(group, index)
        if not param.is_floating_point():
            raise TypeError(
                f"{name} has dtype {param.dtype}; parameters must be real and floating point: for "
                "complex ones use cubegrad.MADGRAD"
            )
        if group["grad_bound"] is not None:
            _check_bound(name, group["grad_bound"], param)


def _check_bound(name: str, value: Any, param: Tensor) -> None:
    try:
        bound = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(_wrong_bound(value)) from error
    if bound.is_complex() or bound.layout != torch.strided or bound.is_meta:
        raise TypeError(_wrong_bound(value))
    if not bool(((bound >= 0) & bound.isfinite()).all()):
        raise ValueError(
            f"grad_bound={bound.tolist()} must be finite and >= 0; use the largest absolute value "
            "a coordinate of a gradient can take"
        )
    if bound.dim() and bound.shape != param.shape:
        raise ValueError(
            f"grad_bound has shape {tuple(bound.shape)}, {name} has {tuple(param.shape)}; pass one "
            "number, or one per coordinate and each parameter in a group of its own"
        )


def _wrong_bound(value: Any) -> str:
    return (
        f"grad_bound={value!r} must be a real number or a dense tensor of one per coordinate; use "
        "the largest absolute value a coordinate of a gradient can take"
    )


def refuse_sparse(group: Group) -> None:
    for index, param in enumerate(group["params"]):
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"{options.name_of(group, index)} has a gradient of layout {param.grad.layout}; it "
                "must be dense: use cubegrad.MADGRAD with momentum=0, or grad.to_dense()"
            )


def loaded(
    groups: list[Group], state_dict: dict[str, Any], choices: dict[str, tuple[str, ...]]
) -> tuple[dict[Any, Any], list[Group]]:
    """Copies of the saved state and groups, which must be of the same sizes and methods."""
    saved, saved_state = state_dicts.parts(state_dict)
    owner = state_dicts.owners(groups, saved)
    new_groups = [_group(group, old, choices) for group, old in zip(groups, saved, strict=True)]
    state: dict[Any, Any] = dict(state_dicts.shared(saved_state, owner, "grad_sq_sum"))
    checks = state_dicts.Checks()
    for key, values in saved_state.items():
        if key in owner:
            param, _ = owner[key]
            state[param] = _state(key, param, values, checks)
    checks.run()
    return state, new_groups


def _group(group: Group, old: Group, choices: dict[str, tuple[str, ...]]) -> Group:
    for name in choices:
        if old.get(name) != group[name]:
            raise ValueError(
                f"the state dict has {name}={old.get(name)!r}, the optimizer {group[name]!r}; "
                "build it with the choices it was saved with"
            )
    new = group | deepcopy(old) | {"params": group["params"]}
    options.check_family(new, choices)
    check_params(new)
    return new


def _state(key: Any, param: Tensor, values: Any, checks: state_dicts.Checks) -> dict[str, Any]:
    values = state_dicts.entries(key, values)
    expected = {*SCALARS, *BUFFERS}
    others = {name: value for name, value in values.items() if name not in expected}
    state = {name: state_dicts.carried(value, param) for name, value in others.items()}
    if not expected & values.keys():
        return state
    if not expected <= values.keys():
        raise ValueError(
            f"the state of parameter {key!r} is {sorted(map(str, values))}, it must have "
            f"{sorted(expected)}; load what state_dict() of the same class returned"
        )
    what = {name: f"{name} of parameter {key!r}" for name in expected}
    step = checks.count(what["step"], values["step"])
    total = state_dicts.number(what["weight_sum"], values["weight_sum"], torch.float64)
    checks.add(total, what["weight_sum"], lambda v: not v < 0, ">= 0, as a sum of weights is")
    state |= {"step": step.to("cpu", copy=True), "weight_sum": total.to("cpu", copy=True)}
    for name in BUFFERS:
        value = state_dicts.buffer(what[name], values[name], param)
        state[name] = value.to(param.device, state_dtype(param), copy=True)
    checks.sum_of_squares(what["grad_sq_sum"], state["grad_sq_sum"])
    return state
