"""Checks of a state dict that hold for every optimizer here, made before anything changes."""

from collections.abc import Callable, Container, Hashable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

Group = dict[str, Any]

WHOLE = "load what state_dict() returned, whole"


def plain(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make the state's dicts plain, which `torch.load(weights_only=True)` reads; in place.

    Entries that a wrapper or a hook has added stay as they are, and so does a state dict that a
    hook has replaced by something else.
    """
    if isinstance(state_dict, dict) and isinstance(state_dict.get("state"), dict):
        state_dict["state"] = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in state_dict["state"].items()
        }
    return state_dict


def parts(state_dict: Any) -> tuple[list[Group], dict[Any, Any]]:
    """The groups and the state of a state dict, with their types checked."""
    if not isinstance(state_dict, dict):
        raise ValueError(
            f"the state dict is of type {type(state_dict).__name__}, not a dict; {WHOLE}"
        )
    for name, kind in (("state", dict), ("param_groups", list)):
        if not isinstance(state_dict.get(name), kind):
            found = sorted(map(str, state_dict))
            raise ValueError(
                f"the state dict has no {kind.__name__} {name!r} but {found}; it must be what an "
                "optimizer's state_dict() returned, whole"
            )
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, dict):
            raise ValueError(
                f"param group {index} of the state dict is of type {type(group).__name__}, not a "
                f"dict; {WHOLE}"
            )
        if not isinstance(group.get("params"), list):
            raise ValueError(
                f"param group {index} of the state dict has no list 'params' but "
                f"{sorted(map(str, group))}; {WHOLE}"
            )
        for key in group["params"]:
            if not isinstance(key, Hashable):
                raise ValueError(
                    f"param group {index} of the state dict has {key!r} among its 'params', which "
                    f"must be keys of its state; {WHOLE}"
                )
    return state_dict["param_groups"], state_dict["state"]


def owners(groups: list[Group], saved: list[Group]) -> dict[Any, tuple[Tensor, Group]]:
    """The parameter and the saved group that each key of the saved state belongs to."""
    sizes, found = ([len(group["params"]) for group in side] for side in (groups, saved))
    if sizes != found:
        raise ValueError(
            f"the state dict has param groups of {found} parameters, the optimizer {sizes}; "
            "build the optimizer over the same parameters and groups as when it was saved"
        )
    owner: dict[Any, tuple[Tensor, Group]] = {}
    for group, old in zip(groups, saved, strict=True):
        for key, param in zip(old["params"], group["params"], strict=True):
            # torch writes one key twice for a parameter that is listed twice.
            if owner.setdefault(key, (param, old))[0] is not param:
                raise ValueError(
                    f"the state dict lists {key!r} for two parameters, and its state can be that "
                    f"of one only; {WHOLE}"
                )
    return owner


def shared(state: dict[Any, Any], known: Container[Any], marks: tuple[str, ...]) -> dict[str, Any]:
    """A copy of the state that belongs to no parameter: that of a wrapper or a hook.

    `marks` are entries of which the state of every parameter has one.
    """
    rest = {key: value for key, value in state.items() if key not in known}
    for key, value in rest.items():
        ours = isinstance(value, dict) and any(mark in value for mark in marks)
        if not isinstance(key, str) or ours:
            raise ValueError(
                f"the state dict has state for {key!r}, which is none of the parameters that its "
                f"groups list; {WHOLE}"
            )
    return deepcopy(rest)


def entries(key: Any, values: Any) -> dict[str, Any]:
    """A parameter's state without empty entries.

    A flattened checkpoint has an empty dict where a parameter lacks an entry that others have.
    """
    if not isinstance(values, dict):
        raise ValueError(
            f"the state of parameter {key!r} is of type {type(values).__name__}, not a dict; "
            f"{WHOLE}"
        )
    return {name: value for name, value in values.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def carried(value: Any, param: Tensor) -> Any:
    """A copy of what a wrapper keeps in a parameter's state.

    torch casts such tensors to the parameter's device and dtype. Here they keep their dtype, so
    that a resumed run has the bits of the unbroken one.
    """
    if isinstance(value, Tensor):
        return value.detach().to(param.device, copy=True)
    if type(value) is dict:
        return {name: carried(item, param) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(carried(item, param) for item in value)
    return deepcopy(value)


def number(what: str, value: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The value as a tensor without dimensions, on its device."""
    try:
        return torch.as_tensor(value, dtype=dtype).detach().reshape(())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is {value!r}; it must be one number: {WHOLE}") from error


def buffer(what: str, value: Any, param: Tensor, place: Tensor, is_code: bool = False) -> Tensor:
    """The value itself, checked to be a tensor that fits the place where it will be kept.

    A code must have the dtype of its place; others are converted to it.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} is of type {type(value).__name__}, not a tensor; {WHOLE}")
    if value.layout != torch.strided:
        raise ValueError(f"{what} has layout {value.layout}; it must be dense: use to_dense()")
    if value.is_meta and not param.is_meta:
        raise ValueError(f"{what} is on the meta device and has no values; load them from a file")
    if is_code and value.dtype != place.dtype:
        raise ValueError(
            f"{what} is {value.dtype}; codes for a parameter of {param.dtype} must be "
            f"{place.dtype}: {WHOLE}, over parameters of the dtype they were saved with"
        )
    if value.shape != place.shape or value.is_complex() != place.is_complex():
        raise ValueError(
            f"{what} is {value.dtype} of shape {tuple(value.shape)}, its parameter {param.dtype} "
            f"of shape {tuple(param.shape)}; build the optimizer over the same parameters, in the "
            "same order, as when it was saved"
        )
    return value


class _Check(NamedTuple):
    what: str
    holds: Callable[[float], bool]
    limit: str


class Checks:
    """Limits on numbers, checked all together at the end with one wait for each device.

    By then every process has taken part in all communication, so a process that refuses its shards
    leaves no other waiting.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, _Check]]] = {}

    def add(self, number: Tensor, what: str, holds: Callable[[float], bool], limit: str) -> None:
        if not number.is_meta:
            place = self.numbers.setdefault((number.device, number.dtype), [])
            place.append((number, _Check(what, holds, limit)))

    def count(self, what: str, value: Any) -> Tensor:
        step = number(what, value)
        self.add(step, what, lambda k: k >= 0 and k % 1 == 0, "one count >= 0")
        return step

    def sum_of_squares(self, what: str, values: Tensor) -> None:
        """Of a DTensor this process's shard. NaN and inf pass: a run may have diverged."""
        values = values.to_local() if hasattr(values, "to_local") else values
        if values.numel():
            # Half the time of a copy; `(values < 0).any()` takes that of four (67M, 2 CPU cores).
            smallest, _ = torch.aminmax(values.detach())
            limit = (
                ">= 0, as a sum of squares is: other numbers are in its place, as in a full state "
                "dict of FSDP1 with use_orig_params=True; save a sharded one, or use FSDP2"
            )
            self.add(smallest, f"the smallest value of {what}", lambda v: not v < 0, limit)

    def scales(self, what: str, values: Tensor) -> None:
        """Of codes; non-finite numbers are kept out of them."""
        if values.numel():
            for kind, number in zip(("smallest", "largest"), torch.aminmax(values), strict=True):
                self.add(
                    number,
                    f"the {kind} value of {what}",
                    lambda scale: 0 <= scale < float("inf"),
                    f"finite and >= 0; {WHOLE}",
                )

    def run(self) -> None:
        for pairs in self.numbers.values():
            values = torch.stack([number for number, _ in pairs]).tolist()
            for value, (_, check) in zip(values, pairs, strict=True):
                if not check.holds(value):
                    raise ValueError(f"{check.what} is {value}; it must be {check.limit}")
