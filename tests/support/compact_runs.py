"""Runs with compact=True, and what tests compare of them."""

from collections.abc import Callable, Iterable
from typing import Any

import cases
import torch
from short_runs import parameters, same_bits
from torch import Tensor

from cubegrad.state import layout

# Just large enough for codes, with rows that are filled up, of four dimensions; and a small one.
SHAPES = [(64, 64), (16, 300), (6, 4, 16, 16), (5, 7)]


def build(cls: type, params: Any, backend: cases.Backend = cases.EAGER, **options: Any) -> Any:
    optimizer = cls(params, **{"compact": True, "weight_decay": 0.0, **options, **backend.flags})
    if backend.module is not None:
        optimizer._backend = lambda _: backend.module
    return optimizer


def held_layouts(optimizer: Any) -> list[layout.Layout | None]:
    states = (optimizer.state[param] for param in optimizer.param_groups[0]["params"])
    return [layout.held(optimizer._rule, state) for state in states]


def state_bytes(optimizer: Any, param: Tensor) -> float:
    """Allocated for each element of the parameter, the step count included."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in optimizer.state[param].values()
    }
    return sum(storages.values()) / param.numel()


def state_tensors(optimizer: Any, params: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for param in params for tensor in optimizer.state[param].values()]


def same_runs(params: Any, optimizer: Any, others: Any, other: Any) -> bool:
    """Whether weights and states are the same, bit for bit, in entries of the same names.

    A step count may be on the host or, loaded from a checkpoint, on the parameter's device.
    """
    for p, q in zip(params, others, strict=True):
        if list(optimizer.state[p]) != list(other.state[q]):
            return False
    states = (
        [tensor.cpu() for tensor in state_tensors(one, some)]
        for one, some in ((optimizer, params), (other, others))
    )
    return same_bits(params, others) and same_bits(*states)


def noisy_grads(params: Iterable[Tensor], k: int) -> None:
    """Of a quadratic with its minimum elsewhere, and noise of the size of a first gradient."""
    for i, param in enumerate(params):
        shape, dtype = tuple(param.shape), param.dtype
        x, there, noise = (
            t.to(param.device, torch.promote_types(dtype, torch.float32))
            for t in (param.detach(), *(cases.randn(shape, dtype, seed) for seed in (i + 50, k)))
        )
        param.grad = (x - there + noise).to(dtype)


def drift(
    cls: type,
    steps: int = 30,
    before_step: Callable[[Any, int], None] = lambda *_: None,
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> float:
    """How far a run in codes ends from one with float32 state, relative to the way that one went.

    `before_step(optimizer, k)` may change the run's options. The largest of all parameters.
    """
    ends = []
    for compact in (True, False):
        params = parameters(shapes, dtype)
        optimizer = build(cls, params, compact=compact, **options)
        for k in range(steps):
            noisy_grads(params, k)
            before_step(optimizer, k)
            optimizer.step()
        ends.append(params)
    starts = parameters(shapes, dtype)
    return max(
        (rms(coded, plain) / rms(plain, start)).item()
        for coded, plain, start in zip(*ends, starts, strict=True)
    )


def rms(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return (a.detach().to(wide) - b.detach().to(wide)).abs().square().mean().sqrt()
