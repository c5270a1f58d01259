"""Weights changed between steps: `edit_weights()` goes on from them, `restart()` starts over.

Dual averaging computes z from x_0 and the sums of all gradients, and x follows z. So a change of x
alone is undone within a few dozen steps.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from cubegrad import options, sharding
from cubegrad.backends.batch import capturing
from cubegrad.optim import mean
from cubegrad.optim.release_checks import refuse_in_open_step
from cubegrad.optim.repeat import Repeats
from cubegrad.state import follow, layout

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


@contextmanager
def edit_weights(optimizer: "BaseOptimizer", keep_momentum: bool) -> Iterator[None]:
    if optimizer._is_editing:  # the outer context will do it
        with torch.no_grad():
            yield
        return
    refuse_in_open_step(optimizer, "edit_weights()")
    old = {
        param: follow.value(param).clone()
        for group in optimizer.param_groups
        for param in group["params"]
        if _concerned(optimizer, param)
    }
    optimizer._is_editing = True
    try:
        with torch.no_grad():
            yield
    finally:
        optimizer._is_editing = False
        _check_shapes(optimizer.param_groups, old)
        moved = set(old) if capturing() else follow.moved_params(old, keep_momentum)
        for group in optimizer.param_groups:
            _follow(optimizer, group, old, moved, keep_momentum)


def _concerned(optimizer: "BaseOptimizer", param: Tensor) -> layout.Layout | None:
    """The layout of the parameter's state, if an edit concerns it."""
    held = layout.held(optimizer._rule, optimizer.state.get(param, {}))
    return held if held is not None and follow.is_concerned(held) else None


def _follow(
    optimizer: "BaseOptimizer",
    group: Group,
    old: dict[Tensor, Tensor],
    moved: set[Tensor],
    keeps_momentum: bool,
) -> None:
    """Let the state of a group follow its weights, and then the estimate of lr="auto"."""
    is_estimated = group["auto_lr"] and _may_change_estimate(optimizer, group, moved)
    totals: dict[sharding.ShardedOver, Tensor] = {}  # of ⟨s, x_0 - z⟩, before and after
    for param in group["params"]:
        zeros = torch.zeros(2, dtype=torch.float64, device=param.device)
        total = totals.setdefault(sharding.sharded_over(param), zeros)
        held, before = _concerned(optimizer, param), old.pop(param, None)
        if held is None or before is None:
            continue
        entries, eps, now = optimizer.state[param], group["last_eps"], follow.value(param)
        size = partial(follow.agreement, held.rule)
        held.take_bytes(param, entries)
        if is_estimated:
            agreements = [size(before.to(now.device), entries, eps)] * 2
        if param in moved:
            follow.follow(param, before, held, entries, eps, keeps_momentum)
            if is_estimated:
                agreements[1] = size(now, entries, eps)
        if is_estimated:
            total += torch.stack(agreements).to(total)
    if is_estimated:
        optimizer._auto.shorten(group["estimate"], totals)


def _may_change_estimate(optimizer: "BaseOptimizer", group: Group, moved: set[Tensor]) -> bool:
    """Alike on all processes that would sum the change: one of them may have edited a weight."""
    is_shared = optimizer._auto.shared is not None or any(map(sharding.is_sharded, group["params"]))
    return is_shared or not moved.isdisjoint(group["params"])


def _check_shapes(groups: list[Group], old: dict[Tensor, Tensor]) -> None:
    for group in groups:
        for index, param in enumerate(group["params"]):
            if param in old and (now := follow.value(param)).shape != old[param].shape:
                raise RuntimeError(
                    f"{options.name_of(group, index)} had shape {tuple(old[param].shape)} before "
                    f"edit_weights() and has {tuple(now.shape)} now; an edit keeps the shape: "
                    "build a new optimizer for new parameters"
                )


def refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what} inside edit_weights() would meet weights that have been edited and a state that "
        "has not followed them yet; call it after the context"
    )


def restart(optimizer: "BaseOptimizer", params: Iterable[Tensor] | None) -> None:
    if optimizer._is_editing:
        refuse("restart()")
    refuse_in_open_step(optimizer, "restart()")
    groups = optimizer.param_groups
    chosen = None if params is None else _chosen(groups, params)
    for group in groups:
        for param in group["params"]:
            if chosen is None or param in chosen:
                _restart(optimizer, group, param)
    optimizer._repeats = Repeats()
    if chosen is None:
        for group in groups:
            group["last_eps"] = group["eps"]
        if any(group["auto_lr"] for group in groups):
            optimizer._auto.restart(groups)
        if optimizer._rule.averages:
            mean.restart(optimizer)


def _chosen(groups: list[Group], params: Iterable[Tensor]) -> set[Tensor]:
    chosen = {params} if isinstance(params, Tensor) else set(params)
    others = {type(param).__name__ for param in chosen if not isinstance(param, Tensor)}
    if others:
        raise TypeError(
            f"restart() got {', '.join(sorted(others))} among its parameters and takes tensors "
            "only, as of model.parameters(); without an argument it restarts all"
        )
    strangers = chosen - {param for group in groups for param in group["params"]}
    if strangers:
        shapes = [tuple(param.shape) for param in strangers]
        raise ValueError(
            f"restart() got {len(strangers)} parameters that are in none of the param groups, of "
            f"shapes {shapes}; give it parameters of this optimizer, or nothing to restart all"
        )
    if any(group["auto_lr"] for group in groups):
        raise ValueError(
            f"restart() of {len(chosen)} parameters leaves the estimate of lr='auto', which is "
            "made of all parameters, without a meaning; restart all, or give lr a number"
        )
    if any("mean" in group for group in groups):
        raise ValueError(
            f"restart() of {len(chosen)} parameters leaves the weights of the mean that "
            "schedule_free=True makes, in which all later steps would count for little; restart "
            "all, or give these parameters an optimizer of their own"
        )
    return chosen


@torch.no_grad()
def _restart(optimizer: "BaseOptimizer", group: Group, param: Tensor) -> None:
    """Drop a parameter's state, but not what a wrapper keeps there."""
    rule, state = optimizer._rule, optimizer.state
    entries = state.get(param)
    held = layout.held(rule, entries or {})
    optimizer._starts.marks.pop(param, None)
    if not isinstance(entries, dict):
        return
    in_graph = group["capturable"] and not group["auto_lr"]  # which has to be captured again
    if in_graph and held is not None and "step" in entries:
        # In place: a captured graph reads and writes these tensors whenever it is replayed.
        on_device = layout.counts_on_device(group, fused=False)
        for name, value in held.fresh(param.detach(), on_device).items():
            if entries[name].dtype == value.dtype:
                sharding.local(entries[name]).copy_(sharding.local(value))
            else:  # codes as bytes, which a wrapper has put there
                entries[name] = value
        return
    ours = {"step", *layout.all_buffers(rule), *layout.CODED_NAMES}
    others = {name: value for name, value in entries.items() if name not in ours}
    if others:
        state[param] = others
    else:
        del state[param]
