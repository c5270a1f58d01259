"""Checkpoints of other optimizers, read in: other MADGRAD packages', and AdamW's for MADGRADW.

The packages madgrad, timm and pytorch_optimizer keep the paper's quantities under other names, and
step by lr + eps where the paper has lr.
"""

import warnings
from collections.abc import Hashable
from typing import Any

from cubegrad import options
from cubegrad.state import from_adamw, state_dicts
from cubegrad.state.checkpoint import OURS, other_method

Group = dict[str, Any]

# What each package calls its option for decoupled decay, which is how its groups are known.
PACKAGES = {
    "decouple_decay": "madgrad",
    "decoupled_decay": "timm",
    "weight_decouple": "pytorch_optimizer",
}
NUMBERS = ("lr", "eps", "momentum", "weight_decay")
OPTIONS = (*NUMBERS, "params")
# pytorch_optimizer's: a backend, which is the new optimizer's to choose, and a count kept at 0.
DROPPED = ("foreach", "step")
NAMES = {"s": "grad_sum", "grad_sum_sq": "grad_sq_sum", "x0": "initial_param", "z": "z"}
KNOWN = {*NAMES, "step"}


def convert(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn another package's state dict into one for MADGRAD, or MirrorMADGRAD if it was that.

    One of torch's AdamW or Adam becomes MADGRADW's: ν is Adam's mean of squares, z lies where the
    next step goes on as Adam's would, and betas[0] is the momentum.

    A run of another package continues as it would have there, with three exceptions. Decoupled
    decay becomes cubegrad's, with a warning. A scheduler that overwrites lr has to add eps itself.
    Steps are counted per parameter, as in timm; madgrad and pytorch_optimizer have one count for
    all, so a parameter that misses a gradient falls behind their count. No package saves maximize:
    build the new optimizer with it. Entries that a wrapper has added stay as they are.
    """
    groups, state = _parts(state_dict)
    if any(isinstance(group, dict) and "betas" in group for group in groups):
        return from_adamw.convert(state_dict)
    package = _package(groups, "k" in state)
    new_groups = [_group(package, group) for group in groups]
    owner = {key: group for group in new_groups for key in group["params"]}
    converted = {
        key: _entry(package, key, owner.get(key), values, state.get("k"))
        for key, values in state.items()
        if key != "k" and not (isinstance(values, dict) and not values)
    }
    stepped = [converted[key] for key in owner if "step" in converted.get(key, ())]
    if len({"z" in values for values in stepped}) > 1:
        raise _unknown("state of MADGRAD and of MirrorMADGRAD together", "one of the two")
    decays = [bool(g["decoupled_weight_decay"] and g["weight_decay"]) for g in new_groups]
    if any(decays):
        warnings.warn(
            f"param groups {[index for index, decay in enumerate(decays) if decay]} have decoupled "
            f"decay: {package} shrinks x alone (its mirror form z alone), cubegrad shrinks x and "
            "z, and the run goes on with cubegrad's; set their weight_decay to 0 to have none",
            stacklevel=2,
        )
    return {**state_dict, "state": converted, "param_groups": new_groups}


def _unknown(found: str, expected: str) -> ValueError:
    remedy = "pass the whole state_dict() of a MADGRAD of madgrad, timm or pytorch_optimizer"
    return ValueError(f"the state dict has {found}; expected {expected}: {remedy}")


def _parts(state_dict: dict[str, Any]) -> tuple[list[Group], dict[Any, Any]]:
    if not isinstance(state_dict, dict):
        raise _unknown(f"the type {type(state_dict).__name__}", "a dict")
    for key, kind in (("state", dict), ("param_groups", list)):
        if not isinstance(state_dict.get(key), kind):
            found = f"no {kind.__name__} {key!r} but the keys {sorted(map(str, state_dict))}"
            raise _unknown(found, "'state' and 'param_groups'")
    return state_dict["param_groups"], state_dict["state"]


def _package(groups: list[Group], has_k: bool) -> str:
    packages = set()
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            raise _unknown(f"{group!r} as param group {index}", "a dict")
        if set(OURS) <= set(group):
            raise ValueError(
                f"param group {index} has {sorted(map(str, group))}, so cubegrad wrote it; "
                "expected one of another package: give this state dict to load_state_dict as it is"
            )
        found = [package for flag, package in PACKAGES.items() if flag in group]
        if not found and has_k:
            found = ["madgrad"]  # which once saved no flag, and reads a missing one as False
        if len(found) != 1 or not set(OPTIONS) <= set(group):
            names = f"{sorted(map(str, group))} in param group {index}"
            remedy = None if found else other_method(group, {})
            if remedy:
                raise ValueError(f"the state dict has {names}; {remedy}")
            raise _unknown(names, f"{[*OPTIONS]} and one of {[*PACKAGES]}")
        keys = group["params"]
        if not (isinstance(keys, list) and all(isinstance(key, Hashable) for key in keys)):
            raise _unknown(f"{keys!r} as 'params' of param group {index}", "a list of keys")
        packages.update(found)
    if len(packages) != 1 or (has_k and "timm" in packages):
        mixed = f"groups of {sorted(packages)} {'with' if has_k else 'without'} a count 'k'"
        raise _unknown(mixed, "groups of one package, and no 'k' with timm's")
    return packages.pop()


def _entry(package: str, key: Any, group: Group | None, values: Any, k: Any) -> Any:
    if group is None:
        if isinstance(key, str) and not (isinstance(values, dict) and KNOWN & values.keys()):
            return values  # a wrapper's or a hook's
        raise _unknown(f"state for {key!r}, which no param group lists", "state of parameters")
    if not isinstance(values, dict):
        raise _unknown(f"state of type {type(values).__name__} for parameter {key!r}", "a dict")
    if not KNOWN & values.keys():  # it has not been stepped yet
        return values
    names = {"grad_sum_sq", "step"} if package == "timm" else {"grad_sum_sq"}
    mirror = package == "madgrad" and "z" in values
    names |= {"z"} if mirror else {"s"} if group["momentum"] == 0 else {"s", "x0"}
    stale = {"x0"} - names if not mirror else set()  # left from before momentum was 0, not read
    if (KNOWN & values.keys()) - stale != names:
        raise _unknown(f"{sorted(map(str, values))} for parameter {key!r}", f"{sorted(names)}")
    count = values["step"] if package == "timm" else k
    if count is None:
        raise _unknown(f"{package}'s groups and no count 'k' in the state", "'k' there")
    step = state_dicts.number(f"the step count of parameter {key!r}", count)
    others = {name: value for name, value in values.items() if name not in KNOWN}
    return others | {"step": step} | {NAMES[n]: values[n] for n in NAMES if n in names}


def _group(package: str, group: Group) -> Group:
    kept = {name: value for name, value in group.items() if name not in (*PACKAGES, *DROPPED)}
    numbers = {name: options.number(name, group[name]) for name in NUMBERS}
    lr = group["lr"]
    if package == "timm" or lr != 0:  # timm alone adds eps to an lr of 0
        lr = lr + numbers["eps"]
    return kept | {
        "lr": lr,
        "momentum": numbers["momentum"],  # a plain 0 is what needs no x_0
        "decoupled_weight_decay": any(group.get(flag, False) for flag in PACKAGES),
        "decoupled_lr": False,
        "auto_lr": False,
        "reference_lr": float(kept.get("initial_lr") or lr),
    }
