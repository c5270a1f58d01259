"""What gradient release cannot do is refused here."""

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cubegrad import sharding
from cubegrad.backends.batch import capturing

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


class Held(NamedTuple):
    """A gradient that waits for step(), and how often it had been written to."""

    param: Tensor
    grad: Tensor
    version: int


def version_of(grad: Tensor) -> int:
    """Grows when the gradient is written to, also by way of its shard.

    Not by torch's operations on lists of DTensors (2.13), so not by clip_grad_norm_ under FSDP2.
    """
    return grad._version + sharding.local(grad)._version


def refuse_options(optimizer: "BaseOptimizer") -> None:
    if any(group["differentiable"] for group in optimizer.param_groups):
        raise RuntimeError(
            "differentiable=True keeps the graph of a step, and release_gradients() steps while "
            "backward() uses it up; set differentiable=False"
        )
    if any(getattr(optimizer, name, None) is not None for name in ("found_inf", "grad_scale")):
        refuse_scaler()
    if capturing():
        raise RuntimeError(
            "backward() or step() is being captured in a CUDA graph, which keeps the memory of all "
            "gradients, so release_gradients() would save nothing; use ordinary steps"
        )


def refuse_in_open_step(optimizer: "BaseOptimizer", what: str) -> None:
    """Some parameters have been stepped and others not, and nothing else may come in between."""
    if optimizer._release is not None and optimizer._release.is_open:
        raise RuntimeError(
            f"{what} comes between backward() and step(), and with release_gradients() the step "
            "has begun; call step() first"
        )


def refuse_scaler() -> None:
    raise RuntimeError(
        "a GradScaler decides after backward() whether to step, and with release_gradients() "
        "parameters step during backward(), with the scaled gradients: load the weights again. "
        "Train in bfloat16, which needs no GradScaler, or use ordinary steps: handle.remove()"
    )


def refuse_changed(held: Iterable[Held]) -> None:
    changed = []
    for param, grad, version in held:
        now = param.grad  # None if zero_grad has dropped it
        if now is not None and (now is not grad or version_of(now) != version):
            changed.append(now)
    if not changed:
        return
    what = f"a gradient of shape {tuple(changed[0].shape)}"
    moved = "with release_gradients() most parameters have been stepped by then"
    if all(map(_is_zero, changed)):  # the host may wait for the device: it raises anyway
        raise RuntimeError(
            f"{what} was set to 0 after backward(), as zero_grad(set_to_none=False) does, and "
            f"{moved}. Call step() before zero_grad(). zero_grad(set_to_none=True) drops the "
            "gradients that are left, so that step() can end the step"
        )
    raise RuntimeError(
        f"{what} was changed after backward(), and {moved}. Gradients must be changed during "
        "backward(): clip each with param.register_hook(function), or use ordinary steps: "
        "handle.remove(). zero_grad() drops those that are left"
    )


def _is_zero(grad: Tensor) -> bool:
    grad = sharding.local(grad)
    values = grad._values() if grad.is_sparse else grad
    return not bool(values.any())


def refuse_wrappers(groups: Sequence[Group]) -> None:
    """DDP and FSDP1 reduce gradients over the processes after the hooks have run."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    kinds: tuple[type, ...] = (nn.parallel.DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel,)
    own = {id(param) for group in groups for param in group["params"]}
    for thing in gc.get_objects():
        if issubclass(type(thing), kinds) and any(id(p) in own for p in thing.parameters()):
            raise RuntimeError(
                f"the model is in {type(thing).__name__}, which sums gradients over the processes "
                "after they have been stepped; release_gradients() works with fully_shard "
                "(FSDP2): use it, or ordinary steps"
            )
