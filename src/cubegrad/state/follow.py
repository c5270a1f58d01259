"""Weights that were edited between two steps: z moves as x did.

With d = x_0 - z, a step of MADGRAD pulls z towards x_0 by shrinking d as ν grows. So no edit may
lengthen d: a weight that is clipped at every step would be pulled ever harder. The part of an edit
that goes back towards x_0 shortens d, and with it s = d (∛ν + ε). The rest moves x_0. ν and the
step count stay.

Without a pull z is kept, and moves. Where z - x is kept, as in codes, only x_0 may have to move. An
x_0 that pulls nothing moves likewise: lr="auto" must not take an edit for the way of gradients.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cubegrad import codec, rule, sharding
from cubegrad.functions import CodedFunctions, TorchFunctions
from cubegrad.rule import Rule
from cubegrad.state import blocks, conversion, layout
from cubegrad.state.layout import CodedLayout, Layout


class Edit:
    """An edit of some coordinates: x before and after it, and what is to become of momentum."""

    def __init__(self, old: Tensor, new: Tensor, keeps_momentum: bool) -> None:
        self.old, self.new, self.keeps_momentum = old, new, keeps_momentum

    @cached_property
    def moved(self) -> Tensor:
        return is_moved(self.old, self.new, self.keeps_momentum)

    @cached_property
    def shift(self) -> Tensor:
        return self.new - self.old

    @cached_property
    def is_finite(self) -> Tensor:
        """Where a weight becomes NaN or inf, or was, x_0 cannot move by as much: it starts anew."""
        return self.shift - self.shift == 0

    def back(self, away: Tensor) -> Tensor:
        """The part of the edit, from 0 to d = `away`, by which it shortens d."""
        part = torch.clamp(self.shift, away.clamp(max=0), away.clamp(min=0))
        return torch.where(self.is_finite, part, away)

    def start(self, start: Tensor, back: Tensor | float) -> Tensor:
        """x_0, or z without a pull, after the edit; exact where no step has moved x yet."""
        if not self.keeps_momentum:
            return torch.where(self.moved, self.new, start)
        anew = (start == self.old) & (back == 0) | ~self.is_finite
        shifted = torch.where(anew, self.new, start + (self.shift - back))
        return torch.where(self.moved, shifted, start)


def is_moved(old: Tensor, new: Tensor, keeps_momentum: bool) -> Tensor:
    """Which weights were edited.

    Without momentum those at 0 count as well: pruning may have found them there.
    """
    return new != old if keeps_momentum else (new != old) | (new == 0)


def value(param: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    return sharding.local(param.detach())


def is_concerned(held: Layout) -> bool:
    """Whether the state has anything that an edit changes."""
    return held.rule.keeps_start or held.keeps_point or "offset_code" in held.buffers


def moved_params(old: Mapping[Tensor, Tensor], keeps_momentum: bool) -> set[Tensor]:
    """The parameters of which anything was edited; waits once for each device."""
    flags: dict[torch.device, dict[Tensor, Tensor]] = {}
    for param, before in old.items():
        pair = [layout.as_real(x) for x in (before.to(value(param).device), value(param))]
        any_moved = pair[0].new_zeros((), dtype=torch.bool)
        for before_piece, after_piece in _pieces(*pair):
            any_moved |= is_moved(before_piece, after_piece, keeps_momentum).any()
        flags.setdefault(any_moved.device, {})[param] = any_moved
    return {
        param
        for own in flags.values()
        for param, flag in zip(own, torch.stack([*own.values()]).tolist(), strict=True)
        if flag
    }


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return blocks.row_pieces(*(x if x.dim() else x[None] for x in tensors))


@torch.no_grad()
def agreement(used: Rule, x: Tensor, entries: dict[str, Any], eps: float) -> Tensor:
    """⟨s, x_0 - z⟩ of a parameter whose value is x, with d (√ν + ε) for s if that is not kept."""
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for whole in conversion.sums(used, x, entries, eps):
        for pushed, grad_sq_sum in _pieces(*whole):
            if used.pulls:
                sums = {"grad_sum": pushed, "grad_sq_sum": grad_sq_sum}
                product = pushed * rule.displacement(TorchFunctions, used, eps, sums)
            else:
                product = pushed**2 * (rule.root(TorchFunctions, used, grad_sq_sum) + eps)
            total += TorchFunctions.total(product.nan_to_num(0.0, 0.0, 0.0)).to(total)
    return total


@torch.no_grad()
def follow(
    param: Tensor, old: Tensor, held: Layout, entries: dict[str, Any], eps: float, momentum: bool
) -> None:
    """Let the state follow a parameter whose value was `old`; `momentum` says whether to keep it.

    In place, since a captured CUDA graph may hold the tensors.
    """
    values = [layout.as_real(x) for x in (old, value(param))]
    if isinstance(held, CodedLayout):
        _follow_in_codes(param, values, held, entries, momentum)
        return
    buffers = [layout.as_real(sharding.local(entries[name])) for name in held.buffers]
    for before, after, *own in _pieces(*values, *buffers):
        edit = Edit(before.to(own[0]), after.to(own[0]), momentum)
        state = dict(zip(held.buffers, own, strict=True))
        if held.rule.pulls:
            _follow_in_sums(edit, held.rule, state, eps)
        elif held.rule.relative:
            if held.rule.anchored:
                start = state["initial_param"]
                away = start - edit.old - state["dual_offset"]  # d
                start.copy_(edit.start(start, edit.back(away) if momentum else 0.0))
            if not momentum:
                state["dual_offset"].masked_fill_(edit.moved, 0.0)
        else:
            state["z"].copy_(edit.start(state["z"], back=0.0))


def _follow_in_sums(edit: Edit, used: Rule, state: Mapping[str, Tensor], eps: float) -> None:
    grad_sum, start = state["grad_sum"], state.get("initial_param")
    back: Tensor | float = 0.0
    if edit.keeps_momentum:
        away = rule.displacement(TorchFunctions, used, eps, state)  # d
        back = edit.back(away)
        # A product, as torch.where takes 30 times as long on a CPU if its condition is random.
        grad_sum.mul_(1 - (back / away).nan_to_num(0.0))
    else:
        grad_sum.masked_fill_(edit.moved, 0.0)
    if start is not None:  # else it is found from x
        start.copy_(edit.start(start, back))


def _follow_in_codes(
    param: Tensor,
    values: list[Tensor],
    held: CodedLayout,
    entries: dict[str, Any],
    momentum: bool,
) -> None:
    buffers = [sharding.local(entries[name]) for name in held.buffers]
    device = buffers[0].device
    step, first = entries["step"].to(device, torch.int32), sharding.first_index(param)
    for old, new, *own in blocks.row_pieces(*(x.to(device) for x in values), *buffers):
        before, after = (blocks.split(x.to(torch.float32)) for x in (old, new))
        edit = Edit(before, after, momentum)
        stored = held.codes(own)
        codes = blocks.codes_in_blocks(stored)
        if codes.initial is not None:
            bits = codec.random_bits(step, blocks.split(blocks.indices(new, first)))
            _move_initial(edit, codes, stored, bits)
        if stored.offset is not None and not momentum:
            both: Any = codes.offset  # its lowest bit belongs to the root
            stored.offset.copy_(blocks.joined(torch.where(edit.moved, both & 1, both), new.shape))
        first += new.numel()


def _move_initial(edit: Edit, codes: Any, stored: Any, bits: Tensor) -> None:
    """x_0 is rounded at random, as in a step, or edits smaller than a code would be lost."""
    was = codec.decode(CodedFunctions, codes)
    offset = 0.0 if was.offset is None else was.offset
    assert was.initial is not None
    away = torch.where(was.root == 0, 0.0, was.initial - edit.old - offset)  # d
    start = edit.start(was.initial, edit.back(away) if edit.keeps_momentum else 0.0)
    start = torch.where(torch.isfinite(start), start, 0.0)
    same = start == was.initial
    old_code, old_scale, dtype = codes.initial, codes.initial_scale, stored.initial.dtype
    scale = _scale(start, old_scale, same, dtype)
    code = _rounded(CodedFunctions.quotient(start, scale), bits, dtype)
    code = torch.where(same & (scale == old_scale), old_code, code.to(dtype))
    stored.initial.copy_(blocks.joined(code, stored.initial.shape))
    stored.initial_scale.copy_(scale.reshape(stored.initial_scale.shape))


def _scale(start: Tensor, old: Any, same: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each block of x_0: as it was if it fits.

    Otherwise each edit would round all of a block again, whose errors add up over many edits.
    """
    if dtype == torch.int16:
        largest, most = CodedFunctions.largest(abs(start)), old * codec.LARGEST_INITIAL
        fits = (largest <= most) & (2 * largest >= most)
        new = largest * (1.000001 / codec.LARGEST_INITIAL)
    else:  # decoupled decay makes it smaller and smaller
        fits, new = old > 0.5, torch.ones_like(old)
    return torch.where(fits | same.all(-1, keepdim=True), old, new)


def _rounded(start: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The code of x_0 over its scale, still as float32."""
    if dtype == torch.int16:
        code = torch.round(start + codec.dither(CodedFunctions, bits))
        return code.clamp(-codec.LARGEST_INITIAL, codec.LARGEST_INITIAL)
    rounded: Tensor = codec.ROUND[str(dtype).removeprefix("torch.")](CodedFunctions, start, bits)
    return torch.where(start == 0, start, rounded)
