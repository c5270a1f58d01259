"""How a step is executed. The decisions about hardware are made here, and nowhere else.

A backend is a module with a function `step(method, h, params, grads, steps, buffers)`. The lists
run in parallel: real dense tensors, the step counters, and for each name of the method's layout
(`states.LAYOUTS`) a list of buffers, left out at the end when the method runs without it. The
backend updates params, buffers and steps in place, and nothing else. A fused backend keeps the
step counters on the device of their parameters, and has a class `Launch` (`prepared.Launch`),
with which a step that repeats itself is made ready once; on a GPU also a function `advance`, which
moves the numbers of an estimated learning rate on.
"""

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from cubegrad.backends import eager, foreach

NATIVE = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
FUSED = {"cpu": "native", "cuda": "triton"}  # by the type of device


@cache
def _load(name: str) -> ModuleType | str:
    """The backend, or why there is none."""
    try:
        return importlib.import_module(f"cubegrad.backends.{name}.launch")
    except ImportError as error:
        remedy = "reinstall where there is a C compiler" if name == "native" else "install triton"
        return f"not available: {error}; {remedy}"


def available() -> dict[str, str]:
    """Each backend, and "available" or the reason why it is not."""
    fused = {
        "cpu": _load("native"),
        "triton": _load("triton") if torch.cuda.is_available() else "not available: no CUDA device",
    }
    found = {name: it if isinstance(it, str) else "available" for name, it in fused.items()}
    return {"eager": "available", "foreach": "available", **found}


def _fused(params: list[Tensor]) -> ModuleType | str:
    """The fused backend for these parameters, or why there is none."""
    kinds = {param.device.type for param in params}
    if len(kinds) > 1:
        return f"not available for tensors on {' and '.join(sorted(kinds))} in one group"
    for param in params:
        if type(param) not in NATIVE:
            return f"not available for tensors of class {type(param).__name__}"
        if param.device.type not in FUSED:
            return f"not available for tensors on {param.device}"
    return _load(FUSED[kinds.pop()]) if kinds else eager


def choose(
    params: list[Tensor],
    *,
    foreach_wanted: bool | None,
    fused_wanted: bool | None,
    differentiable: bool,
) -> ModuleType:
    """The backend asked for, else the fastest one that fits."""
    if differentiable or torch.compiler.is_compiling():  # the compiler fuses the plain rule itself
        return eager
    if fused_wanted or (fused_wanted is None and foreach_wanted is None):
        fused = _fused(params)
        if isinstance(fused, ModuleType):
            return fused
        if fused_wanted:
            raise RuntimeError(
                f"fused=True, but the fused backend is {fused}; "
                "leave fused unset to get the fastest backend there is"
            )
    native = all(type(param) in NATIVE for param in params)  # others may lack list operations
    return foreach if foreach_wanted or (foreach_wanted is None and native) else eager


def scalar_kernel(
    device: torch.device, *, foreach_wanted: bool | None, fused_wanted: bool | None
) -> Callable[..., None] | None:
    """What moves an estimate's numbers on in one launch, where a fused backend may run."""
    if device.type != "cuda" or foreach_wanted or fused_wanted is False:
        return None
    fused = _load(FUSED[device.type])
    return fused.advance if isinstance(fused, ModuleType) else None
