"""Checkpoints of other MADGRAD packages, read in: those of madgrad, timm and pytorch_optimizer.

They keep the paper's quantities under other names, and step by lr + eps where the paper has lr.
"""

import warnings
from typing import Any

import torch

from cubegrad.states.checkpoint import OURS

Group = dict[str, Any]

# What each package calls its option for decoupled decay, which is how its groups are known.
PACKAGES = {
    "decouple_decay": "madgrad",
    "decoupled_decay": "timm",
    "weight_decouple": "pytorch_optimizer",
}
OPTIONS = ("lr", "eps", "momentum", "weight_decay", "params")
# pytorch_optimizer's: a backend, which is the new optimizer's to choose, and a count kept at 0.
DROPPED = ("foreach", "step")
NAMES = {"s": "grad_sum", "grad_sum_sq": "grad_sq_sum", "x0": "initial_param", "z": "z"}


def convert(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn another package's state dict into one for MADGRAD, or MirrorMADGRAD if it was that.

    The run then goes on as it would have there, but for three things. Decoupled decay becomes
    cubegrad's, with a warning. A scheduler that writes lr afresh has to add eps itself. Steps
    are counted per parameter, as in timm; madgrad and pytorch_optimizer have one count for all,
    and a parameter that is without a gradient from here on falls behind theirs. No package
    saves maximize: build the new optimizer with it.
    """
    groups, state = _parts(state_dict)
    package = _package(groups, "k" in state)
    owner = {key: group for group in groups for key in group["params"]}
    converted = {
        key: _entry(package, key, owner.get(key), values, state.get("k"))
        for key, values in state.items()
        if key != "k" and values != {}
    }
    if len({"z" in values for values in converted.values()}) > 1:
        raise _unknown("state of MADGRAD and of MirrorMADGRAD together", "one of the two")
    new_groups = [_group(package, group) for group in groups]
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
        if set(OURS) <= set(group):
            raise ValueError(
                f"param group {index} has {sorted(group)}, so cubegrad wrote it; expected one of "
                "another package: give this state dict to load_state_dict as it is"
            )
        found = [package for flag, package in PACKAGES.items() if flag in group]
        if not found and has_k:
            found = ["madgrad"]  # which once saved no flag, and reads a missing one as False
        if len(found) != 1 or not set(OPTIONS) <= set(group):
            keys = f"{sorted(group)} in param group {index}"
            raise _unknown(keys, f"{[*OPTIONS]} and one of {[*PACKAGES]}")
        packages.update(found)
    if len(packages) != 1 or (has_k and "timm" in packages):
        mixed = f"groups of {sorted(packages)} {'with' if has_k else 'without'} a count 'k'"
        raise _unknown(mixed, "groups of one package, and no 'k' with timm's")
    return packages.pop()


def _entry(package: str, key: Any, group: Group | None, values: Any, k: Any) -> dict[str, Any]:
    if group is None:
        raise _unknown(f"state for {key!r}, which no param group lists", "state of parameters")
    names = {"grad_sum_sq", "step"} if package == "timm" else {"grad_sum_sq"}
    mirror = package == "madgrad" and "z" in values
    names |= {"z"} if mirror else {"s"} if group["momentum"] == 0 else {"s", "x0"}
    stale = {"x0"} - names if not mirror else set()  # left from before momentum was 0, not read
    if set(values) - stale != names:
        raise _unknown(f"{sorted(values)} for parameter {key!r}", f"{sorted(names)}")
    count = values["step"] if package == "timm" else k
    if count is None:
        raise _unknown(f"{package}'s groups and no count 'k' in the state", "'k' there")
    step = torch.as_tensor(count, dtype=torch.float32).squeeze()
    return {"step": step} | {ours: values[name] for name, ours in NAMES.items() if name in names}


def _group(package: str, group: Group) -> Group:
    kept = {name: value for name, value in group.items() if name not in (*PACKAGES, *DROPPED)}
    lr = group["lr"]
    if package == "timm" or lr != 0:  # timm alone adds eps to an lr of 0
        lr = lr + group["eps"]
    return kept | {
        "lr": lr,
        "decoupled_weight_decay": any(group.get(flag, False) for flag in PACKAGES),
        "decoupled_lr": False,
        "reference_lr": float(kept.get("initial_lr") or lr),
    }
