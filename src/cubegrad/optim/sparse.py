"""Row-sparse gradients: the rows that have one, cut out for a dense step and put back.

Without momentum a coordinate with no gradient does not move, so a step over the rows with one
is the whole step, but for a ν that fades in all rows. Momentum moves every coordinate, and so does
decay. Decoupled decay is done with the gradient made dense; coupled decay and momentum are refused.
"""

from typing import Any

from torch import Tensor

from cubegrad import options, rule
from cubegrad.backends.batch import Backend, Batch, Member, Row
from cubegrad.options import Hyper
from cubegrad.state.layout import as_real


def check(group: dict[str, Any]) -> None:
    """Refuse a sparse gradient if the step would move rows that have none."""
    for index, param in enumerate(group["params"]):
        if param.grad is not None and param.grad.is_sparse:
            reason = _obstacle(group)
            if reason:
                name = options.name_of(group, index)
                raise RuntimeError(f"{name} has a sparse gradient, and {reason}")


def _obstacle(group: dict[str, Any]) -> str | None:
    if group["auto_lr"]:
        return (
            "lr='auto' needs sums over all rows; use sparse=False in the embedding, or a number "
            "for lr"
        )
    momentum, decay = float(group["momentum"]), group["weight_decay"]
    if momentum != 0:
        return (
            f"momentum={momentum} moves every row at every step; put it in a group with "
            "momentum=0, or use sparse=False in the embedding"
        )
    if decay and not options.is_decoupled(group):
        return (
            f"weight_decay={decay} gives every row one; put it in a group with weight_decay=0 or "
            "decoupled_weight_decay=True"
        )
    return None


def step_rows(
    backend: Backend,
    h: Hyper,
    momentum: float | Tensor,
    members: list[Member],
    rounds_at_random: bool,
    settled: set[Tensor],
) -> list[Member]:
    """Step the members whose rows suffice; returns the others, with dense gradients.

    Of the parameters in `settled` x is known to be z.
    """
    rest = []
    for member in members:
        grad = member.row.grad
        by_rows = _rows_suffice(h, momentum, member, rounds_at_random, settled)
        if grad.is_sparse and by_rows:
            _step_rows(backend, h, member)
        else:
            # Coalesced first: a GPU otherwise adds half-precision duplicates in another order.
            dense = grad.coalesce().to_dense() if grad.is_sparse else grad
            rest.append(member._replace(row=member.row._replace(grad=dense)))
    return rest


def _rows_suffice(
    h: Hyper,
    momentum: float | Tensor,
    member: Member,
    at_random: bool,
    settled: set[Tensor],
) -> bool:
    """Whether rows without a gradient stay as they are: not under decoupled decay, nor if x ≠ z."""
    if h.shrink is not None or isinstance(momentum, Tensor):
        return False
    if member.layout.needs_indices(member.owner, at_random):
        return False  # rows that are cut out lose them
    if h.found_inf is not None and not member.layout.rule.never_falls:
        return False  # ν fades only if the step happens
    return not member.layout.keeps_point or member.owner in settled


def _step_rows(backend: Backend, h: Hyper, member: Member) -> None:
    param, grad, step, buffers, _ = member.row
    grad = grad.coalesce()
    rows, used = tuple(grad.indices()), member.layout.rule
    cut = [tensor[rows] for tensor in (param, *buffers)]
    if not used.never_falls:
        k = step if h.on_device else step.item()
        as_real(buffers[member.layout.buffers.index("grad_sq_sum")]).mul_(rule.fade(used, k))
    x, *state = map(as_real, cut)
    row = Row(x, as_real(grad.values()), step, tuple(state))
    backend.step(Batch(member.layout, [row]), h)
    for tensor, values in zip((param, *buffers), cut, strict=True):
        tensor[rows] = values
