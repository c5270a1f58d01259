"""MADGRAD, the momentumized, adaptive, dual averaged gradient method.

The names here are for PyTorch, which is imported when the first of them is used; so
`cubegrad.optax`, for JAX, works without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cubegrad import backends, family, interop, memory, theory
    from cubegrad.groups import param_groups
    from cubegrad.optim import MADGRAD, MADGRADW, MirrorMADGRAD, estimated_lr

__version__ = "0.2.0.dev0"
__all__ = [
    "MADGRAD",
    "MADGRADW",
    "MirrorMADGRAD",
    "__version__",
    "backends",
    "estimated_lr",
    "family",
    "interop",
    "memory",
    "param_groups",
    "theory",
]


def __getattr__(name: str) -> Any:
    if name in ("MADGRAD", "MADGRADW", "MirrorMADGRAD", "estimated_lr"):
        value = getattr(importlib.import_module("cubegrad.optim"), name)
    elif name == "param_groups":
        value = importlib.import_module("cubegrad.groups").param_groups
    elif name in ("backends", "family", "interop", "memory", "theory"):
        value = importlib.import_module(f"cubegrad.{name}")
    else:
        raise AttributeError(f"module 'cubegrad' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
