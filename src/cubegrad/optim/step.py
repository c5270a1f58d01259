"""One step, in the order in which it happens.

Groups whose last step can be repeated take the short cut of repeat.py. For the others everything
that can be refused is refused first; then their parameters are gathered into batches, a backend
updates each batch, and what is no longer needed is dropped.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cubegrad import options, sharding
from cubegrad.backends.batch import PLAIN_CLASSES, Backend, Batch, Member, Row, capturing
from cubegrad.backends.native import tensors
from cubegrad.optim import inputs, mean, sparse
from cubegrad.optim.gather import gather
from cubegrad.optim.repeat import Prepared, prepare
from cubegrad.options import Hyper
from cubegrad.state import layout
from cubegrad.state.start import Weight

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


def step_groups(
    optimizer: "BaseOptimizer",
    views: list[Group] | None = None,
    hypers: list[Hyper] | None = None,
) -> None:
    """Step all groups, or end a step that release.py has begun.

    Of that, `hypers` are the numbers, and `views` the groups with what has not been stepped yet.
    """
    groups, state = optimizer.param_groups, optimizer.state
    optimizer._opt_called = True  # for torch's schedulers
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _refuse_blind_capture(groups)
    if not optimizer._has_had_gradients:
        look_once(optimizer)
    now = groups if views is None else views
    repeated = optimizer._repeats.ready(now, state)
    # Everything that can be refused is refused before anything changes.
    indices = [index for index in range(len(groups)) if index not in repeated]
    chosen = {index: check_group(optimizer, now[index]) for index in indices}
    is_auto = any(group["auto_lr"] for group in groups)
    if hypers is None and is_auto:
        own = partial(hyper, optimizer)
        hypers = optimizer._auto.begin(groups, state, own, same_params=not indices)
    elif hypers is None:
        hypers = [hyper(optimizer, group) for group in groups]
    if hypers is None:  # lr="auto" has had no gradient yet that gives it a scale
        for group in groups:
            _count_step(optimizer, group)
        return
    _run_groups(optimizer, now, hypers, repeated, chosen)
    if optimizer._rule.averages:
        mean.end(groups, hypers, views)
    if views is not None:
        for group, view in zip(groups, views, strict=True):
            group["last_eps"] = view["last_eps"]
    if is_auto:
        optimizer._auto.end(groups, state, hypers, repeated, views)


def look_once(optimizer: "BaseOptimizer") -> None:
    """What is refused or warned of when there are gradients for the first time."""
    groups = optimizer.param_groups
    optimizer._has_had_gradients = sharding.check_not_replaced(groups)
    if optimizer._has_had_gradients:
        inputs.warn_of_uncoded(groups)
        if optimizer._rule.averages:
            optimizer._notice = mean.watch_evaluation(optimizer)


def _run_groups(
    optimizer: "BaseOptimizer",
    groups: list[Group],
    hypers: list[Hyper],
    repeated: dict[int, tuple[Prepared, list[Any]]],
    chosen: dict[int, Backend],
) -> None:
    """Step groups that were checked: some repeat their last step, the others have a backend."""
    new: dict[int, Prepared | None] = {}
    for index, (group, h) in enumerate(zip(groups, hypers, strict=True)):
        if index in chosen:
            new[index] = step_group(optimizer, group, h, chosen[index])
        else:
            run_again(*repeated[index], h)
    if new:
        optimizer._repeats.keep(new, optimizer.state)


def run_again(prepared: Prepared, tables: list[Any], h: Hyper) -> None:
    for one, table in zip(prepared.launches, tables, strict=True):
        sums = None if h.sums is None else h.sums[one.sharded_over]
        one.launch.run(h if sums is None else h._replace(sums=sums), table)
        tensors.bump_versions(one.written)


def _refuse_blind_capture(groups: list[Group]) -> None:
    """A CUDA graph would freeze a step count and an lr that live on the host."""
    if capturing() and not all(group["capturable"] for group in groups):
        raise RuntimeError(
            "step() is being captured in a CUDA graph with capturable=False, and would replay "
            "one step count for ever; build the optimizer with capturable=True"
        )


def check_group(optimizer: "BaseOptimizer", group: Group) -> Backend:
    """Refuse what cannot be stepped; returns the backend for what can."""
    options.flags(group)  # someone may have changed them since they were checked
    options.refuse_late_betas(group)
    inputs.check_grads(optimizer._rule, group, optimizer.state)
    sparse.check(group)
    return optimizer._backend(group)


def hyper(
    optimizer: "BaseOptimizer", group: Group, estimated: float | Tensor | None = None
) -> Hyper:
    """The group's numbers for this step; its lr is a factor on the estimate if there is one."""
    on_device = group["capturable"] or isinstance(estimated, Tensor)
    on_device = on_device or torch.compiler.is_compiling()
    lr, momentum = group["lr"], group["momentum"]
    if isinstance(lr, str):
        lr = group["lr"] = options.factor_from_string(group)
    factor = _scalar(lr, on_device) if isinstance(lr, Tensor) else lr
    if estimated is None:
        lr = factor
    elif isinstance(factor, Tensor):
        # A copy: the step overwrites the estimate, which autograd may keep for the factor.
        lr = factor * (estimated.clone() if isinstance(estimated, Tensor) else estimated)
    else:
        lr = estimated if factor == 1 else estimated * factor  # the product is a launch on a GPU
    found_inf, mean_share = getattr(optimizer, "found_inf", None), 0.0
    if optimizer._rule.averages:
        mean.begin(optimizer, group)
        numbers = mean.numbers(group, on_device, found_inf)
        warmth = mean.warmth(group, numbers)
        lr, factor = lr * warmth, factor * warmth
        mean_share = mean.share(numbers, lr)
    weight_decay, shrink = 0.0, None
    if group["weight_decay"]:
        weight_decay, shrink = options.decay(group, lr, factor)
    return Hyper(
        lr=lr,
        momentum=_scalar(momentum, on_device) if isinstance(momentum, Tensor) else momentum,
        eps=group["eps"],
        weight_decay=weight_decay,
        shrink=shrink,
        maximize=group["maximize"],
        on_device=on_device,
        differentiable=group["differentiable"],
        found_inf=found_inf,
        grad_scale=getattr(optimizer, "grad_scale", None),
        mean_share=mean_share,
    )


def _scalar(value: Tensor, on_device: bool) -> float | Tensor:
    return value.reshape(()) if on_device or value.requires_grad else value.item()


def step_group(
    optimizer: "BaseOptimizer", group: Group, h: Hyper, backend: Backend
) -> Prepared | None:
    """Returns the step ready to be repeated, if it can be."""
    members = gather(optimizer, group, Weight.of(h.lr, h.found_inf), backend.FUSED)
    if not members:
        return None
    at_random = options.rounds_at_random(group)
    if not h.differentiable:
        members = [
            member
            if type(member.owner) in PLAIN_CLASSES and type(member.row.grad) is Tensor
            else _local(member, at_random)
            for member in members
        ]
    dense = members
    if any(member.row.grad.is_sparse for member in members):
        settled = optimizer._settled
        dense = sparse.step_rows(backend, h, group["momentum"], members, at_random, settled)
        if h.found_inf is None:  # else the step may not happen
            settled.update(member.owner for member in dense)
    gathered = _batches(dense, at_random, apart_by_sharding=h.sums is not None)
    batches = list(map(backend.checked, gathered))
    launches = []
    for batch in batches:
        sums = None if h.sums is None else h.sums[batch.sharded_over]
        launches.append(backend.step(batch, h._replace(sums=sums)))
    owners = [member.owner for member in members]
    sharded = [owner for owner, _, row, _ in members if owner is not row.param]
    torch.autograd.graph.increment_version(sharded)  # autograd knows them, not their shards
    _drop_unneeded(optimizer, members, h)
    optimizer._starts.finish_step(owners)
    if optimizer._starts.any_marked(owners):
        return None  # x_0 may have to be read again
    return prepare(group, members, batches, launches, optimizer.state)


def _count_step(optimizer: "BaseOptimizer", group: Group) -> None:
    """Count a step that changes no weight."""
    found_inf = getattr(optimizer, "found_inf", None)
    members = gather(optimizer, group, Weight.NONE, fused=False)
    if members and not (found_inf is not None and found_inf.item()):
        torch._foreach_add_([member.row.step for member in members], 1)
    optimizer._starts.finish_step(member.owner for member in members)


def _drop_unneeded(optimizer: "BaseOptimizer", members: list[Member], h: Hyper) -> None:
    """Without momentum x is z after a step: x_0 can be recovered, and z - x is 0."""
    unneeded = [(member.owner, name) for member in members for name in member.drops]
    # After an overflow the step has not happened; inside a graph that is unknown.
    if unneeded and h.found_inf is not None and (h.on_device or h.found_inf.item()):
        return
    for param, name in unneeded:
        del optimizer.state[param][name]


def _local(member: Member, at_random: bool) -> Member:
    """The member with what this process holds of its tensors."""
    owner, used, (param, grad, step, buffers, _), _ = member
    held = tuple(map(sharding.local, buffers))
    first = sharding.first_index(param) if used.needs_indices(owner, at_random) else 0
    row = Row(sharding.local(param), sharding.gradient(grad, param), step, held, first)
    return member._replace(row=row)


def _batches(members: list[Member], at_random: bool, apart_by_sharding: bool) -> list[Batch]:
    """Members of one layout, device and dtype, and if sums are wanted, sharded alike."""
    batches: dict[Any, Batch] = {}
    for owner, used, row, _ in members:
        if row.param.is_complex() or row.grad.is_neg():
            real = tuple(map(layout.as_real, row.buffers))
            row = row._replace(
                param=layout.as_real(row.param), grad=layout.as_real(row.grad), buffers=real
            )
        over = sharding.sharded_over(owner) if apart_by_sharding else None
        key = used, over, row.param.device, row.param.dtype, row.grad.dtype
        batch = batches.setdefault(key, Batch(used, [], over, rounds_at_random=at_random))
        batch.rows.append(row)
    return list(batches.values())
