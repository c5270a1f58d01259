"""Weights that were edited between two steps: z moves as x did.

With d = x_0 - z, a step of MADGRAD pulls z towards x_0 by shrinking d as ν grows. So no edit may
lengthen d: a weight that is clipped at every step would be pulled ever harder. The part of an edit
that goes back towards x_0 shortens d, and with it s = d (∛ν + ε). The rest moves x_0. ν and the
step count stay.

In the mirror form z is kept, and moves. Codes have z - x, so there only x_0 may have to move.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import codec, rule, sharding
from cubegrad.functions import CodedFunctions, TorchFunctions
from cubegrad.state import compact, layout
from cubegrad.state.layout import CodedLayout, Layout


class Edit(NamedTuple):
    """An edit of some coordinates: x before and after it, and what is to become of momentum."""

    old: Tensor
    new: Tensor
    keeps_momentum: bool

    @property
    def moved(self) -> Tensor:
        return self.new != self.old

    @property
    def shift(self) -> Tensor:
        return self.new - self.old

    @property
    def is_finite(self) -> Tensor:
        """Where a weight becomes NaN or inf, or was, x_0 cannot move by as much: it starts anew."""
        return torch.isfinite(self.shift)

    def back(self, away: Tensor) -> Tensor:
        """The part of the edit, from 0 to d = `away`, by which it shortens d."""
        if not self.keeps_momentum:
            return torch.where(self.moved, away, 0.0)
        shortest = torch.maximum(self.shift, away.clamp(max=0))
        return torch.where(self.is_finite, torch.minimum(shortest, away.clamp(min=0)), away)

    def start(self, start: Tensor, back: Tensor) -> Tensor:
        """x_0, or z in the mirror form, after the edit; exact where no step has moved x yet."""
        moved = self.new
        if self.keeps_momentum:
            anew = (start == self.old) & (back == 0) | ~self.is_finite
            moved = torch.where(anew, self.new, start + (self.shift - back))
        return torch.where(self.moved, moved, start)


def value(param: Tensor) -> Tensor:
    """What this process holds of a parameter."""
    return sharding.local(param.detach())


def is_concerned(held: Layout) -> bool:
    """Whether the state has anything that an edit changes."""
    return held.method == "madgrad" or "z" in held.buffers or "offset_code" in held.buffers


@torch.no_grad()
def follow(
    param: Tensor, old: Tensor, held: Layout, entries: dict[str, Any], eps: float, momentum: bool
) -> Tensor:
    """Let the state follow a parameter whose value was `old`; `momentum` says whether to keep it.

    In place, since a captured CUDA graph may hold the tensors. Returns ⟨s, x_0 - z⟩ before and
    after the edit, for lr="auto".
    """
    values = [layout.as_real(x) for x in (old, value(param))]
    if isinstance(held, CodedLayout):
        return _follow_in_codes(param, values, held, entries, eps, momentum)
    buffers = [layout.as_real(sharding.local(entries[name])) for name in held.buffers]
    totals = torch.zeros(2, dtype=torch.float64, device=buffers[0].device)
    whole = [x if x.dim() else x[None] for x in (*values, *buffers)]
    for before, after, *own in compact.row_pieces(*whole):
        edit = Edit(before.to(own[0]), after.to(own[0]), momentum)
        state = dict(zip(held.buffers, own, strict=True))
        if held.method == "madgrad":
            totals += _follow_in_sums(edit, state, eps)
        else:
            state["z"].copy_(edit.start(state["z"], torch.zeros_like(state["z"])))
    return totals


def _follow_in_sums(edit: Edit, state: Mapping[str, Tensor], eps: float) -> Tensor:
    grad_sum, start = state["grad_sum"], state.get("initial_param")
    away = rule.displacement(TorchFunctions, eps, grad_sum, state["grad_sq_sum"])  # d
    back = edit.back(away)
    before = _finite_total(grad_sum * away)
    shorter = torch.where(back == away, 0.0, 1 - TorchFunctions.quotient(back, away))
    grad_sum.copy_(torch.where(back == 0, grad_sum, grad_sum * shorter))
    if start is not None:  # else it is found from x
        start.copy_(edit.start(start, back))
    return torch.stack([before, _finite_total(grad_sum * (away - back))])


def _follow_in_codes(
    param: Tensor,
    values: list[Tensor],
    held: CodedLayout,
    entries: dict[str, Any],
    eps: float,
    momentum: bool,
) -> Tensor:
    if held.start is not None and entries[held.start].dtype == torch.uint8:
        # A wrapper has put a saved state there.
        entries[held.start] = compact.from_bytes(entries[held.start], param)
    buffers = [sharding.local(entries[name]) for name in held.buffers]
    device = buffers[0].device
    step, first = entries["step"].to(device, torch.int32), sharding.first_index(param)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for old, new, *own in compact.row_pieces(*(x.to(device) for x in values), *buffers):
        before, after = (compact.blocks(x.to(torch.float32)) for x in (old, new))
        edit = Edit(before, after, momentum)
        stored = held.codes(own)
        codes = compact.codes_in_blocks(stored)
        if codes.initial is not None:
            bits = codec.random_bits(step, compact.blocks(compact.indices(new, first)))
            totals += _move_initial(edit, codes, stored, bits, eps)
        if stored.offset is not None and not momentum:
            both: Any = codes.offset  # its lowest bit belongs to the root
            stored.offset.copy_(compact.joined(torch.where(edit.moved, both & 1, both), new.shape))
        first += new.numel()
    return totals


def _move_initial(edit: Edit, codes: Any, stored: Any, bits: Tensor, eps: float) -> Tensor:
    """x_0 is rounded at random, as in a step, or edits smaller than a code would be lost."""
    was = codec.decode(CodedFunctions, codes)
    offset = 0.0 if was.offset is None else was.offset
    assert was.initial is not None
    away = torch.where(was.root == 0, 0.0, was.initial - edit.old - offset)  # d
    back = edit.back(away)
    start = edit.start(was.initial, back)
    start = torch.where(torch.isfinite(start), start, 0.0)
    same = start == was.initial
    old_code, old_scale, dtype = codes.initial, codes.initial_scale, stored.initial.dtype
    scale = _scale(start, old_scale, same, dtype)
    code = _rounded(CodedFunctions.quotient(start, scale), bits, dtype)
    code = torch.where(same & (scale == old_scale), old_code, code.to(dtype))
    stored.initial.copy_(compact.joined(code, stored.initial.shape))
    stored.initial_scale.copy_(scale.reshape(stored.initial_scale.shape))
    sizes = (((was.root + eps) * d * d) for d in (away, away - back))
    return torch.stack([_finite_total(size) for size in sizes])


def _finite_total(terms: Tensor) -> Tensor:
    return TorchFunctions.total(TorchFunctions.where_finite(terms, terms))


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
