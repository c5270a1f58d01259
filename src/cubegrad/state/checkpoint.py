"""A state dict checked against the parameters it is for, before anything changes."""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import codec, options, sharding
from cubegrad.rule import MADGRADW, RULES, Rule
from cubegrad.state import blocks, conversion, layout, state_dicts

Group = dict[str, Any]
State = dict[Any, Any]

# Options that a group of ours always has, and a group of no other optimizer has all of.
OURS = ("lr", "momentum", "weight_decay", "eps", "decoupled_weight_decay")
FOREIGN = "load a checkpoint of another MADGRAD package through cubegrad.interop.convert"
# Options by which the groups of torch's optimizers are known.
OTHER_METHODS = {
    "betas": "Adam",
    "dampening": "SGD",
    "alpha": "RMSprop",
    "lr_decay": "Adagrad",
    "rho": "Adadelta",
}


class Loaded(NamedTuple):
    state: State
    groups: list[Group]


def checked(
    rule: Rule, groups: list[Group], defaults: dict[str, Any], state_dict: dict[str, Any]
) -> Loaded:
    """Copies of the state dict's values, in the form the optimizer keeps them."""
    new_groups, new_state = state_dicts.parts(state_dict)
    _check_rule(rule, new_groups)
    saved = [_group(defaults, new) for new in new_groups]
    owner = state_dicts.owners(groups, saved)
    _check_auto(rule, groups, saved)
    state: State = dict(state_dicts.shared(new_state, owner, ("grad_sq_sum", "root_code")))
    checks = state_dicts.Checks()
    for key, values in new_state.items():
        if key in owner:
            param, new = owner[key]
            state[param] = _state(rule, key, param, new, values, checks)
    checks.run()
    for group, new in zip(groups, saved, strict=True):
        new["params"] = group["params"]
        for name in ("compact", "stochastic_rounding"):  # as the optimizer was built, not as saved
            new[name] = group[name]
        options.check(new)
        if "param_names" in group:
            new.setdefault("param_names", group["param_names"])
    return Loaded(state, saved)


def _group(defaults: dict[str, Any], new: Group) -> Group:
    missing = [name for name in OURS if name not in new]
    if missing:
        raise ValueError(
            f"a param group of the state dict lacks {missing}, so cubegrad did not write it; it "
            f"has {sorted(map(str, new))}: {other_method(new, defaults) or FOREIGN}"
        )
    group = defaults | deepcopy(new)
    group.setdefault("reference_lr", options.number("lr", group["lr"]))
    group.setdefault("last_eps", group["eps"])
    group["auto_lr"] = options.flag("auto_lr", group["auto_lr"])
    options.check(group)
    if group["auto_lr"]:
        group["estimate"] = _estimate(group.get("estimate"))
    if "warmup_steps" in defaults:
        _check_mean(group)
    return group


def _check_mean(group: Group) -> None:
    """Refuse a group of a schedule-free run whose numbers are not what state_dict() gave."""
    options.check_schedule_free(group)
    row, last = group.get("mean"), group.get("last_momentum")
    numbers = sharding.local(row).tolist() if isinstance(row, Tensor) and row.shape == (3,) else []
    is_sound = numbers and all(0 <= number < math.inf for number in numbers)
    if not (is_sound and isinstance(last, float) and 0 < last < 1):
        raise ValueError(
            f"a schedule-free param group of the state dict has mean={row!r} and "
            f"last_momentum={last!r}; they must be three numbers >= 0 and one between 0 and 1: "
            f"{state_dicts.WHOLE}"
        )
    group["train_mode"] = options.flag("train_mode", group.get("train_mode"))
    group["mean"] = sharding.local(row).detach().to(torch.float64)


def _check_rule(rule: Rule, new_groups: list[Group]) -> None:
    """Refuse the state of another rule that keeps the same buffers."""
    own = rule.name if layout.names_itself(rule) else None
    for new in new_groups:
        if all(name in new for name in OURS) and new.get("rule") != own:
            found = new.get("rule") or "madgrad's or mirror_madgrad"
            raise ValueError(
                f"the state dict is {found}'s, and {rule.name} gives the same buffers another "
                "meaning; load it with the optimizer that saved it, or load only the weights"
            )


def other_method(group: Group, defaults: Group) -> str | None:
    """What to do with a param group of another optimizer than MADGRAD."""
    if "betas" in group and defaults.get("rule") == MADGRADW.name:
        return "load cubegrad.interop.convert(state_dict) instead, if it is of AdamW or Adam"
    for option, name in OTHER_METHODS.items():
        if option in group:
            return (
                f"it is of {name} or a relative, whose state cannot be converted: it has no sums "
                "of gradients for MADGRAD to go on with. To go on from a trained model, load its "
                "weights and build a new optimizer over them: MADGRAD(model.parameters(), "
                "lr='auto'), or a lr from a sweep, since MADGRAD's is on another scale"
            )
    return None


def _estimate(value: Any) -> Tensor:
    row = sharding.local(value).detach() if isinstance(value, Tensor) else torch.tensor([])
    if row.shape == (7,) and not row.is_complex():
        distance, _, lr, weight_sum, step, uncounted, root_sum = row.tolist()
        is_count = step >= 0 and step % 1 == 0
        # The rate and the sums may be inf or NaN: they diverge with the run.
        negative = any(number < 0 for number in (lr, weight_sum, root_sum))
        if 0 <= distance < math.inf and is_count and 0 <= uncounted < 1 and not negative:
            return row.to(torch.float64)
    raise ValueError(
        f"the estimate of a param group with lr='auto' is {value!r}; it must be seven numbers "
        "(distance, agreement, lr, sum of weights, step, share of the steps that did not count, "
        "sum of roots), of which only the agreement may be negative, with a finite distance and a "
        "share below 1, as state_dict() gave them"
    )


def _check_auto(rule: Rule, groups: list[Group], saved: list[Group]) -> None:
    """An estimated lr and a given one are different methods, so neither becomes the other."""
    modes = [bool(new["auto_lr"]) for new in saved]
    if any(modes):
        options.auto_lr(rule, "auto")
    if len(set(modes)) > 1:
        raise ValueError(
            f"the param groups of the state dict have auto_lr={modes}; it must be the same for "
            f"all: {state_dicts.WHOLE}"
        )
    ours = [bool(group["auto_lr"]) for group in groups]
    if modes != ours:
        was, now = (
            "lr='auto'" if any(side) else f"lr={options.number('lr', its_groups[0]['lr'])}"
            for side, its_groups in ((modes, saved), (ours, groups))
        )
        raise ValueError(
            f"the state dict was saved with {was}, and the optimizer was built with {now}; build "
            f"it with {was} to go on with that run, or load only the weights to begin a new one"
        )


def _state(
    rule: Rule,
    key: Any,
    param: Tensor,
    group: Group,
    values: Any,
    checks: state_dicts.Checks,
) -> dict[str, Any]:
    values = state_dicts.entries(key, values)
    ours = {"step", *layout.all_buffers(rule), *layout.CODED_NAMES}
    state = {
        name: state_dicts.carried(value, param)
        for name, value in values.items()
        if name not in ours
    }
    if not ours & values.keys():
        return state
    held = _checked_layout(rule, key, group, values)
    if held.is_coded:
        _check_blocks(key, param)
    step = checks.count(f"step of parameter {key!r}", sharding.local(values["step"]))
    state |= held.unfilled(param.detach(), layout.counts_on_device(group, fused=False))
    state["step"].copy_(step)
    for name in held.buffers:
        what = f"{name} of parameter {key!r}"
        is_code, place = held.is_coded and name.endswith("_code"), state[name]
        if is_code and getattr(values[name], "dtype", None) == torch.uint8:
            place = blocks.as_bytes(place, param)
        value = state_dicts.buffer(what, values[name], param, place, is_code)
        sharding.local(place).copy_(sharding.placed(value, param))
        if held.is_coded and not is_code:
            checks.scales(what, sharding.local(state[name]))
    if not held.is_coded:
        squares = layout.as_real(sharding.local(state["grad_sq_sum"]))
        checks.sum_of_squares(f"grad_sq_sum of parameter {key!r}", squares)
    return state


def _checked_layout(rule: Rule, key: Any, group: Group, values: dict[str, Any]) -> layout.Layout:
    """The layout of a parameter's saved state; refuses one that lacks a buffer."""
    held = _held(rule, values)
    if held is None or "step" not in values:
        named = group.get("rule")
        others = [
            other
            for other in RULES
            if _held(other, values)
            and named == (other.name if layout.names_itself(other) else None)
        ]
        remedy = state_dicts.WHOLE if layout.CODED_NAMES & values.keys() else FOREIGN
        if others and rule not in others:
            remedy = f"it is {' or '.join(other.name for other in others)}'s, load it there"
        full = set(layout.full(rule).buffers)
        codes = [[*many.buffers] for many in layout.CODED_LAYOUTS[rule.name]]
        raise ValueError(
            f"the state of parameter {key!r} is {sorted(map(str, values))}; {rule.name} keeps "
            f"{sorted(full | {'step'})} ({', '.join(full - layout.required(rule)) or 'nothing'} "
            f"may be missing), or step and with compact=True {' or '.join(map(str, codes))}: "
            f"{remedy}"
        )
    if held.recovers_point and layout.has_momentum(group["momentum"]):
        raise ValueError(
            f"the state of parameter {key!r} has no {rule.point}, which its group's "
            f"momentum={options.number('momentum', group['momentum'])} needs and state_dict() "
            "always writes then (it follows from the weights only after a momentum of 0); "
            f"{state_dicts.WHOLE}"
        )
    return held


def _held(rule: Rule, values: dict[str, Any]) -> layout.Layout | None:
    """The layout that has all codes and scales, and all buffers of any rule, of these entries."""
    held = layout.held(rule, values)
    if held is None or layout.stray_codes(held, values):
        return None
    known = frozenset.union(*map(layout.all_buffers, RULES)) - layout.all_buffers(rule)
    return None if known & values.keys() else held


def _check_blocks(key: Any, param: Any) -> None:
    if not blocks.has_whole_blocks(param):
        raise ValueError(
            f"the state of parameter {key!r} is in codes, and its shards of placements "
            f"{param.placements} cut through blocks of {codec.BLOCK} numbers; they must have "
            "whole blocks: shard it by rows, or save it with compact=False"
        )


@torch.no_grad()
def complete(
    rule: Rule, groups: list[Group], state: Mapping[Tensor, Any], state_dict: dict[str, Any]
) -> None:
    """Make of torch's state dict, in place, what is saved.

    Parameters that stepped without momentum and have some now get their x_0 or z, as the next step
    would make it: a state dict with momentum always has it. Codes become bytes; those of
    parameters that FSDP1 has flattened become sums.
    """
    try:
        packed_groups, packed_state = state_dicts.parts(state_dict)
    except ValueError:  # a hook has made something else of it
        return
    for group, packed in zip(groups, packed_groups, strict=False):
        for param, key in zip(group["params"], packed["params"], strict=False):
            own, entries = state.get(param), packed_state.get(key)
            held = layout.held(rule, own) if isinstance(own, dict) else None
            if held is None or not isinstance(entries, dict):
                continue
            if held.is_coded and sharding.is_flattened_by_fsdp(param):
                # FSDP gathers state tensors that have the parameter's shape, which scales have not.
                conversion.convert(param, entries, layout.full(rule), group["last_eps"])
                continue
            if held.is_coded and isinstance(entries.get(held.start), Tensor):
                entries[held.start] = blocks.as_bytes(entries[held.start], param)
            if held.recovers_point and layout.has_momentum(group["momentum"]):
                start = layout.recovered_point(rule, param, state[param], group["last_eps"])
                entries[rule.point] = start
