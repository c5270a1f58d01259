"""Which buffers a method keeps for a parameter, and in which form.

A `Layout` answers every question about them: their names and order, whether x_0 is among them,
which one starts as a copy of the parameter. Other rooms pass it along with the tensors and ask it,
so another form of the state is another layout.
"""

from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cubegrad import rule, sharding
from cubegrad.functions import TorchFunctions


class Layout(NamedTuple):
    """What is kept for a parameter beside its step count."""

    method: str  # the function of rule.py that updates it
    buffers: tuple[str, ...]  # in the order in which that function takes them
    start: str | None  # the buffer that starts as a copy of the parameter; the others start at 0

    @property
    def keeps_initial_param(self) -> bool:
        return self.start == "initial_param"

    def forms(self, param: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        """The shape and dtype of each buffer."""
        return [(param.shape, state_dtype(param))] * len(self.buffers)

    def fresh(self, param: Tensor, count_on_device: bool) -> dict[str, Tensor]:
        """The state before the first step, whose x_0 is the parameter's value now."""
        dtype = state_dtype(param)
        state = {"step": counter(param, count_on_device)}
        for name in self.buffers:
            # A real copy, never an alias; autograd sees it when gradients are enabled.
            state[name] = (
                param.to(dtype, copy=True, memory_format=torch.preserve_format)
                if name == self.start
                else torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            )
        return state


MADGRAD = Layout("madgrad", ("grad_sum", "grad_sq_sum", "initial_param"), "initial_param")
MADGRAD_WITHOUT_START = Layout("madgrad", ("grad_sum", "grad_sq_sum"), None)
MIRROR_MADGRAD = Layout("mirror_madgrad", ("grad_sq_sum", "z"), "z")
# The layouts of each method, the one with the most buffers first.
LAYOUTS = {"madgrad": (MADGRAD, MADGRAD_WITHOUT_START), "mirror_madgrad": (MIRROR_MADGRAD,)}


def full(method: str) -> Layout:
    """The layout with every buffer that the method may keep."""
    return LAYOUTS[method][0]


def required(method: str) -> frozenset[str]:
    """The buffers that the method keeps in every layout."""
    return frozenset.intersection(*(frozenset(layout.buffers) for layout in LAYOUTS[method]))


def has_momentum(momentum: float | Tensor) -> bool:
    """A tensor counts whatever its value is: it may change without our seeing it."""
    return isinstance(momentum, Tensor) or momentum != 0


def needed(method: str, momentum: bool, param: Tensor) -> Layout:
    """The smallest layout for this parameter in a step with or without momentum.

    Without it x is z, so x_0 can be recovered from x and the sums. Not if x is rounded more
    coarsely than the sums: then moves below x's last place would be lost for good.
    """
    if momentum or state_dtype(param) != param.dtype:
        return LAYOUTS[method][0]
    return LAYOUTS[method][-1]


def held(method: str, entries: Container[str]) -> Layout | None:
    """The layout of a state with these entries; None if no layout fits."""
    for layout in LAYOUTS[method]:
        if all(name in entries for name in layout.buffers):
            return layout
    return None


def state_dtype(param: Tensor) -> torch.dtype:
    """At least float32: ν of a float16 gradient of 300 would overflow float16."""
    return torch.promote_types(param.dtype, torch.float32)


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
