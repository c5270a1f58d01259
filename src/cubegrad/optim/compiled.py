"""The step that torch.compile traces: the plain rule, which the compiler fuses itself."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cubegrad import options, sharding
from cubegrad.backends import eager
from cubegrad.backends.batch import Batch, Member, Row
from cubegrad.optim import mean, step
from cubegrad.optim.gather import gather
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


def against_tracing(optimizer: "BaseOptimizer") -> str | None:
    """Why this step cannot be traced, and what to do about it if the whole graph is wanted."""
    groups = optimizer.param_groups
    grads = [param.grad for group in groups for param in group["params"]]
    if any(grad is not None and grad.is_sparse for grad in grads):
        return "a sparse gradient cannot be traced; leave fullgraph=True out"
    for group in groups:
        if any(group[name] not in (True, False, None) for name in options.FLAGS):
            return (
                "an option that is True or False is neither; step() without a compiler says which"
            )
        if group["last_eps"] != group["eps"]:  # a graph of the same eps may be there already
            return (
                "eps has changed, which a traced step does not note: make one plain "
                "optimizer.step(), or leave fullgraph=True out"
            )
        if optimizer._rule.averages and not group["train_mode"]:
            return "a step after eval() is refused; call optimizer.train() before it"
        if optimizer._rule.averages and group["last_momentum"] != group["momentum"]:
            return (
                "momentum has changed, which moves weights: make one plain optimizer.step(), or "
                "leave fullgraph=True out"
            )
        for param in group["params"] if options.rounds_at_random(group) else ():
            if sharding.is_sharded(param) and (group["compact"] or layout.is_half(param)):
                return (
                    "a sharded parameter that is rounded at random cannot be traced, with "
                    "compact=True or in half precision; leave fullgraph=True out"
                )
    if any(group["auto_lr"] for group in groups):
        return optimizer._auto.against_tracing(groups)
    return None


@untraced  # type: ignore[untyped-decorator]
def step_untraced(optimizer: "BaseOptimizer") -> None:
    step.step_groups(optimizer)


def step_groups(optimizer: "BaseOptimizer") -> None:
    groups = optimizer.param_groups
    if not any(group["auto_lr"] for group in groups):
        given = [step.hyper(optimizer, group) for group in groups]
        for group, h in zip(groups, given, strict=True):
            _step_group(optimizer, group, h)
        if optimizer._rule.averages:
            mean.end(groups, given)
        return
    hypers = optimizer._auto.begin(groups, optimizer.state, partial(step.hyper, optimizer))
    assert hypers is not None  # only the first step may have to wait
    idle = [
        _step_group(optimizer, group, h._replace(sums=h.sums[None]))
        for group, h in zip(groups, hypers, strict=True)
    ]
    if optimizer._rule.averages:
        mean.end(groups, hypers)
    optimizer._auto.end_traced(groups, hypers, idle)


def _step_group(optimizer: "BaseOptimizer", group: Group, h: Hyper) -> list[Tensor]:
    """Returns what `Auto.end_traced` asks of parameters with a state and no gradient now."""
    forms = layout.full_forms(optimizer._rule, group)
    idle: list[Tensor] = []
    columns: list[list[Tensor]] = [[] for form in forms for _ in (*SHARED, *form.buffers)]
    # Once for all forms: gathering the state a second time might replace tensors that the trace has
    # from the first.
    optimizer._init_group(group, idle, *columns)
    for form, own in zip(forms, _columns_of(forms, columns), strict=True):
        _step_rows(optimizer, group, h, form, own)
    return idle


SHARED = ("param", "grad", "step")  # what every form has a column for, beside its buffers


def _columns_of(forms: list[Layout], columns: Sequence[list[Tensor]]) -> list[list[list[Tensor]]]:
    rest = list(columns)
    own = []
    for form in forms:
        count = len(SHARED) + len(form.buffers)
        own.append(rest[:count])
        rest = rest[count:]
    return own


def _step_rows(
    optimizer: "BaseOptimizer", group: Group, h: Hyper, form: Layout, columns: list[list[Tensor]]
) -> None:
    """Step the parameters whose state is in this form."""
    params, grads, steps, *buffers = columns
    if not params:
        return
    held = [name for name, column in zip(form.buffers, buffers, strict=True) if column]
    used = layout.held(optimizer._rule, held) or form
    own = zip(*(column for column in buffers if column), strict=True)
    rows = [
        Row(layout.as_real(p), layout.as_real(g), k, tuple(map(layout.as_real, state)))
        for p, g, k, state in zip(params, grads, steps, own, strict=True)
    ]
    eager.step(Batch(used, rows, rounds_at_random=options.rounds_at_random(group)), h)


def fill_columns(
    optimizer: "BaseOptimizer", group: Group, idle: list[Tensor], *columns: list[Tensor]
) -> None:
    """Fill the lists with what has a gradient; this runs while the step is traced, not in it."""
    optimizer._opt_called = True  # for torch's schedulers
    forms = layout.full_forms(optimizer._rule, group)
    by_form = dict(zip((full.form for full in forms), _columns_of(forms, columns), strict=True))
    names = {full.form: (*SHARED, *full.buffers) for full in forms}
    for param, used, row, _ in _gathered(optimizer, group):
        own, buffers = names[used.form], zip(used.buffers, row.buffers, strict=True)
        for name, tensor in (("param", param), ("grad", row.grad), ("step", row.step), *buffers):
            by_form[used.form][own.index(name)].append(tensor)
    if group["auto_lr"]:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            idle_now = param.grad is None and "step" in state
            if idle_now and layout.held(optimizer._rule, state) is not None:
                for sums in conversion.sums(optimizer._rule, param, state, group["eps"]):
                    idle += (state["step"], *sums)


def _gathered(optimizer: "BaseOptimizer", group: Group) -> list[Member]:
    """The group's members; the first call gathers those of all groups.

    The compiler notes the buffers of all groups when it has the first one's columns, so none may
    change its form after that.
    """
    groups, found_inf = optimizer.param_groups, getattr(optimizer, "found_inf", None)
    if group is groups[0]:
        weights = [Weight.of(each["lr"], found_inf) for each in groups]
        optimizer._traced_members = {
            id(each): gather(optimizer, each, weight, fused=False, alike=True)
            for each, weight in zip(groups, weights, strict=True)
        }
    return optimizer._traced_members.pop(id(group))
