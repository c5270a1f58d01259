"""A state dict checked against the parameters it is for, before anything changes."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import options, sharding
from cubegrad.states import LAYOUTS, OPTIONAL, counter, zeros

Group = dict[str, Any]

# Options that a group of ours always has, and a group of no other optimizer has all of.
OURS = ("lr", "momentum", "weight_decay", "eps", "decoupled_weight_decay")
FOREIGN = "load a checkpoint of another MADGRAD package through cubegrad.interop.convert"


class Loaded(NamedTuple):
    state: dict[Tensor, dict[str, Tensor]]
    groups: list[Group]


def checked(
    method: str, groups: list[Group], defaults: dict[str, Any], state_dict: dict[str, Any]
) -> Loaded:
    """Copies of the state dict's values, in the form the optimizer keeps them."""
    for key, kind in (("state", dict), ("param_groups", list)):
        if not isinstance(state_dict.get(key), kind):
            found = sorted(map(str, state_dict))
            raise ValueError(
                f"the state dict has no {kind.__name__} {key!r} but {found}; it must be what an "
                "optimizer's state_dict() returned, whole"
            )
    saved = [_group(defaults, new) for new in state_dict["param_groups"]]
    _check_sizes(groups, saved)
    owner: dict[Any, tuple[Tensor, Group]] = {}
    for group, new in zip(groups, saved, strict=True):
        owner.update(zip(new["params"], ((p, new) for p in group["params"]), strict=True))
    state = {}
    for key, values in state_dict["state"].items():
        if key not in owner:
            raise ValueError(
                f"the state dict has state for {key!r}, which is none of its parameters "
                f"({len(owner)} in all); {FOREIGN}"
            )
        param, new = owner[key]
        state[param] = _state(method, key, param, new, values)
    for group, new in zip(groups, saved, strict=True):
        new["params"] = group["params"]
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    return Loaded(state, saved)


def _group(defaults: dict[str, Any], new: Group) -> Group:
    missing = [name for name in OURS if name not in new]
    if missing or not isinstance(new.get("params"), list):
        raise ValueError(
            f"a param group of the state dict lacks {missing or ['params']}, so cubegrad did not "
            f"write it; it has {sorted(new)}: {FOREIGN}"
        )
    group = defaults | {"auto_lr": False} | deepcopy(new)  # as in checkpoints from before it
    group.setdefault("reference_lr", options.number("lr", group["lr"]))
    group.setdefault("last_eps", group["eps"])
    options.check(group)
    if group["auto_lr"]:
        group["estimate"] = _estimate(group.get("estimate"))
    return group


def _estimate(value: Any) -> Tensor:
    found = value if isinstance(value, Tensor) else torch.tensor([])
    if found.shape != (5,) or not found[0].isfinite():  # the others diverge with the run
        raise ValueError(
            f"the estimate of a param group with lr='auto' is {value!r}; it must be five numbers, "
            "the first of them finite, as state_dict() gave them"
        )
    return sharding.local(found).detach().to(torch.float64)


def _check_sizes(groups: list[Group], saved: list[Group]) -> None:
    sizes, found = ([len(group["params"]) for group in side] for side in (groups, saved))
    if sizes != found:
        raise ValueError(
            f"the state dict has param groups of {found} parameters, the optimizer {sizes}; "
            "build the optimizer over the same parameters and groups as when it was saved"
        )


def _state(
    method: str, key: Any, param: Tensor, group: Group, values: dict[str, Any]
) -> dict[str, Tensor]:
    # A flattened checkpoint has an empty dict for what one parameter has and another has not.
    values = {name: value for name, value in values.items() if value != {}}
    if not values:
        return {}
    expected = {"step", *LAYOUTS[method]}
    if not expected - OPTIONAL <= set(values) <= expected:
        siblings = [m for m, layout in LAYOUTS.items() if set(layout) - OPTIONAL <= set(values)]
        remedy = f"it is {siblings[0]}'s, load it there" if siblings else FOREIGN
        raise ValueError(
            f"the state of parameter {key!r} is {sorted(values)}; {method} keeps "
            f"{sorted(expected)} ({', '.join(OPTIONAL & expected) or 'nothing'} may be missing): "
            f"{remedy}"
        )
    state = {"step": counter(param, group["capturable"]).copy_(_step(key, values["step"]))}
    for name in LAYOUTS[method]:
        if name in values:
            state[name] = _buffer(key, name, param, values[name])
    return state


def _step(key: Any, value: Any) -> Tensor:
    wrong = ValueError(f"step of parameter {key!r} is {value!r}; it must be one count >= 0")
    try:
        step = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error
    if step.numel() != 1 or not 0 <= step.item() < float("inf") or step.item() % 1:
        raise wrong
    return step.reshape(())


def _buffer(key: Any, name: str, param: Tensor, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} of parameter {key!r} is a {type(value).__name__}, not a tensor")
    if value.shape != param.shape or value.is_complex() != param.is_complex():
        raise ValueError(
            f"{name} of parameter {key!r} is {value.dtype} of shape {tuple(value.shape)}, its "
            f"parameter {param.dtype} of shape {tuple(param.shape)}; build the optimizer over "
            "the same parameters, in the same order, as when it was saved"
        )
    buffer = zeros(param)
    sharding.local(buffer).copy_(sharding.placed(value, param))
    return buffer
