"""Gradient release: a parameter steps as soon as backward() has completed its gradient.

A hook on each parameter steps it during the backward pass and frees its gradient. Small gradients
are held until step(), which updates their parameters together and ends the pass. One gradient at
least is held, however large: whoever clips gradients before step() changes it, which shows.
"""

import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from cubegrad import options, sharding
from cubegrad.optim import edit, release_checks, step
from cubegrad.optim.compiled import untraced
from cubegrad.optim.release_checks import Held, version_of
from cubegrad.optim.repeat import Prepared
from cubegrad.options import Hyper

if TYPE_CHECKING:
    from cubegrad.optim.base import BaseOptimizer

Group = dict[str, Any]


class Slot:
    """A parameter, its hook, and its last step if that can be repeated."""

    def __init__(self, param: Tensor) -> None:
        self.params = [param]
        self.group = self.index = 0  # where it is: the index of its group, and that within it
        self.hook: Any = None
        self.prepared: Prepared | None = None
        self.entries: Any = None  # the parameter's state when that step was prepared


class GradientRelease:
    """What `optimizer.release_gradients()` returns; `remove()` goes back to ordinary steps."""

    # Gradients that keep less memory alive are held until step(), where they share a launch.
    # Measured by benchmarks/speed/release_time.py; docs/gradient_release.md has the numbers.
    held_bytes = 2**18

    def __init__(self, optimizer: "BaseOptimizer") -> None:
        self._optimizer = weakref.ref(optimizer)  # hooks do not keep a dropped optimizer alive
        self._lock = threading.Lock()  # backward() runs one thread for each device
        self._slots: dict[int, Slot] = {}  # by the id of the parameter
        self._wrappers_checked = False
        self._witnesses: set[int] = set()  # ids of parameters; the first one's gradient is held
        self.forget_pass()
        release_checks.refuse_options(optimizer)
        release_checks.refuse_wrappers(optimizer.param_groups)
        _refuse_other_owners(optimizer.param_groups)
        self._add_hooks(optimizer)
        self._add_witness(self._slots)

    def forget_pass(self) -> None:
        self.is_open = False  # whether a gradient has come since the last step()
        self._hypers: list[Hyper] | None = None  # None while lr="auto" has no estimate
        self._stream: Any = None  # the stream that adds up the sums of lr="auto"
        self._stepped: set[int] = set()  # ids of parameters
        self._held: dict[int, Held] = {}  # by the id of the parameter

    def remove(self) -> None:
        """Go back to ordinary steps."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._release is self:
            release_checks.refuse_in_open_step(optimizer, "remove()")
            optimizer._release = None
        for slot in self._slots.values():
            if slot.hook is not None:
                slot.hook.remove()
        self._slots = {}

    def _add_hooks(self, optimizer: "BaseOptimizer") -> None:
        """Follow the optimizer's groups, which may have got, lost or unfrozen parameters."""
        known, self._slots = self._slots, {}
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                slot = known.pop(id(param), None) or Slot(param)
                slot.group, slot.index = number, index
                if slot.hook is None and param.requires_grad and not is_lazy(param):
                    hook = partial(_on_gradient, weakref.ref(self))
                    slot.hook = param.register_post_accumulate_grad_hook(hook)
                self._slots[id(param)] = slot
        for slot in known.values():
            if slot.hook is not None:
                slot.hook.remove()

    def _add_witness(self, keys: Iterable[int]) -> None:
        """The smallest of these parameters, by their ids.

        None that is sharded: clipping changes a DTensor without a trace (`version_of`).
        """
        slots = [self._slots[key] for key in keys if key in self._slots]
        params = [slot.params[0] for slot in slots if slot.hook is not None]
        plain = [param for param in params if not sharding.is_sharded(param)]
        if plain:
            self._witnesses.add(id(min(plain, key=lambda param: param.nbytes)))

    def take_gradient(self, optimizer: "BaseOptimizer", param: Tensor) -> None:
        """Step a parameter whose gradient is complete, or hold its gradient until step()."""
        if not self.is_open:
            self._begin_pass(optimizer)
        key = id(param)
        slot = self._slots.get(key)
        if slot is None:
            return  # its group has been removed
        if key in self._stepped or key in self._held:
            self._refuse_second_gradient(optimizer, param, slot)
        hypers, grad = self._hypers, param.grad
        if grad is None:
            return  # another hook has taken it
        is_witness = key in self._witnesses and not self._held
        if is_witness and not grad.is_sparse and _bytes_kept(grad) > grad.nbytes:
            param.grad = grad = grad.clone()  # a view would keep the others' gradients alive
        waits = is_witness or _bytes_kept(grad) < self.held_bytes
        if hypers is None or waits or self._is_on_other_stream():
            self._held[key] = Held(param, grad, version_of(grad))
            return
        self._step_now(optimizer, slot, hypers[slot.group])
        self._stepped.add(key)
        param.grad = None

    def _begin_pass(self, optimizer: "BaseOptimizer") -> None:
        if optimizer._is_editing:
            edit.refuse("backward() with release_gradients()")
        release_checks.refuse_options(optimizer)
        if not self._wrappers_checked:
            release_checks.refuse_wrappers(optimizer.param_groups)
            self._wrappers_checked = True
        self._add_hooks(optimizer)
        groups = optimizer.param_groups
        if not any(group["auto_lr"] for group in groups):
            self._hypers = [step.hyper(optimizer, group) for group in groups]
        elif optimizer._auto.has_begun(groups):
            hyper = partial(step.hyper, optimizer)
            self._hypers = optimizer._auto.begin(groups, optimizer.state, hyper)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self._stream = torch.cuda.current_stream()
        self.is_open = True

    def _is_on_other_stream(self) -> bool:
        """Whether this gradient's stream might add to the sums while another one does."""
        return self._stream is not None and torch.cuda.current_stream() != self._stream

    def _step_now(self, optimizer: "BaseOptimizer", slot: Slot, h: Hyper) -> None:
        """`step_groups` for one parameter."""
        (param,), state = slot.params, optimizer.state
        whole = optimizer.param_groups[slot.group]
        group = {**whole, "params": slot.params}
        if slot.prepared is not None and state.get(param) is slot.entries:
            tables = slot.prepared.tables(group)
            if tables is not None:
                step.run_again(slot.prepared, tables, h)
                return
        group["param_names"] = [options.name_of(whole, slot.index)]  # for messages
        backend = step.check_group(optimizer, group)
        slot.prepared = step.step_group(optimizer, group, h, backend)
        slot.entries = state[param]

    @untraced  # type: ignore[untyped-decorator]
    def finish_step(self, optimizer: "BaseOptimizer") -> None:
        """Step the parameters that still have a gradient, and end the pass."""
        release_checks.refuse_options(optimizer)
        release_checks.refuse_changed(self._held.values())
        groups, hypers = optimizer.param_groups, self._hypers
        if not self.is_open:
            self._add_hooks(optimizer)
        if hypers is None:  # no gradient has come, or all are held
            step.step_groups(optimizer)
        else:
            step.step_groups(optimizer, list(map(self._remaining, groups)), hypers)
        for group in groups:
            for param in group["params"]:
                param.grad = None
        if self._stepped and not self._held:  # no witness had a gradient this time
            self._add_witness(self._stepped)
        self.forget_pass()

    def _remaining(self, group: Group) -> Group:
        """The group with those parameters only that have not been stepped in this pass."""
        params, names = [], []
        for index, param in enumerate(group["params"]):
            if id(param) not in self._stepped:
                params.append(param)
                names.append(options.name_of(group, index))
            elif param.grad is not None:
                raise RuntimeError(
                    f"{options.name_of(group, index)} has been stepped during backward() and then "
                    "got another gradient, and each may have one for a step(); call zero_grad()"
                )
        return {**group, "params": params, "param_names": names}

    def _refuse_second_gradient(
        self, optimizer: "BaseOptimizer", param: Tensor, slot: Slot
    ) -> None:
        if id(param) in self._stepped:
            param.grad = None  # else the next backward() would add to it
        name = options.name_of(optimizer.param_groups[slot.group], slot.index)
        raise RuntimeError(
            f"{name} got a second gradient before step(), and with "
            "release_gradients() each may have one: call step() after every backward(), also "
            "after one that has failed. To accumulate gradients, use ordinary steps: "
            "handle.remove(). A parameter used in several checkpoints needs use_reentrant=False"
        )


def _on_gradient(reference: "weakref.ref[GradientRelease]", param: Tensor) -> None:
    """The hook."""
    if torch.compiler.is_compiling():  # compiled autograd traces hooks
        _take_untraced(reference, param)
    else:
        _take(reference, param)


def _take(reference: "weakref.ref[GradientRelease]", param: Tensor) -> None:
    release = reference()
    optimizer = None if release is None else release._optimizer()
    if release is None or optimizer is None:
        return
    with release._lock:
        if not torch.is_grad_enabled():
            release.take_gradient(optimizer, param)
            return
        with torch.no_grad():
            release.take_gradient(optimizer, param)


@untraced  # type: ignore[untyped-decorator]
def _take_untraced(reference: "weakref.ref[GradientRelease]", param: Tensor) -> None:
    _take(reference, param)


def _bytes_kept(grad: Tensor) -> float:
    """The memory that stays alive with this gradient.

    It may be a view: FSDP2 makes one buffer for all gradients of a layer.
    """
    grad = sharding.local(grad)
    return math.inf if grad.is_sparse else grad.untyped_storage().nbytes()


def _refuse_other_owners(groups: Sequence[Group]) -> None:
    for group in groups:
        for index, param in enumerate(group["params"]):
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                if isinstance(hook, partial) and hook.func is _on_gradient:
                    other = hook.args[0]()
                    if other is not None and other._optimizer() is not None:
                        raise RuntimeError(
                            f"{options.name_of(group, index)} is stepped during backward() by "
                            "another optimizer already; call remove() on the handle that its "
                            "release_gradients() returned"
                        )
