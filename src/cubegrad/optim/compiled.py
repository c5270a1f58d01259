"""The step that torch.compile traces: the plain rule, which the compiler fuses itself."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cubegrad.backends import eager
from cubegrad.backends.batch import Batch, Row
from cubegrad.optim import auto, step
from cubegrad.options import Hyper
from cubegrad.state import layout
from cubegrad.state.start import Weight

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


def can_be_traced(optimizer: "BaseOptimizer") -> bool:
    """Not with sparse gradients, and not the first step of lr="auto"."""
    groups = optimizer.param_groups
    grads = [param.grad for group in groups for param in group["params"]]
    if any(grad is not None and grad.is_sparse for grad in grads):
        return False
    return auto.can_be_traced(optimizer) or not any(group["auto_lr"] for group in groups)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def step_untraced(optimizer: "BaseOptimizer") -> None:
    step.step_groups(optimizer)


def step_groups(optimizer: "BaseOptimizer") -> None:
    groups = optimizer.param_groups
    if not any(group["auto_lr"] for group in groups):
        for group in groups:
            _step_group(optimizer, group, step.hyper(optimizer, group))
        return
    hypers = auto.begin_step(optimizer, step.hyper)
    assert hypers is not None  # only the first step may have to wait
    idle = [
        _step_group(optimizer, group, h._replace(sums=h.sums[None]))
        for group, h in zip(groups, hypers, strict=True)
    ]
    auto.end_traced_step(optimizer, hypers, idle)


def _step_group(optimizer: "BaseOptimizer", group: Group, h: Hyper) -> list[Tensor]:
    """Returns s and ν of stepped parameters that have no gradient now, in turns."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    steps: list[Tensor] = []
    idle: list[Tensor] = []
    full = layout.full(optimizer._method)
    columns: list[list[Tensor]] = [[] for _ in full.buffers]
    optimizer._init_group(group, params, grads, steps, idle, *columns)
    if params:
        held = [name for name, column in zip(full.buffers, columns, strict=True) if column]
        used = layout.held(optimizer._method, held) or full
        buffers = zip(*(column for column in columns if column), strict=True)
        rows = [
            Row(layout.as_real(p), layout.as_real(g), k, tuple(map(layout.as_real, own)))
            for p, g, k, own in zip(params, grads, steps, buffers, strict=True)
        ]
        eager.step(Batch(used, rows), h)
    return idle


def fill_columns(
    optimizer: "BaseOptimizer",
    group: Group,
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    idle: list[Tensor],
    *buffers: list[Tensor],
) -> None:
    """Fill the lists with what has a gradient; this runs while the step is traced, not in it."""
    optimizer._opt_called = True  # for torch's schedulers
    found_inf = getattr(optimizer, "found_inf", None)
    weight = Weight.of(group["lr"], found_inf)
    for param, _, row, _ in step.gather(optimizer, group, weight, fused=False, alike=True):
        params.append(param)
        grads.append(row.grad)
        steps.append(row.step)
        for buffer, column in zip(row.buffers, buffers, strict=False):
            column.append(buffer)
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        if param.grad is None and "grad_sum" in state:
            idle += [state["grad_sum"], state["grad_sq_sum"]]
