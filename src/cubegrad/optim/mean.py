"""schedule_free: the numbers of a group's mean of all z, and its weights instead of y.

They are a tensor in the group, so that checkpoints have them, and graphs and compiled steps can
change them: how many steps the group has made, its largest learning rate so far, and the sum of the
weights, which are the squares of that.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cubegrad import cautions, options
from cubegrad.backends.batch import capturing
from cubegrad.options import Hyper
from cubegrad.state import averaged, layout

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


def prepare(group: Group, others: Sequence[Group]) -> None:
    """Give a new group numbers of its own; it may be another optimizer's."""
    options.check_schedule_free(group)
    group["mean"] = torch.zeros(3, dtype=torch.float64)
    group["last_momentum"] = group["momentum"]
    group["train_mode"] = others[0]["train_mode"] if others else True


def numbers(group: Group, on_device: bool, found_inf: Tensor | None) -> Any:
    """Of the group, on the host unless a step may not wait for the device."""
    device = group["mean"].device
    if on_device and group["params"]:
        device = group["params"][0].device
    device = device if found_inf is None else found_inf.device
    if group["mean"].device != device:
        if capturing():
            raise RuntimeError(
                "step() is being captured in a CUDA graph before the first one with "
                "schedule_free=True; run one step before the capture"
            )
        group["mean"] = group["mean"].to(device)
    mean: Tensor = group["mean"]
    return mean.unbind() if on_device or not mean.is_cpu else mean.tolist()


def warmth(group: Group, numbers: Any) -> Any:
    """What the warm-up leaves of the group's learning rate."""
    if not group["warmup_steps"]:
        return 1.0
    part = (numbers[0] + 1) / group["warmup_steps"]
    return part.clamp(max=1) if isinstance(part, Tensor) else min(part, 1.0)


def share(numbers: Any, lr: Any) -> Any:
    """What z_{k+1} is of x_{k+1}; 0 as long as the learning rate has been 0."""
    _, largest, total = numbers
    weight = _larger(largest, lr) ** 2
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, weight / (total + weight), 0.0)
    return weight / (total + weight) if weight else 0.0


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, Tensor):
        # Not torch.tensor(b): the compiler would make a graph for each b.
        return torch.maximum(
            a, b.detach().to(a) if isinstance(b, Tensor) else torch.zeros_like(a) + b
        )
    return max(a, b.item() if isinstance(b, Tensor) else b)


def restart(optimizer: "BaseOptimizer") -> None:
    """Begin anew, from the weights as they are."""
    for group in optimizer.param_groups:
        group["mean"].zero_()
        group["train_mode"] = True
    if optimizer._notice is not None:
        optimizer._notice.watch(True)


def end(
    groups: Sequence[Group], hypers: Sequence[Hyper], views: Sequence[Group] | None = None
) -> None:
    """Count the step of the groups that have made one.

    `views` are the groups without the parameters that were stepped earlier. A group of which this
    process holds nothing is stepped by another one.
    """
    for group, h, view in zip(groups, hypers, views or groups, strict=True):
        params = view["params"]
        stepped = len(params) < len(group["params"]) or any(p.grad is not None for p in params)
        if stepped or not any(param.numel() for param in params):
            _advance(group, h)


@torch.no_grad()
def _advance(group: Group, h: Hyper) -> None:
    """Count a step that the group has made."""
    steps, largest, total = numbers(group, h.on_device, h.found_inf)
    largest = _larger(largest, h.lr)
    # A step at lr 0 may only be there to have the state allocated.
    new = [steps + (h.lr > 0), largest, total + largest**2]
    if isinstance(steps, Tensor):
        row = torch.stack(new)
        if h.found_inf is not None:
            row = torch.where(h.found_inf.reshape(()) == 0, row, group["mean"])
        group["mean"].copy_(row)
    elif h.found_inf is None or not h.found_inf.item():
        group["mean"].copy_(torch.tensor(new, dtype=torch.float64))


def exchange(optimizer: "BaseOptimizer", to_mean: bool) -> None:
    """Put x, the mean, into the parameters, or y; nothing happens where it is there already."""
    for group in optimizer.param_groups:
        if group["train_mode"] is to_mean:
            pair = (group["last_momentum"], 1.0)
            _exchange(optimizer, group, *(pair if to_mean else reversed(pair)))
            group["train_mode"] = not to_mean
    if optimizer._notice is not None:
        optimizer._notice.watch(not to_mean)


def _exchange(optimizer: "BaseOptimizer", group: Group, before: float, after: float) -> None:
    for param in group["params"]:
        entries = optimizer.state.get(param, {})
        held = layout.held(optimizer._rule, entries)
        if held is not None:
            held.take_bytes(param, entries)
            averaged.exchange(param, held, entries, before, after)


def begin(optimizer: "BaseOptimizer", group: Group) -> None:
    """Refuse a step at x, and follow a momentum that has changed: y lies elsewhere then."""
    if not group["train_mode"]:
        raise RuntimeError(
            "step() after eval(): the weights are the mean, and gradients are taken elsewhere; "
            "call optimizer.train() before the forward pass"
        )
    last, momentum = group["last_momentum"], group["momentum"]
    if last == momentum:
        return
    options.check_schedule_free(group)
    if optimizer._release is not None:
        raise ValueError(
            f"momentum={momentum} was {last} in the step before, and must stay the same with "
            "release_gradients(), since it moves weights that backward() still needs; keep it, in "
            "OneCycleLR by cycle_momentum=False"
        )
    _exchange(optimizer, group, last, momentum)
    group["last_momentum"] = momentum


class Notice:
    """Warns once if a module evaluates while its weights are y.

    The hook is there in training only, so that files and copies made after eval() have none.
    """

    def __init__(self, optimizer: "BaseOptimizer", module: torch.nn.Module) -> None:
        self.optimizer, self.module = weakref.ref(optimizer), weakref.ref(module)
        self.handle: Any = None
        self.is_over = False
        self.watch(True)

    def watch(self, in_training: bool) -> None:
        module = self.module()
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        if in_training and module is not None and not self.is_over:
            self.handle = module.register_forward_pre_hook(Hook(self))

    def take(self, module: torch.nn.Module) -> None:
        optimizer = self.optimizer()
        if optimizer is None or self.module() is not module:
            return
        if optimizer.param_groups[0]["train_mode"]:
            self.is_over = True
            self.watch(False)
            cautions.warn_of_evaluation()


class Hook:
    """On a module; in a copy or a pickle of it, one that does nothing."""

    def __init__(self, notice: Notice | None = None) -> None:
        self.notice = notice

    def __reduce__(self) -> Any:
        return Hook, ()

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        # Frozen parts may be in this mode while they train, with gradients enabled.
        if module.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self.notice is not None:
            self.notice.take(module)


def watch_evaluation(optimizer: "BaseOptimizer") -> Notice | None:
    """Find a module that has one of the parameters, and notice when it evaluates."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for module in gc.get_objects():
        # Of its type: a proxy's __class__ may be code.
        kind = type(module)
        if issubclass(kind, torch.nn.Module) and not issubclass(kind, torch.jit.ScriptModule):
            own = module.__dict__.get("_parameters") or {}
            if any(id(param) in params for param in own.values()):
                return Notice(optimizer, module)
    return None


def warn_of_saving(optimizer: "BaseOptimizer") -> None:
    """Once, where y is saved after steps that have moved it."""
    has_moved = any(group["mean"][0] > 0 for group in optimizer.param_groups)
    if has_moved and not optimizer._has_warned_of_saving:
        optimizer._has_warned_of_saving = True
        cautions.warn_of_saving()
