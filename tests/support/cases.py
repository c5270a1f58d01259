"""The grid of backends, dtypes, options and shapes; a new backend adds a record to it."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

import cubegrad
from cubegrad.rule import SCHEDULE_FREE as SCHEDULE_FREE_RULE
from cubegrad.rule import Rule


@dataclass(frozen=True)
class Backend:
    name: str
    flags: dict[str, Any]
    device: str = "cpu"
    module: Any = None  # used instead of the backend that the optimizer would choose
    interpreted: bool = False  # a thousand times slower, and truncates bfloat16 where a GPU rounds
    dtypes: tuple[torch.dtype, ...] = (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.complex128,
    )

    def __str__(self) -> str:
        return self.name


EAGER = Backend("eager", {"foreach": False})
NATIVE = Backend("cpu", {"fused": True})
BACKENDS = [
    EAGER,
    Backend("foreach", {"foreach": True}),
    Backend("eager-capturable", {"foreach": False, "capturable": True}),
    Backend("foreach-capturable", {"foreach": True, "capturable": True}),
    NATIVE,
    Backend("cpu-capturable", {"fused": True, "capturable": True}),
]
if torch.cuda.is_available():
    BACKENDS = [
        Backend("eager-cuda", {"foreach": False}, "cuda"),
        Backend("foreach-cuda", {"foreach": True}, "cuda"),
        Backend("triton", {"fused": True}, "cuda"),
        Backend("triton-capturable", {"fused": True, "capturable": True}, "cuda"),
    ]
elif os.environ.get("TRITON_INTERPRET") == "1":
    triton = importlib.import_module("cubegrad.backends.triton.launch")
    BACKENDS += [
        Backend("triton", {}, module=triton, interpreted=True),
        Backend("triton-capturable", {"capturable": True}, module=triton, interpreted=True),
    ]
TRITON = next((backend for backend in BACKENDS if backend.name == "triton"), None)
FAST_BACKENDS = [backend for backend in BACKENDS if not backend.interpreted]


@dataclass(frozen=True)
class Method:
    name: str
    optimizer: type[torch.optim.Optimizer]
    oracle: type[oracle.Madgrad] | type[oracle.MirrorMadgrad] | type[oracle.Madgradw]

    def __str__(self) -> str:
        return self.name

    @property
    def rule(self) -> Rule:
        return self.optimizer._rule


MADGRAD = Method("madgrad", cubegrad.MADGRAD, oracle.Madgrad)
MIRROR = Method("mirror", cubegrad.MirrorMADGRAD, oracle.MirrorMadgrad)
MADGRADW = Method("madgradw", cubegrad.MADGRADW, oracle.Madgradw)
METHODS = [MADGRAD, MIRROR, MADGRADW]


class ScheduleFreeMADGRADW(cubegrad.MADGRADW):
    _rule = SCHEDULE_FREE_RULE
    _has_warned_of_saving = True

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, schedule_free=True, **options)


SCHEDULE_FREE = Method("schedule-free", ScheduleFreeMADGRADW, oracle.ScheduleFree)

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)
# With capturable, Triton's kernels are interpreted for every option in test_backends.py; doing so
# again for a test that is long by itself takes up to 9 s a case.
each_backend_of_a_long_test = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=pytest.mark.thorough)
        if backend.interpreted and backend.flags
        else backend
        for backend in BACKENDS
    ],
    ids=str,
)
each_fast_backend = pytest.mark.parametrize("backend", FAST_BACKENDS, ids=str)
each_method = pytest.mark.parametrize("method", METHODS, ids=str)
each_class = pytest.mark.parametrize("cls", [method.optimizer for method in METHODS])

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-momentum": {"momentum": 0.0},
    "eps0": {"eps": 0.0},
    "eps0-no-momentum": {"eps": 0.0, "momentum": 0.0},
    "l2": {"weight_decay": 0.1},
    "l2-maximize": {"weight_decay": 0.1, "maximize": True},
    "decoupled": {"weight_decay": 0.5, "decoupled_weight_decay": True},
    "decoupled-no-momentum": {
        "weight_decay": 0.5,
        "decoupled_weight_decay": True,
        "momentum": 0.0,
        "maximize": True,
    },
    "decoupled-lr": {"weight_decay": 0.01, "decoupled_lr": True},
    "large-momentum": {"momentum": 0.99, "lr": 0.1},
    "at-random": {"stochastic_rounding": True},
    "at-random-no-momentum": {"stochastic_rounding": True, "momentum": 0.0},
    "at-random-decoupled": {
        "stochastic_rounding": True,
        "weight_decay": 0.5,
        "decoupled_weight_decay": True,
    },
}


def lr_at(k: int, base: float) -> float:
    """A schedule with a warm-up from 0, a plateau and a drop."""
    return base * min(1.0, k / 3) * (0.1 if 10 < k < 15 or k > 100 else 1.0)


def settings(options: dict[str, Any], lr: float | None = None) -> oracle.Settings:
    base = {"lr": 1e-2, "momentum": 0.9, "eps": 1e-6} | options
    base.pop("stochastic_rounding", None)  # the oracle does not round
    first = base["lr"]
    if lr is not None:
        base["lr"] = lr
    return oracle.Settings(**base, first_lr=first)


def build(
    method: Method, backend: Backend, params: list[Tensor], options: dict[str, Any]
) -> torch.optim.Optimizer:
    base = {"lr": 1e-2, "momentum": 0.9, "eps": 1e-6, "weight_decay": 0.0} | options
    base.setdefault("decoupled_weight_decay", False)
    optimizer = method.optimizer(params, **base, **backend.flags)  # type: ignore[call-arg]
    if backend.module is not None:
        optimizer._backend = lambda _: backend.module
    return optimizer


def numbers(tensor: Tensor) -> np.ndarray:
    """float64 coordinates; a complex number is two of them."""
    tensor = tensor.detach().cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.double().numpy().copy()


def stored(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, np.ndarray]:
    return {k: numbers(v) for k, v in optimizer.state[param].items() if k != "step"}


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    base = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, dtype=base, generator=generator).to(dtype)


def channels_last(t: Tensor) -> Tensor:
    return t.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Shape:
    """A parameter's shape, and the memory layout of it and of its gradient."""

    name: str
    shape: tuple[int, ...]
    param: Any = field(default=Tensor.clone)
    grad: Any = field(default=Tensor.clone)

    def __str__(self) -> str:
        return self.name


def transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


def gapped(t: Tensor) -> Tensor:
    """A view with holes, at an odd offset."""
    room = torch.zeros(t.numel() * 2 + 1, dtype=t.dtype)
    view = room[1:].view(*t.shape, 2)[..., 0]
    return view.copy_(t)


SHAPES = [
    Shape("vector", (37,)),
    Shape("scalar", ()),
    Shape("empty", (0, 3)),
    Shape("matrix", (5, 7)),
    Shape("transposed", (5, 7), transposed),
    Shape("grad-transposed", (5, 7), Tensor.clone, transposed),
    Shape("channels-last", (2, 3, 4, 5), channels_last),
    Shape("grad-channels-last", (2, 3, 4, 5), Tensor.clone, channels_last),
    Shape("gapped", (4, 6), gapped, gapped),
]


def moved(value: Tensor, device: str) -> Tensor:
    """The value on the device, with the strides, gaps and offset that `to` would not keep."""
    if value.device.type == device:
        return value
    room = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return room.to(device).as_strided(value.shape, value.stride(), value.storage_offset())


def parameter(value: Tensor, device: str) -> torch.nn.Parameter:
    return torch.nn.Parameter(moved(value, device))


@contextmanager
def no_change(*tensors: Tensor) -> Iterator[None]:
    """Assert that not one bit of the tensors changes inside the block."""
    before = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, old in zip(tensors, before, strict=True):
        assert same_bits(tensor.detach(), old)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host waits for the GPU inside the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
