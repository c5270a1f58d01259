"""Which buffers a method keeps for a parameter, and in which form.

A `Layout` answers every question about them: their names and order, whether x_0 is among them,
which one starts as a copy of the parameter. Other rooms pass it along with the tensors and ask it,
so another form of the state is another layout.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import rule, sharding
from cubegrad.codec import Codes
from cubegrad.functions import TorchFunctions
from cubegrad.state import compact


class Layout(NamedTuple):
    """What is kept for a parameter beside its step count."""

    method: str  # the function of rule.py that updates it
    buffers: tuple[str, ...]  # in the order in which that function takes them
    start: str | None  # the buffer that starts as a copy of the parameter; the others start at 0

    @property
    def keeps_initial_param(self) -> bool:
        return self.start == "initial_param"

    @property
    def is_coded(self) -> bool:
        """Whether the buffers are codes and scales, as codec.py has them."""
        return False

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
        if not self.keeps_initial_param:  # ν of the mirror form grows at any lr; there z moves
            return torch.ones((), dtype=torch.bool, device=sharding.local(entries["z"]).device)
        shards = [sharding.local(entries[name]) == 0 for name in ("grad_sum", "grad_sq_sum")]
        return torch.logical_and(*shards)


class CodedLayout(Layout):
    """The state in codes and scales, the fields of `codec.Codes`. `start` is the code of x_0."""

    __slots__ = ()

    @property
    def keeps_initial_param(self) -> bool:
        return self.start is not None

    @property
    def is_coded(self) -> bool:
        return True

    def forms(self, param: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """Of a real parameter."""
        scale = compact.scale_shape(param.shape), torch.float32
        dtypes = {
            "offset_code": torch.int8,
            "root_code": torch.uint8,
            "initial_code": compact.initial_dtype(param),
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
        encoded = compact.encode_initial(as_real(sharding.local(param.detach())))
        names = (self.start, "initial_scale")
        return {
            name: self._placed(name, tensor, param)
            for name, tensor in zip(names, encoded, strict=True)
        }

    def take_bytes(self, param: Tensor, entries: dict[str, Any]) -> None:
        if self.start is not None and entries[self.start].dtype == torch.uint8:
            entries[self.start] = compact.from_bytes(entries[self.start], param)

    def unweighted(self, entries: Mapping[str, Any]) -> Tensor:
        """For all coordinates together, since their scales cannot be changed one by one."""
        return (sharding.local(entries["root_code"]) == 0).all()

    def codes(self, buffers: Sequence[Tensor]) -> Codes:
        own = dict(zip(self.buffers, buffers, strict=True))
        names = (name if name.endswith("scale") else f"{name}_code" for name in Codes._fields)
        return Codes(*map(own.get, names))

    def whole_shape(self, name: str, param: Tensor) -> torch.Size:
        """The shape of a buffer for the whole of a sharded parameter."""
        shape = torch.Size(compact.real_shape(param))
        return compact.scale_shape(shape) if name.endswith("scale") else shape

    def _placed(self, name: str, shard: Tensor, param: Tensor) -> Tensor:
        return sharding.like(shard, param, self.whole_shape(name, param))


MADGRAD = Layout("madgrad", ("grad_sum", "grad_sq_sum", "initial_param"), "initial_param")
MADGRAD_WITHOUT_START = Layout("madgrad", ("grad_sum", "grad_sq_sum"), None)
MIRROR_MADGRAD = Layout("mirror_madgrad", ("grad_sq_sum", "z"), "z")
_OFFSET, _ROOT = ("offset_code", "offset_scale"), ("root_code", "root_scale")
_INITIAL = ("initial_code", "initial_scale")
CODED_MADGRAD = CodedLayout("madgrad", (*_OFFSET, *_ROOT, *_INITIAL), "initial_code")
CODED_MADGRAD_WITHOUT_MOMENTUM = CodedLayout("madgrad", (*_ROOT, *_INITIAL), "initial_code")
CODED_MIRROR = CodedLayout("mirror_madgrad", (*_OFFSET, *_ROOT), None)
CODED_MIRROR_WITHOUT_MOMENTUM = CodedLayout("mirror_madgrad", _ROOT, None)
# The layouts of each method, the one with the most buffers first.
LAYOUTS = {"madgrad": (MADGRAD, MADGRAD_WITHOUT_START), "mirror_madgrad": (MIRROR_MADGRAD,)}
CODED_LAYOUTS = {
    "madgrad": (CODED_MADGRAD, CODED_MADGRAD_WITHOUT_MOMENTUM),
    "mirror_madgrad": (CODED_MIRROR, CODED_MIRROR_WITHOUT_MOMENTUM),
}

CODED_NAMES = frozenset(name for many in CODED_LAYOUTS.values() for name in many[0].buffers)


def full(method: str, coded: bool = False) -> Layout:
    """The layout with every buffer that the method may keep, in codes or not."""
    return (CODED_LAYOUTS if coded else LAYOUTS)[method][0]


def required(method: str) -> frozenset[str]:
    """The buffers that the method keeps in every layout."""
    return frozenset.intersection(*(frozenset(layout.buffers) for layout in LAYOUTS[method]))


def all_buffers(method: str) -> frozenset[str]:
    """The names of every buffer that the method keeps in some layout."""
    layouts = (*LAYOUTS[method], *CODED_LAYOUTS[method])
    return frozenset(name for layout in layouts for name in layout.buffers)


def stray_codes(held: Layout, entries: Iterable[str]) -> frozenset[str]:
    """Names of codes and scales among the entries that this layout does not have."""
    return CODED_NAMES & set(entries) - set(held.buffers)


def has_momentum(momentum: float | Tensor) -> bool:
    """A tensor counts whatever its value is: it may change without our seeing it."""
    return isinstance(momentum, Tensor) or momentum != 0


def needed(method: str, group: Mapping[str, Any], param: Tensor) -> Layout:
    """The smallest layout for this parameter in a step with its group's options.

    Without momentum x is z. Then z - x need not be kept, and x_0 can be recovered from x and the
    sums. Not if x is rounded more coarsely than the sums: then moves below x's last place would be
    lost for good. (With codes, x is rounded at random, so that its mean is right.)
    """
    momentum = has_momentum(group["momentum"])
    if group["compact"] and compact.is_coded(param):
        return CODED_LAYOUTS[method][0 if momentum else -1]
    if momentum or is_half(param):
        return LAYOUTS[method][0]
    return LAYOUTS[method][-1]


def held(method: str, entries: Container[str]) -> Layout | None:
    """The layout of a state with these entries; None if no layout fits."""
    for layout in (*LAYOUTS[method], *CODED_LAYOUTS[method]):
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


def recover_initial_param(param: Tensor, state: dict[str, Any], eps: float) -> Tensor:
    """x_0 of a parameter that was stepped without momentum up to now."""
    # Copies, since autograd may keep them while the step overwrites the originals.
    shards = map(sharding.local, (param, state["grad_sum"], state["grad_sq_sum"]))
    x, *sums = (as_real(shard).clone() for shard in shards)
    start = rule.recover_initial_param(TorchFunctions, eps, x, *sums)
    return sharding.like(torch.view_as_complex(start) if param.is_complex() else start, param)
