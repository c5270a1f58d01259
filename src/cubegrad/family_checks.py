"""What `cubegrad.family` refuses, and a state dict checked before anything changes."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from cubegrad import options

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
            _check_bound(name, torch.as_tensor(group["grad_bound"]), param)


def _check_bound(name: str, bound: Tensor, param: Tensor) -> None:
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


def refuse_sparse(group: Group) -> None:
    for index, param in enumerate(group["params"]):
        if param.grad is not None and param.grad.layout != torch.strided:
            raise RuntimeError(
                f"{options.name_of(group, index)} has a gradient of layout {param.grad.layout}; it "
                "must be dense: use cubegrad.MADGRAD with momentum=0, or grad.to_dense()"
            )


def loaded_groups(
    groups: list[Group], state_dict: dict[str, Any], choices: dict[str, tuple[str, ...]]
) -> list[Group]:
    """Copies of the saved groups, which must be of the same sizes and methods."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"the state dict has {sorted(map(str, state_dict))}; it must have 'state' and "
            "'param_groups': load what state_dict() returned, whole"
        )
    saved = state_dict["param_groups"]
    sizes, found = ([len(group["params"]) for group in side] for side in (groups, saved))
    if sizes != found:
        raise ValueError(
            f"the state dict has param groups of {found} parameters, the optimizer {sizes}; "
            "build the optimizer over the same parameters and groups as when it was saved"
        )
    loaded = []
    for group, old in zip(groups, saved, strict=True):
        for name in choices:
            if old.get(name) != group[name]:
                raise ValueError(
                    f"the state dict has {name}={old.get(name)!r}, the optimizer {group[name]!r}; "
                    "build it with the choices it was saved with"
                )
        new = group | deepcopy(old) | {"params": group["params"]}
        options.check_family(new, choices)
        check_params(new)
        loaded.append(new)
    return loaded


def loaded_state(
    groups: list[Group], state_dict: dict[str, Any]
) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of the saved state, each value in the dtype and place it is kept in."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    owner = dict(zip(keys, (p for group in groups for p in group["params"]), strict=True))
    unknown = state_dict["state"].keys() - owner.keys()
    if unknown:
        raise ValueError(
            f"the state dict has state for {sorted(unknown, key=repr)}, which are none of its "
            f"{len(owner)} parameters; load what state_dict() returned, whole"
        )
    state = state_dict["state"].items()
    return {owner[key]: _one_state(key, owner[key], values) for key, values in state}


def _one_state(key: Any, param: Tensor, values: dict[str, Any]) -> dict[str, Tensor]:
    expected = {*SCALARS, *BUFFERS}
    if set(values) != expected:
        raise ValueError(
            f"the state of parameter {key!r} is {sorted(values)}, it must be {sorted(expected)}; "
            "load what state_dict() of the same class returned"
        )
    for name in BUFFERS:
        if values[name].shape != param.shape:
            raise ValueError(
                f"{name} of parameter {key!r} has shape {tuple(values[name].shape)}, its parameter "
                f"{tuple(param.shape)}; build the optimizer over the same parameters"
            )
    state = {name: values[name].to("cpu", copy=True) for name in SCALARS}
    for name in BUFFERS:
        state[name] = values[name].to(param.device, state_dtype(param), copy=True)
    return state
