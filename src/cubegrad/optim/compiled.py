"""The step that torch.compile traces: the plain rule, which the compiler fuses itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cubegrad import options, sharding
from cubegrad.backends import eager
from cubegrad.backends.batch import Batch, Row
from cubegrad.optim import auto, step
from cubegrad.options import Hyper
from cubegrad.state import conversion, layout
from cubegrad.state.layout import Layout
from cubegrad.state.start import Weight

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]
# torch.compiler.disable imports the compiler at once, which takes as long as importing torch. What
# torch.optim uses waits for the first call.
untraced = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def can_be_traced(optimizer: "BaseOptimizer") -> bool:
    """Not with sparse gradients, sharded parameters with codes or rounded at random, or the first
    step of lr="auto".
    """
    groups = optimizer.param_groups
    grads = [param.grad for group in groups for param in group["params"]]
    if any(grad is not None and grad.is_sparse for grad in grads):
        return False
    for group in groups:
        for param in group["params"] if options.rounds_at_random(group) else ():
            if sharding.is_sharded(param) and (group["compact"] or layout.is_half(param)):
                return False
    return auto.can_be_traced(optimizer) or not any(group["auto_lr"] for group in groups)


@untraced  # type: ignore[untyped-decorator]
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
    idle: list[Tensor] = []
    _step_rows(optimizer, group, h, layout.LAYOUTS[optimizer._method], False, idle)
    if group["compact"]:
        _step_rows(optimizer, group, h, layout.CODED_LAYOUTS[optimizer._method], True, idle)
    return idle


def _step_rows(
    optimizer: "BaseOptimizer",
    group: Group,
    h: Hyper,
    layouts: Sequence[Layout],
    coded: bool,
    idle: list[Tensor],
) -> None:
    """Step the parameters whose state is in codes, or those whose state is not."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    steps: list[Tensor] = []
    new_idle: list[Tensor] = []
    columns: list[list[Tensor]] = [[] for _ in layouts[0].buffers]
    optimizer._init_group(group, coded, params, grads, steps, new_idle, *columns)
    if params:
        names = layouts[0].buffers
        held = [name for name, column in zip(names, columns, strict=True) if column]
        used = layout.held(optimizer._method, held) or layouts[0]
        buffers = zip(*(column for column in columns if column), strict=True)
        rows = [
            Row(layout.as_real(p), layout.as_real(g), k, tuple(map(layout.as_real, own)))
            for p, g, k, own in zip(params, grads, steps, buffers, strict=True)
        ]
        at_random = options.rounds_at_random(group)
        eager.step(Batch(used, rows, rounds_at_random=at_random), h)
    idle += new_idle


def fill_columns(
    optimizer: "BaseOptimizer",
    group: Group,
    coded: bool,
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    idle: list[Tensor],
    *columns: list[Tensor],
) -> None:
    """Fill the lists with what has a gradient; this runs while the step is traced, not in it."""
    optimizer._opt_called = True  # for torch's schedulers
    found_inf = getattr(optimizer, "found_inf", None)
    weight = Weight.of(group["lr"], found_inf)
    names = (layout.CODED_LAYOUTS if coded else layout.LAYOUTS)[optimizer._method][0].buffers
    for param, used, row, _ in step.gather(optimizer, group, weight, fused=False, alike=True):
        if used.is_coded is not coded:
            continue
        params.append(param)
        grads.append(row.grad)
        steps.append(row.step)
        for name, buffer in zip(used.buffers, row.buffers, strict=True):
            columns[names.index(name)].append(buffer)
    if group["auto_lr"]:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            held = layout.held(optimizer._method, state)
            if param.grad is None and held is not None and held.is_coded is coded:
                for own in conversion.sums(param, state, group["eps"]):
                    idle += own
