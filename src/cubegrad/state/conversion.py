"""The same state in another form: sums as the paper has them, or codes.

Large parameters are converted a few rows at a time, so that the temporaries stay small.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cubegrad import codec, sharding
from cubegrad import rule as rules
from cubegrad.codec import Codes
from cubegrad.functions import CodedFunctions
from cubegrad.rule import Rule
from cubegrad.state import blocks, layout
from cubegrad.state.layout import CodedLayout, Layout

Entries = dict[str, Any]


def convert(param: Tensor, entries: Entries, to: Layout, eps: float) -> None:
    """Change a parameter's state from the form it has to another, in place.

    x and z stay where they are, as far as the new form can say so. Entries that are not ours stay.
    """
    held = layout.held(to.rule, entries)
    if held is None or held is to:
        return
    if isinstance(to, CodedLayout):
        if isinstance(held, CodedLayout):
            lacking = set(to.buffers) - set(held.buffers)  # z - x, which is 0 if it was not kept
            new = to.zeros(param, lacking)
        else:
            new = _encoded(param, entries, held, to, eps)
    elif isinstance(held, CodedLayout):
        new = _decoded(param, entries, held, to, eps)
    else:  # the run went without momentum until now
        new = {to.rule.point: layout.recovered_point(to.rule, param, entries, eps)}
    for name in set(held.buffers) - set(to.buffers):
        del entries[name]
    entries.update(new)


def sums(
    rule: Rule, param: Tensor, entries: Mapping[str, Any], eps: float
) -> Iterator[tuple[Tensor, ...]]:
    """What `distance.idle_sums` asks for: s, or x_0 - z, and ν.

    As real numbers, of the shard that this process holds. Codes are decoded piece by piece.
    """
    held = layout.held(rule, entries)
    assert held is not None
    if not isinstance(held, CodedLayout):
        state = dict(zip(held.buffers, _real(entries, held.buffers), strict=True))
        yield _pushed(held, _value(param), state), state["grad_sq_sum"]
        return
    for x, *buffers in blocks.row_pieces(_value(param), *_real(entries, held.buffers)):
        decoded = _sums_of_codes(held, x, buffers, eps)
        state = {name: blocks.joined(own, x.shape) for name, own in decoded.items()}
        yield _pushed(held, x, state), state["grad_sq_sum"]


def _pushed(held: Layout, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    if held.rule.pulls:
        return state["grad_sum"]
    return state["initial_param"] - x - state["dual_offset"]


def _value(param: Tensor) -> Tensor:
    return layout.as_real(sharding.local(param.detach()))


def _real(entries: Mapping[str, Any], names: Sequence[str]) -> list[Tensor]:
    return [layout.as_real(sharding.local(entries[name].detach())) for name in names]


@torch.no_grad()
def _encoded(param: Tensor, entries: Entries, held: Layout, to: CodedLayout, eps: float) -> Entries:
    """Codes of a state of sums, rounded to nearest."""
    new = to.zeros(param, to.buffers)
    old, count = _real(entries, held.buffers), len(held.buffers)
    for x, *tensors in blocks.row_pieces(_value(param), *old, *_real(new, to.buffers)):
        own = to.codes(tensors[count:])
        x, *state = (tensor.to(torch.float32) for tensor in (x, *tensors[:count]))
        sums = dict(zip(held.buffers, state, strict=True))
        if to.rule.pulls:
            away = rules.displacement(CodedFunctions, to.rule, eps, sums)
            initial = sums.get("initial_param", x + away)
            away_from_x = initial - away - x
            _store_initial(own, initial)
        else:
            away_from_x = sums.get("dual_offset", sums.get("z", x) - x)
            if to.rule.anchored:
                _store_initial(own, sums["initial_param"])
        old_codes = blocks.codes_in_blocks(own)
        root = rules.root(CodedFunctions, to.rule, sums["grad_sq_sum"])
        offset: tuple[Any, Any] = (None, None)
        if own.offset is not None:
            numbers = blocks.split(away_from_x)
            offset = codec.encode_integers(CodedFunctions, numbers, codec.LARGEST_OFFSET)
        codes = codec.encode(CodedFunctions, to.rule, offset, blocks.split(root), old_codes)
        for code, target in zip(codes, own, strict=True):
            if target is not None:
                target.copy_(blocks.joined(code, target.shape))
    return new


def _store_initial(own: Codes, initial: Tensor) -> None:
    """x_0, which need not be the parameter's value now, and may not be of half precision."""
    assert own.initial is not None
    assert own.initial_scale is not None
    dtype = torch.float32 if own.initial.dtype == torch.int16 else own.initial.dtype
    code, scale = blocks.encode_initial(initial.to(dtype))
    own.initial.copy_(code)
    own.initial_scale.copy_(scale)


@torch.no_grad()
def _decoded(param: Tensor, entries: Entries, held: CodedLayout, to: Layout, eps: float) -> Entries:
    """The sums that codes stand for."""
    new = to.fresh(param.detach(), count_on_device=False)
    codes, count = _real(entries, held.buffers), len(held.buffers)
    for x, *tensors in blocks.row_pieces(_value(param), *codes, *_real(new, to.buffers)):
        state = _sums_of_codes(held, x, tensors[:count], eps)
        for name, target in zip(to.buffers, tensors[count:], strict=True):
            target.copy_(blocks.joined(state[name], target.shape))
    return {name: new[name] for name in to.buffers}


def _sums_of_codes(
    held: CodedLayout, param: Tensor, buffers: Sequence[Tensor], eps: float
) -> dict[str, Tensor]:
    """The buffers of the other form, in blocks."""
    values = codec.decode(CodedFunctions, blocks.codes_in_blocks(held.codes(buffers)))
    x = blocks.split(param.to(torch.float32))
    z = x if values.offset is None else x + values.offset
    grad_sq_sum = rules.power(held.rule, values.root)
    if not held.rule.pulls:
        offset = torch.zeros_like(x) if values.offset is None else values.offset
        point = offset if held.rule.relative else z
        state = {"grad_sq_sum": grad_sq_sum, held.rule.point: point}
        if values.initial is not None:
            state["initial_param"] = torch.where(values.root == 0, z, values.initial)
        return state
    assert values.initial is not None
    initial = torch.where(values.root == 0, z, values.initial)
    grad_sum = (initial - z) * (values.root + eps)  # s = (x_0 - z) (∛ν + ε)
    return {"grad_sum": grad_sum, "grad_sq_sum": grad_sq_sum, "initial_param": initial}
