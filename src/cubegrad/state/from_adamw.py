"""A state dict of torch's AdamW or Adam as one of MADGRADW.

Where x is not held, MADGRADW's z - x is -γ β/(1-β) m/(√ν + ε) of Adam's mean m of the gradients.
With this z - x the next step moves x as AdamW's would, but for the coordinates that are held.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from cubegrad import options
from cubegrad.rule import MADGRADW
from cubegrad.state import state_dicts

Group = dict[str, Any]
NEEDED = ("step", "exp_avg", "exp_avg_sq")
# Further entries of Adam's, which MADGRADW has no use for.
DROPPED = ("max_exp_avg_sq",)
KEPT = ("params", "param_names", "lr", "weight_decay", "eps", "maximize", "initial_lr")


def convert(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups, state = state_dicts.parts(state_dict)
    new_groups = list(map(_group, groups))
    owner = {key: group for group in groups for key in group["params"]}
    new_state = {
        key: _entries(key, owner[key], values) if key in owner else _others(key, values)
        for key, values in state.items()
    }
    return {**state_dict, "state": new_state, "param_groups": new_groups}


def _refuse(found: str, remedy: str) -> NoReturn:
    raise ValueError(f"{found}; {remedy}")


def _group(group: Group) -> Group:
    missing = [name for name in ("lr", "weight_decay", "eps") if name not in group]
    if missing:
        _refuse(
            f"a param group with betas lacks {missing}, so neither Adam nor AdamW wrote it",
            state_dicts.WHOLE,
        )
    first_lr = group.get("initial_lr") or options.number("lr", group["lr"])
    return {name: group[name] for name in KEPT if name in group} | {
        "rule": MADGRADW.name,
        "momentum": options.momentum_of_betas(group["betas"]),
        # Adam before torch 2.7 has no such option, and adds its decay to the gradient.
        "decoupled_weight_decay": bool(group.get("decoupled_weight_decay", True)),
        "decoupled_lr": False,
        "auto_lr": False,
        "reference_lr": float(first_lr),
    }


def _others(key: Any, values: Any) -> Any:
    """What a wrapper or a hook has put beside the state of the parameters."""
    if isinstance(key, str) and not (isinstance(values, dict) and set(NEEDED) & values.keys()):
        return values
    _refuse(f"the state dict has state for {key!r}, which no group lists", state_dicts.WHOLE)


@torch.no_grad()
def _entries(key: Any, group: Group, values: Any) -> dict[str, Any]:
    values = state_dicts.entries(key, values)
    others = {name: value for name, value in values.items() if name not in (*NEEDED, *DROPPED)}
    if len(others) == len(values):  # it has not been stepped yet
        return others
    missing = [name for name in NEEDED if name not in values]
    if missing:
        _refuse(
            f"the state of parameter {key!r} is {sorted(map(str, values))} and lacks {missing}",
            "pass what AdamW.state_dict() returned, whole",
        )
    step = state_dicts.number(f"the step count of parameter {key!r}", values["step"])
    mean, squares = (_real(f"{name} of parameter {key!r}", values[name]) for name in NEEDED[1:])
    if mean.shape != squares.shape:
        _refuse(
            f"exp_avg of parameter {key!r} has shape {tuple(mean.shape)} and exp_avg_sq "
            f"{tuple(squares.shape)}",
            state_dicts.WHOLE,
        )
    count = step.item()
    first, second = (
        options.one_number("betas", beta, "pass two numbers") for beta in group["betas"]
    )
    grad_sq_sum = squares / (1 - second**count or 1.0)
    rate = options.number("lr", group["lr"]) * first / (1 - first) / (1 - first**count or 1.0)
    denominator = grad_sq_sum.sqrt() + options.number("eps", group["eps"])
    dual_offset = torch.where(denominator == 0, 0.0, mean * -rate / denominator)
    buffers = {"grad_sq_sum": grad_sq_sum, "dual_offset": dual_offset}
    if values["exp_avg"].is_complex():
        buffers = {name: torch.view_as_complex(buffer) for name, buffer in buffers.items()}
    return others | {"step": step} | buffers


def _real(name: str, value: Any) -> Tensor:
    """In at least float32; a complex number is two."""
    if not isinstance(value, Tensor):
        _refuse(f"{name} is of type {type(value).__name__}, not a tensor", state_dicts.WHOLE)
    value = value.detach()
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.to(torch.promote_types(real.dtype, torch.float32))
