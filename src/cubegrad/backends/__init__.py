"""How a batch of tensors is updated, and which backend runs.

`batch.py` says what a backend gets and what it must do. Which one runs is decided here; how it
suits its hardware (slice and block sizes, instruction sets) is decided by the backend itself.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from cubegrad.backends import eager, foreach
from cubegrad.backends.batch import PLAIN_CLASSES, Backend

FUSED = {"cpu": "native", "cuda": "triton"}  # by the type of device


@cache
def _load(folder: str) -> Backend | str:
    """The fused backend in this folder, or why there is none."""
    try:
        return cast(Backend, importlib.import_module(f"cubegrad.backends.{folder}.launch"))
    except ImportError as error:
        remedy = "reinstall where there is a C compiler" if folder == "native" else "install triton"
        return f"not available: {error}; {remedy}"


def available() -> dict[str, str]:
    """Each backend, and "available" or the reason why it is not."""
    fused = {
        "cpu": _load("native"),
        "triton": _load("triton") if torch.cuda.is_available() else "not available: no CUDA device",
    }
    reasons = {name: it if isinstance(it, str) else "available" for name, it in fused.items()}
    return {"eager": "available", "foreach": "available", **reasons}


def _fused(params: list[Tensor]) -> Backend | str:
    """The fused backend for these parameters, or why there is none."""
    kinds = {param.device.type for param in params}
    if len(kinds) > 1:
        return f"not available for tensors on {' and '.join(sorted(kinds))} in one group"
    for param in params:
        if type(param) not in PLAIN_CLASSES:
            return f"not available for tensors of class {type(param).__name__}"
        if param.device.type not in FUSED:
            return f"not available for tensors on {param.device}"
    return _load(FUSED[kinds.pop()]) if kinds else eager


def choose(params: list[Tensor], group: dict[str, Any]) -> Backend:
    """The backend that the group's options ask for, else the fastest one for its parameters."""
    if group["differentiable"] or torch.compiler.is_compiling():  # the compiler fuses the rule
        return eager
    foreach_wanted, fused_wanted = group["foreach"], group["fused"]
    if fused_wanted or (fused_wanted is None and foreach_wanted is None):
        fused = _fused(params)
        if not isinstance(fused, str):
            return fused
        if fused_wanted:
            raise RuntimeError(
                f"fused=True, but the fused backend is {fused}; "
                "leave fused unset to get the fastest backend there is"
            )
    plain = all(type(param) in PLAIN_CLASSES for param in params)
    return foreach if foreach_wanted or (foreach_wanted is None and plain) else eager


def estimate_kernel(
    device: torch.device, groups: Sequence[dict[str, Any]]
) -> Callable[..., None] | None:
    """What advances the estimate of lr="auto" in one launch, if these groups let one run."""
    unwanted = any(group["foreach"] or group["fused"] is False for group in groups)
    if device.type != "cuda" or unwanted:
        return None
    if isinstance(_load("triton"), str):
        return None
    kernel: Callable[..., None] = importlib.import_module(
        "cubegrad.backends.triton.estimate"
    ).advance
    return kernel
