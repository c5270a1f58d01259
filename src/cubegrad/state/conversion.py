"""The same state in another form: sums as the paper has them, or codes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cubegrad import codec, rule, sharding
from cubegrad.codec import Codes
from cubegrad.functions import TorchFunctions
from cubegrad.state import compact, layout
from cubegrad.state.layout import CodedLayout, Layout

Entries = dict[str, Any]


def convert(param: Tensor, entries: Entries, to: Layout, eps: float) -> None:
    """Change a parameter's state from the form it has to another, in place.

    x and z stay where they are, as far as the new form can say so. Entries that are not ours stay.
    """
    held = layout.held(to.method, entries)
    if held is None or held is to:
        return
    if isinstance(to, CodedLayout):
        new = (
            _recoded(param, entries, to)
            if isinstance(held, CodedLayout)
            else _encoded(param, entries, held, to, eps)
        )
    elif isinstance(held, CodedLayout):
        new = _decoded(param, entries, held, to, eps)
    else:  # the run went without momentum until now
        new = {"initial_param": layout.recover_initial_param(param, entries, eps)}
    for name in set(held.buffers) - set(to.buffers):
        del entries[name]
    entries.update(new)


def sums(param: Tensor, entries: Mapping[str, Any], eps: float) -> tuple[Tensor, Tensor]:
    """s and ν of MADGRAD in any form, of the shard that this process holds, as real numbers."""
    held = layout.held("madgrad", entries)
    if not isinstance(held, CodedLayout):
        shards = (sharding.local(entries[name]) for name in ("grad_sum", "grad_sq_sum"))
        return tuple(map(layout.as_real, shards))  # type: ignore[return-value]
    x, decoded = _values(param, entries, held)
    return _sums(x, decoded, eps)


def _values(
    param: Tensor, entries: Mapping[str, Any], held: CodedLayout
) -> tuple[Tensor, codec.Values]:
    """x and what the codes stand for, in blocks."""
    codes = held.codes([sharding.local(entries[name]) for name in held.buffers])
    x = layout.as_real(sharding.local(param.detach())).to(torch.float32)
    return compact.blocks(x), codec.decode(TorchFunctions, compact.codes_in_blocks(codes))


def _sums(x: Tensor, values: codec.Values, eps: float) -> tuple[Tensor, Tensor]:
    assert values.initial is not None
    offset = 0.0 if values.offset is None else values.offset
    away = torch.where(values.root == 0, 0.0, values.initial - x - offset)  # x_0 - z
    return away * (values.root + eps), values.root**3


def _recoded(param: Tensor, entries: Entries, to: CodedLayout) -> Entries:
    """With or without z - x, which is 0 where it was not kept."""
    fresh = to.fresh(param, count_on_device=False)
    return {name: entries.get(name, fresh[name]) for name in to.buffers}


@torch.no_grad()
def _encoded(param: Tensor, entries: Entries, held: Layout, to: CodedLayout, eps: float) -> Entries:
    """Codes of a state of sums, rounded to nearest."""
    new = to.fresh(param, count_on_device=False)
    del new["step"]
    if to.method == "madgrad" and not held.keeps_initial_param:
        entries = {**entries, "initial_param": layout.recover_initial_param(param, entries, eps)}
    names = layout.full(to.method).buffers
    tensors = (sharding.local(entries[name]) for name in names)
    x, *state = (
        layout.as_real(tensor.detach()).to(torch.float32)
        for tensor in (sharding.local(param), *tensors)
    )
    own = to.codes([sharding.local(new[name]) for name in to.buffers])
    if to.method == "madgrad":
        grad_sum, grad_sq_sum, initial = state
        z = initial - rule.displacement(TorchFunctions, eps, grad_sum, grad_sq_sum)
        _copy_initial(own, initial)
    else:
        grad_sq_sum, z = state
    old = compact.codes_in_blocks(own)
    root = TorchFunctions.cbrt(grad_sq_sum)
    offset: tuple[Any, Any] = (None, None)
    if own.offset is not None:
        offset = codec.encode_integers(TorchFunctions, compact.blocks(z - x), codec.LARGEST_OFFSET)
    codes = codec.encode(TorchFunctions, offset, compact.blocks(root), old)
    write_codes(codes, own)
    return new


def _copy_initial(own: Codes, initial: Tensor) -> None:
    """x_0, which need not be the parameter's value now, and may not be of half precision."""
    assert own.initial is not None
    if own.initial.dtype != torch.int16:
        own.initial.copy_(initial)
        return
    encoded = compact.encode_initial(initial)
    for target, value in zip((own.initial, own.initial_scale), encoded, strict=True):
        target.copy_(value)


@torch.no_grad()
def _decoded(param: Tensor, entries: Entries, held: CodedLayout, to: Layout, eps: float) -> Entries:
    """The sums that codes stand for."""
    x, values = _values(param, entries, held)
    offset = 0.0 if values.offset is None else values.offset
    if to.method == "madgrad":
        grad_sum, grad_sq_sum = _sums(x, values, eps)
        assert values.initial is not None
        initial = torch.where(values.root == 0, x + offset, values.initial)
        state = {"grad_sum": grad_sum, "grad_sq_sum": grad_sq_sum, "initial_param": initial}
    else:
        state = {"grad_sq_sum": values.root**3, "z": x + offset}
    new = to.fresh(param.detach(), count_on_device=False)
    for name in to.buffers:
        target = layout.as_real(sharding.local(new[name]))
        target.copy_(compact.joined(state[name], target.shape))
    return {name: new[name] for name in to.buffers}


def write_codes(codes: Codes, targets: Codes) -> None:
    """Store codes in blocks where their parameter's state is, as `codes_in_blocks` cut it."""
    for code, target in zip(codes, targets, strict=True):
        if target is not None and code is not target:
            target.copy_(compact.joined(code, target.shape))
