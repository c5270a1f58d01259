"""Which buffers a rule needs for a parameter, and in which form.

A `Layout` answers every question about them: their names and order, whether x_0 is among them,
which one starts as a copy of the parameter. Other rooms pass it along with the tensors and ask it,
so another form of the state is another layout.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import sharding
from cubegrad.codec import Codes
from cubegrad.functions import TorchFunctions
from cubegrad.rule import RULES, Rule, recover_initial_param
from cubegrad.state import blocks


class Layout(NamedTuple):
    """What is kept for a parameter beside its step count."""

    rule: Rule  # that updates it
    buffers: tuple[str, ...]
    start: str | None  # the buffer that starts as a copy of the parameter; the others start at 0
    form: str = "sums"  # or "codes": backends have a step for each

    @property
    def keeps_point(self) -> bool:
        """Whether x_0, z or z - x is kept, so that x ≠ z until momentum was 0 for a step."""
        return self.form == "sums" and self.rule.point in self.buffers

    @property
    def recovers_point(self) -> bool:
        """Whether momentum needs an x_0 that is found from x and the sums, or a z that is x."""
        return self.form == "sums" and self.rule.point not in self.buffers

    @property
    def is_coded(self) -> bool:
        return self.form == "codes"

    def rounds_param(self, param: Tensor) -> bool:
        """Whether rounding at random is done after the step; with codes the step does it."""
        return self.form == "sums" and is_half(param)

    def needs_indices(self, param: Tensor, at_random: bool) -> bool:
        """Whether numbers are rounded at random, by their index in the whole parameter."""
        return self.form == "codes" or (at_random and is_half(param))

    def codes(self, buffers: Sequence[Tensor]) -> Codes:
        """The buffers that are codes and scales; None for what is not kept."""
        own = dict(zip(self.buffers, buffers, strict=True))
        names = (name if name.endswith("scale") else f"{name}_code" for name in Codes._fields)
        return Codes(*map(own.get, names))

    def check(self, name: str, param: Tensor, entries: Mapping[str, Any]) -> None:
        """Refuse entries that no step can use; `name` is the parameter's, for messages."""

    def forms(self, param: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """The shape and dtype of each buffer."""
        return [(param.shape, state_dtype(param))] * len(self.buffers)

    def fresh(self, param: Tensor, count_on_device: bool) -> dict[str, Tensor]:
        """The state before the first step, whose x_0 is the parameter's value now."""
        dtype, form = state_dtype(param), torch.preserve_format
        zeros = {
            name: torch.zeros_like(param, dtype=dtype, memory_format=form)
            for name in self.buffers
            if name != self.start
        }
        state = {"step": counter(param, count_on_device), **zeros, **self.started(param)}
        return {name: state[name] for name in ("step", *self.buffers)}

    def unfilled(self, param: Tensor, count_on_device: bool) -> dict[str, Tensor]:
        """The state with room for values that are to be loaded."""
        dtype, form = state_dtype(param), torch.preserve_format
        room = {
            name: torch.empty_like(param, dtype=dtype, memory_format=form) for name in self.buffers
        }
        return {"step": counter(param, count_on_device), **room}

    def started(self, param: Tensor) -> dict[str, Tensor]:
        """The buffers that hold the parameter's value before the first step."""
        if self.start is None:
            return {}
        # A real copy, never an alias; autograd sees it when gradients are enabled.
        copied = param.to(state_dtype(param), copy=True, memory_format=torch.preserve_format)
        return {self.start: copied}

    def take_bytes(self, param: Tensor, entries: dict[str, Any]) -> None:
        """Make codes of what a wrapper, such as ZeroRedundancyOptimizer, took from a state dict."""

    def unweighted(self, entries: Mapping[str, Any]) -> Tensor:
        """The coordinates at which no step has had a weight, as far as the state shows."""
        if self.rule.anchored:
            return sharding.local(entries["grad_sq_sum"]) == 0
        if not self.rule.pulls:  # z is the start itself, and moves
            return torch.ones((), dtype=torch.bool, device=sharding.local(entries["z"]).device)
        shards = [sharding.local(entries[name]) == 0 for name in ("grad_sum", "grad_sq_sum")]
        return torch.logical_and(*shards)


class CodedLayout(Layout):
    """The state in codes and scales, the fields of `codec.Codes`. `start` is the code of x_0."""

    __slots__ = ()

    def check(self, name: str, param: Tensor, entries: Mapping[str, Any]) -> None:
        shard = as_real(sharding.local(param.detach()))
        for buffer, (shape, dtype) in zip(self.buffers, self.forms(shard), strict=True):
            own = entries[buffer]
            own = sharding.local(blocks.from_bytes(own, param) if buffer == self.start else own)
            if (own.shape, own.dtype) != (shape, dtype):
                raise ValueError(
                    f"{buffer} of {name} is {own.dtype} of shape {tuple(own.shape)}, and must be "
                    f"{dtype} of shape {tuple(shape)}; put states in with load_state_dict. If you "
                    "have changed the dtype of the parameter, call restart() or change it back"
                )

    def forms(self, param: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """Of a real parameter."""
        scale = blocks.scale_shape(param.shape), torch.float32
        dtypes = {
            "offset_code": torch.int8,
            "root_code": torch.uint8,
            "initial_code": blocks.initial_dtype(param),
        }
        return [(param.shape, dtypes[name]) if name in dtypes else scale for name in self.buffers]

    def fresh(self, param: Tensor, count_on_device: bool) -> dict[str, Tensor]:
        state = {"step": counter(param, count_on_device), **self.started(param)}
        state |= self.zeros(param, set(self.buffers) - set(state))
        return {name: state[name] for name in ("step", *self.buffers)}

    def unfilled(self, param: Tensor, count_on_device: bool) -> dict[str, Tensor]:
        room = self._made(torch.empty, param, self.buffers)
        return {"step": counter(param, count_on_device), **room}

    def zeros(self, param: Tensor, names: Container[str]) -> dict[str, Tensor]:
        """Some of the buffers, placed as their parameter is."""
        return self._made(torch.zeros, param, names)

    def _made(
        self, make: Callable[..., Tensor], param: Tensor, names: Container[str]
    ) -> dict[str, Tensor]:
        shard = as_real(sharding.local(param.detach()))
        forms = zip(self.buffers, self.forms(shard), strict=True)
        return {
            name: self._placed(name, make(shape, dtype=dtype, device=shard.device), param)
            for name, (shape, dtype) in forms
            if name in names
        }

    def started(self, param: Tensor) -> dict[str, Tensor]:
        if self.start is None:
            return {}
        encoded = blocks.encode_initial(as_real(sharding.local(param.detach())))
        names = (self.start, "initial_scale")
        return {
            name: self._placed(name, tensor, param)
            for name, tensor in zip(names, encoded, strict=True)
        }

    def take_bytes(self, param: Tensor, entries: dict[str, Any]) -> None:
        if self.start is not None and entries[self.start].dtype == torch.uint8:
            entries[self.start] = blocks.from_bytes(entries[self.start], param)

    def unweighted(self, entries: Mapping[str, Any]) -> Tensor:
        """For all coordinates together, since their scales cannot be changed one by one."""
        return (sharding.local(entries["root_code"]) == 0).all()

    def whole_shape(self, name: str, param: Tensor) -> torch.Size:
        """The shape of a buffer for the whole of a sharded parameter."""
        shape = torch.Size(blocks.real_shape(param))
        return blocks.scale_shape(shape) if name.endswith("scale") else shape

    def _placed(self, name: str, shard: Tensor, param: Tensor) -> Tensor:
        return sharding.like(shard, param, self.whole_shape(name, param))


SUMS = ("grad_sum", "grad_sq_sum")
OFFSET, ROOT = ("offset_code", "offset_scale"), ("root_code", "root_scale")
INITIAL = ("initial_code", "initial_scale")
CODED_NAMES = frozenset((*OFFSET, *ROOT, *INITIAL))


def _layouts(rule: Rule) -> tuple[Layout, ...]:
    if rule.anchored:  # without momentum too: z - x would be a third of it
        return (Layout(rule, ("grad_sq_sum", rule.point, "initial_param"), "initial_param"),)
    sums = SUMS if rule.pulls else ("grad_sq_sum",)
    start = None if rule.relative else rule.point
    return Layout(rule, (*sums, rule.point), start), Layout(rule, sums, None)


def _coded_layouts(rule: Rule) -> tuple[CodedLayout, ...]:
    rest = (*ROOT, *INITIAL) if rule.keeps_start else ROOT
    start = "initial_code" if rule.keeps_start else None
    with_offset = CodedLayout(rule, (*OFFSET, *rest), start, "codes")
    return with_offset, with_offset._replace(buffers=rest)


# The layouts of each rule by its name, the one with the most buffers first.
LAYOUTS = {rule.name: _layouts(rule) for rule in RULES}
CODED_LAYOUTS = {rule.name: _coded_layouts(rule) for rule in RULES}


def names_itself(rule: Rule) -> bool:
    """Whether param groups have the rule's name: an older rule has buffers of the same names."""
    older = RULES[: RULES.index(rule)]
    return any(full(old, True).buffers == full(rule, True).buffers for old in older)


def full(rule: Rule, coded: bool = False) -> Layout:
    """The layout with every buffer that the rule may need, in codes or not."""
    return (CODED_LAYOUTS if coded else LAYOUTS)[rule.name][0]


def required(rule: Rule) -> frozenset[str]:
    """The buffers that the rule has in every layout without codes."""
    return frozenset.intersection(*(frozenset(layout.buffers) for layout in LAYOUTS[rule.name]))


def all_buffers(rule: Rule) -> frozenset[str]:
    """The names of every buffer that the rule has in some layout."""
    every = (*LAYOUTS[rule.name], *CODED_LAYOUTS[rule.name])
    return frozenset(name for layout in every for name in layout.buffers)


def stray_codes(held: Layout, entries: Iterable[str]) -> frozenset[str]:
    """Names of codes and scales among the entries that this layout does not have."""
    return CODED_NAMES & set(entries) - set(held.buffers)


def has_momentum(momentum: float | Tensor) -> bool:
    """A tensor counts whatever its value is: it may change without our seeing it."""
    return isinstance(momentum, Tensor) or momentum != 0


def needed(rule: Rule, group: Mapping[str, Any], param: Tensor) -> Layout:
    """The smallest layout for this parameter in a step with its group's options.

    Without momentum x is z. Then neither z nor z - x need be kept, and x_0 can be recovered from x
    and the sums. Not if x is rounded more coarsely than the sums: then moves below x's last place
    would be lost for good. (With codes, x is rounded at random, so that its mean is right.)
    """
    momentum = has_momentum(group["momentum"])
    if group["compact"] and blocks.is_coded(param):
        return CODED_LAYOUTS[rule.name][0 if momentum else -1]
    return LAYOUTS[rule.name][0 if momentum or is_half(param) else -1]


def target(held: Layout, needed: Layout) -> Layout:
    """What a state has to become for a step that needs this layout; it may keep more buffers."""
    if held.form != needed.form:  # x ≠ z until momentum has been 0 for a step
        needed = full(needed.rule, needed.is_coded)
    return held if set(needed.buffers) <= set(held.buffers) else needed


def full_forms(rule: Rule, group: Mapping[str, Any]) -> list[Layout]:
    """The layouts with every buffer that the parameters of this group may have."""
    return [full(rule, coded) for coded in ((False, True) if group["compact"] else (False,))]


def alike(layouts: list[Layout], states: Sequence[Mapping[str, Any]]) -> list[Layout]:
    """The layouts, with every buffer where a parameter of that form has or gets every buffer."""
    whole = set()
    for needed, state in zip(layouts, states, strict=True):
        every, now = full(needed.rule, needed.is_coded), held(needed.rule, state)
        if every in (needed, now) or (now and now.form != needed.form):
            whole.add(every)
    pairs = ((needed, full(needed.rule, needed.is_coded)) for needed in layouts)
    return [every if every in whole else needed for needed, every in pairs]


def held(rule: Rule, entries: Container[str]) -> Layout | None:
    """The layout of a state with these entries; None if no layout fits."""
    for layout in (*LAYOUTS[rule.name], *CODED_LAYOUTS[rule.name]):
        if all(name in entries for name in layout.buffers):
            return layout
    return None


def state_dtype(param: Tensor) -> torch.dtype:
    """At least float32: ν of a float16 gradient of 300 would overflow float16."""
    return torch.promote_types(param.dtype, torch.float32)


def is_half(param: Tensor) -> bool:
    """Whether the parameter is of half precision, and its state is not."""
    return state_dtype(param) != param.dtype


def counts_on_device(group: dict[str, Any], fused: bool) -> bool:
    """Whether the step counts are on the parameters' device: a kernel or a graph reads them."""
    return bool(fused or group["capturable"] or group["auto_lr"])


def counter(param: Tensor, on_device: bool) -> Tensor:
    """k = 0, as torch.optim keeps `step`: on the host unless it has to be on the device."""
    return torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")


def as_real(tensor: Tensor) -> Tensor:
    """The real numbers that the rule works on; a complex number is two coordinates.

    A view, unless the tensor is conjugated or negated lazily; then it becomes a copy.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def recovered_point(rule: Rule, param: Tensor, entries: Mapping[str, Any], eps: float) -> Tensor:
    """x_0, z or z - x of a parameter that was stepped without momentum up to now."""
    if rule.relative:
        return torch.zeros_like(entries["grad_sq_sum"])
    if not rule.pulls:
        return full(rule).started(param)["z"]
    # Copies, since autograd may keep them while the step overwrites the originals.
    x = as_real(sharding.local(param)).clone()
    sums = {name: as_real(sharding.local(entries[name])).clone() for name in SUMS}
    start = recover_initial_param(TorchFunctions, rule, eps, x, sums)
    return sharding.like(torch.view_as_complex(start) if param.is_complex() else start, param)
