"""Parameters with their state, as a step needs it: made, brought up to date, converted."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from cubegrad.backends.batch import Member, Row, capturing
from cubegrad.state import conversion, layout
from cubegrad.state.layout import Layout
from cubegrad.state.start import Weight

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


def gather(
    optimizer: "BaseOptimizer", group: Group, weight: Weight, fused: bool, alike: bool = False
) -> list[Member]:
    """The parameters that have a gradient, with their state as the step needs it.

    With `alike` all whose state is in one form, codes or sums, keep the same buffers.
    """
    _recover_at_last_eps(optimizer, group)
    on_device = layout.counts_on_device(group, fused)
    params = [param for param in group["params"] if param.grad is not None]
    if optimizer._settled and layout.has_momentum(group["momentum"]):
        optimizer._settled.difference_update(params)
    needed = [layout.needed(optimizer._rule, group, param) for param in params]
    if alike:
        needed = layout.alike(needed, [optimizer.state[param] for param in params])
    members = []
    for param, own in zip(params, needed, strict=True):
        entries = optimizer.state[param]
        if "step" not in entries:  # a wrapper may have put an entry of its own there
            used = _fresh(optimizer, param, own, weight, on_device)
        else:
            held = _restored(optimizer, param, own, weight, on_device)
            used = _converted(optimizer, param, held, own, group["eps"])
        buffers = tuple(entries[name] for name in used.buffers)
        row = Row(param, param.grad, entries["step"], buffers)
        drops = tuple(name for name in used.buffers if name not in own.buffers)
        members.append(Member(param, used, row, drops))
    return members


def _fresh(
    optimizer: "BaseOptimizer", param: Tensor, needed: Layout, weight: Weight, on_device: bool
) -> Layout:
    """Make the state of a parameter that has none; returns its layout, as the next two do."""
    entries = optimizer.state[param]
    entries.update(needed.fresh(param, on_device))
    if param.grad is not None and param.grad.is_sparse:
        optimizer._settled.add(param)
    if needed.start is not None and weight is not Weight.SOME:
        optimizer._starts.add(param, entries[needed.start])
    return needed


def _restored(
    optimizer: "BaseOptimizer", param: Tensor, needed: Layout, weight: Weight, on_device: bool
) -> Layout:
    """Bring a state up to date that was loaded, or left by an earlier step."""
    entries = optimizer.state[param]
    held = layout.held(optimizer._rule, entries) or needed
    held.take_bytes(param, entries)
    if not capturing():  # a graph would read x_0 again at every replay
        optimizer._starts.read_again(param, held, entries, weight)
    if on_device and entries["step"].device != param.device:
        entries["step"] = entries["step"].to(param.device)
    return held


def _converted(
    optimizer: "BaseOptimizer", param: Tensor, held: Layout, needed: Layout, eps: float
) -> Layout:
    """Change the form of a state, or give it the buffers that it lacks."""
    target = layout.target(held, needed)
    if target is not held:
        entries = optimizer.state[param]
        conversion.convert(param, entries, target, eps)
        optimizer._starts.renew(param, target, entries)
    return target


def _recover_at_last_eps(optimizer: "BaseOptimizer", group: Group) -> None:
    """Where x_0 is not kept, the weights belong to the eps they were reached with."""
    last, group["last_eps"] = group["last_eps"], group["eps"]
    if last == group["eps"]:
        return
    for param in group["params"]:
        entries = optimizer.state.get(param, {})
        held = layout.held(optimizer._rule, entries)
        if "step" in entries and held is not None and held.rule.pulls and held.recovers_point:
            entries["initial_param"] = layout.recovered_point(held.rule, param, entries, last)
