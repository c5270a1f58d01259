"""The torch.optim.Optimizer contract: groups, state_dict, load_state_dict, pickling, hooks."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Never, TypedDict, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from cubegrad import backends, cautions, options, sharding
from cubegrad.backends.batch import Backend, Member
from cubegrad.optim import auto, compiled, edit, inputs, mean, release_checks
from cubegrad.optim.auto import Auto
from cubegrad.optim.release import GradientRelease
from cubegrad.optim.repeat import Repeats
from cubegrad.optim.step import step_groups
from cubegrad.rule import RULES, Rule
from cubegrad.state import checkpoint, layout, state_dicts
from cubegrad.state.start import Starts

Group = dict[str, Any]
StateDict = dict[str, Any]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Flags(TypedDict, total=False):
    """The keyword-only arguments, all booleans, as MADGRAD documents them."""

    decoupled_weight_decay: bool
    decoupled_lr: bool
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool
    compact: bool
    stochastic_rounding: bool


class BaseOptimizer(Optimizer):
    """All that does not depend on the method."""

    _rule: Rule
    _own_defaults: Mapping[str, Any] = {}  # options that other optimizers of ours do not have
    _opt_called: bool  # for torch's schedulers, which warn if they step first
    _has_had_gradients = False
    _has_warned_of_saving = False
    _notice: mean.Notice | None = None  # of evaluations at other weights than the mean
    _release: GradientRelease | None = None
    _is_editing = False  # inside edit_weights()
    _traced_members: dict[int, list[Member]]  # by the id of their group, while a step is traced

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | str = 1e-2,
        momentum: float | Tensor = 0.9,
        weight_decay: float = 0.0,
        eps: float = 1e-6,
        *,
        decoupled_weight_decay: bool = False,
        decoupled_lr: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        compact: bool = False,
        stochastic_rounding: bool = False,
        **unknown: Never,
    ) -> None:
        options.refuse_unknown(type(self).__name__, unknown)
        auto_lr = options.auto_lr(self._rule, lr)
        defaults = {
            "lr": 1.0 if auto_lr else lr,
            "auto_lr": auto_lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eps": eps,
            "decoupled_weight_decay": decoupled_weight_decay,
            "decoupled_lr": decoupled_lr,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
            "compact": compact,
            "stochastic_rounding": stochastic_rounding,
        }
        if layout.names_itself(self._rule):
            defaults["rule"] = self._rule.name
        defaults |= self._own_defaults
        options.check(defaults)
        defaults |= options.flags(defaults)
        self._repeats = Repeats()
        self._starts = Starts()
        self._auto = Auto(self._rule)
        self._settled: set[Tensor] = set()  # of these x is z, for sparse gradients
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        release_checks.refuse_in_open_step(self, "add_param_group()")
        if isinstance(param_group, dict) and options.auto_lr(self._rule, param_group.get("lr")):
            param_group = {**param_group, "lr": 1.0, "auto_lr": True}
        super().add_param_group(param_group)
        try:
            options.refuse_others(type(self).__name__, param_group)
            options.check_alike(self.param_groups)
            options.check(param_group)
            param_group.update(options.flags(param_group))
            for index, param in enumerate(param_group["params"]):
                inputs.check_param(options.name_of(param_group, index), param)
            if self._rule.pulls and not options.is_decoupled(param_group):
                decay = options.number("weight_decay", param_group["weight_decay"])
                cautions.warn_of_coupled_decay(decay)
            if self._rule.averages:
                mean.prepare(param_group, self.param_groups[:-1])
        except Exception:
            self.param_groups.pop()
            raise
        param_group.setdefault("reference_lr", options.number("lr", param_group["lr"]))
        param_group.setdefault("last_eps", param_group["eps"])
        if param_group["auto_lr"]:
            auto.hold(param_group, param_group.get("estimate", auto.empty()))

    def __repr__(self) -> str:
        """As torch's, without what the groups keep for the next steps."""
        lines = [f"{type(self).__name__} ("]
        for number, group in enumerate(self.param_groups):
            shown = {key: value for key, value in group.items() if key not in options.KEPT}
            if group["auto_lr"]:
                shown["estimated_lr"] = auto.lr_of(group["estimate"])
            lines.append(f"Parameter Group {number}")
            lines += [f"    {key}: {shown[key]}" for key in sorted(shown)]
        return "\n".join([*lines, ")"])

    def __getstate__(self) -> dict[str, Any]:
        self._refuse_unless_whole("a copy or a pickle")
        state: dict[str, Any] = super().__getstate__()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rule = _rule_of(self.param_groups) or self._rule
        self._repeats = Repeats()
        self._starts = Starts.of_loaded(self._rule, self.state)
        self._auto = getattr(self, "_auto", None) or Auto(self._rule)  # a copy has none yet
        self._auto.reset()
        self._settled = set()
        for group in self.param_groups:
            if group["auto_lr"]:
                auto.hold(group, group["estimate"])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step over every parameter that has a gradient; returns the closure's loss."""
        if self._is_editing:
            edit.refuse("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            if self._release is not None:
                self._release.finish_step(self)
            elif not torch.compiler.is_compiling():
                step_groups(self)
            elif (reason := compiled.against_tracing(self)) is None:
                compiled.step_groups(self)
            else:  # called from here, where the compiler can resume after it
                torch._dynamo.graph_break(msg=reason)  # an error with fullgraph=True
                compiled.step_untraced(self)
        return loss

    def release_gradients(self) -> GradientRelease:
        """From now on step each parameter during backward(), and free its gradient at once.

        The training loop stays as it is: step() ends what backward() has begun. The handle's
        remove() goes back to ordinary steps. See docs/gradient_release.md.
        """
        if self._release is not None:
            raise RuntimeError(
                "release_gradients() has been called already, and works until remove() is called "
                "on the handle that it returned; call it once"
            )
        self._release = GradientRelease(self)
        return self._release

    def edit_weights(self, *, keep_momentum: bool = True) -> AbstractContextManager[None]:
        """Change weights inside this context, between steps, and training goes on from there.

        Without it the next steps undo the edit. When the context ends, also by an exception, z is
        moved as the weights have been. With keep_momentum=False z is put where they are, so that
        edited coordinates stay there until they get a gradient. Gradients are off inside, and a
        copy of the weights is kept. See docs/editing_weights.md.
        """
        return edit.edit_weights(self, keep_momentum)

    def restart(self, params: Iterable[Tensor] | None = None) -> None:
        """Start over from the weights as they are: no state, step 0, a new estimate of lr="auto".

        With `params` only these start over; lr="auto", whose estimate is of all, refuses that.
        Options and schedulers stay as they are. See docs/editing_weights.md.
        """
        edit.restart(self, params)

    def _refuse_unless_whole(self, what: str) -> None:
        """Refuse to save, copy or load while the weights and the state do not belong together."""
        if self._is_editing:
            edit.refuse(what)
        release_checks.refuse_in_open_step(self, what)

    # A scheduler replaces `step` by a wrapper that notes the call, unless it has this mark; the
    # compiler refuses to trace that wrapper, so our own functions note it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _backend(self, group: Group) -> Backend:
        # Parameters without a gradient are not stepped, so it does not matter where they are.
        live = [param for param in group["params"] if param.grad is not None]
        return backends.choose(sharding.locals_of(live), group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler may leave unscaling and the check for overflows to the kernels."""
        if self._release is not None:  # only a GradScaler asks
            release_checks.refuse_scaler()
        groups = self.param_groups
        live = [group for group in groups if any(p.grad is not None for p in group["params"])]
        return all(self._backend(group).FUSED for group in live)

    # torch.compile knows a method of this name and runs it as it is instead of tracing it.
    def _init_group(self, group: Group, *columns: list[Tensor]) -> None:
        compiled.fill_columns(self, group, *columns)

    def state_dict(self) -> StateDict:
        """As torch's, with plain dicts, which `torch.load(weights_only=True)` reads."""
        self._refuse_unless_whole("state_dict()")
        if self._rule.averages and self.param_groups[0]["train_mode"]:
            mean.warn_of_saving(self)
        state_dict = state_dicts.plain(super().state_dict())
        checkpoint.complete(self._rule, self.param_groups, self.state, state_dict)
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict whole or not at all.

        torch's own method would cast the buffers to the parameter's dtype, and so lose the
        float32 state of half-precision parameters; this one gives each buffer its own dtype.
        What a wrapper has added to the state comes along, moved to the parameter's device.
        """
        self._refuse_unless_whole("load_state_dict()")
        state_dict = copy.copy(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        loaded = checkpoint.checked(self._rule, self.param_groups, self.defaults, state_dict)
        state: defaultdict[Tensor, Any] = defaultdict(dict, loaded.state)
        self.__setstate__({"state": state, "param_groups": loaded.groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _rule_of(groups: list[Group]) -> Rule | None:
    """The rule that the groups name, if they do."""
    names = {group.get("rule") for group in groups}
    return next((rule for rule in RULES if rule.name in names), None)


def _skip_idle_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out the profiler range and the hooks that torch puts around `step`, if there are none.

    To a host that has just waited for the device they are tens of microseconds, as much as all the
    rest of a fused step.
    """
    with_hooks = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def step_or_hooked_step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        hooked = (
            getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )
        return (with_hooks if hooked else step)(self, *args, **kwargs)

    step_or_hooked_step.hooked = True  # type: ignore[attr-defined]  # keeps torch from wrapping it
    return step_or_hooked_step


BaseOptimizer.step = _skip_idle_hooks(BaseOptimizer.step)  # type: ignore[method-assign]
