"""Parameters and gradients that no step can use are refused, before anything changes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from cubegrad import cautions, options, sharding
from cubegrad.rule import Rule
from cubegrad.state import blocks, layout

DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)


def check_param(name: str, param: Tensor) -> None:
    if param.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {param.dtype}; parameters must be float16, bfloat16, float32, "
            "float64 or complex: leave it out or convert it"
        )
    if is_lazy(param):
        return  # a lazy module gives it a shape before it has a gradient
    if param.is_conj() or param.is_neg():
        raise TypeError(
            f"{name} is a conjugated or negated view, which cannot be written to; parameters must "
            "hold their own values: use param.resolve_conj().resolve_neg()"
        )
    sharding.check(name, param)


def warn_of_uncoded(groups: list[dict[str, Any]]) -> None:
    cautions.warn_of_uncoded(
        (options.name_of(group, index), param.numel(), blocks.why_not_coded(param))
        for group in groups
        if group["compact"]
        for index, param in enumerate(group["params"])
        if param.requires_grad and not is_lazy(param)
    )


def check_grads(rule: Rule, group: dict[str, Any], state: dict[Tensor, Any]) -> None:
    """Refuse what torch lets someone assign: gradients and state that no step can use."""
    for index, param in enumerate(group["params"]):
        grad = param.grad
        if grad is None:
            continue
        if grad.dtype not in DTYPES or grad.is_complex() != param.is_complex():
            raise TypeError(
                f"the gradient of {options.name_of(group, index)} has dtype {grad.dtype} and its "
                f"parameter {param.dtype}; gradients must be float16, bfloat16, float32 or "
                "float64, complex for complex parameters: convert it"
            )
        if grad.shape != param.shape:
            raise ValueError(
                f"the gradient of {options.name_of(group, index)} has shape {tuple(grad.shape)} "
                f"and its parameter {tuple(param.shape)}; they must be equal: compute the gradient "
                "after changing param.data"
            )
        entries = state.get(param, {})
        if "step" in entries:
            _check_state(rule, options.name_of(group, index), param, entries)


def _check_state(rule: Rule, name: str, param: Tensor, entries: dict[str, Any]) -> None:
    held = layout.held(rule, entries)
    if held is None or layout.stray_codes(held, entries):
        raise ValueError(
            f"the state of {name} is {sorted(map(str, entries))}, and must have "
            f"{sorted(layout.required(rule))}, or all of the codes that belong together; put "
            "states in with load_state_dict"
        )
    held.check(name, param, entries)
