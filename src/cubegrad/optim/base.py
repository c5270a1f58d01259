"""The torch.optim.Optimizer shell: groups, state, step, state_dict."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypedDict, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cubegrad import backends, options, rule, sharding
from cubegrad.backends.eager import TorchFunctions
from cubegrad.backends.launching import capturing
from cubegrad.optim import auto as estimate
from cubegrad.optim import first_estimate, sparse
from cubegrad.optim.auto import Estimate
from cubegrad.optim.hooks import straight
from cubegrad.optim.repeat import Member, Prepared, Repeated, prepare
from cubegrad.options import Hyper
from cubegrad.state import checkpoint
from cubegrad.state import layout as states
from cubegrad.state import state_dict as state_dicts
from cubegrad.state.start import Starts, Weight

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


class Shell(Optimizer):
    """All that does not depend on which rule is run."""

    _method: str  # a function of rule.py, and its layout in states.LAYOUTS
    _choose = staticmethod(backends.choose)
    _settled = False  # whether the parameters are known to be their modules' own
    _estimate: Estimate | None = None
    _resting = False  # lr="auto" has had no gradient yet that gives it a scale
    _rests = 0  # for so many steps

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
    ) -> None:
        auto_lr = options.auto_lr(self._method, lr)
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
        }
        options.check(defaults)
        self._repeated = Repeated()
        self._starts = Starts()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict) and options.auto_lr(self._method, param_group.get("lr")):
            param_group = {**param_group, "lr": 1.0, "auto_lr": True}
        super().add_param_group(param_group)
        try:
            options.check_alike(self.param_groups)
            options.check(param_group)
            for index, param in enumerate(param_group["params"]):
                name = options.name_of(param_group, index)
                states.check(name, param)
                sharding.check(name, param)
        except Exception:
            self.param_groups.pop()
            raise
        param_group.setdefault("reference_lr", options.number("lr", param_group["lr"]))
        param_group.setdefault("last_eps", param_group["eps"])
        if param_group["auto_lr"]:
            param_group.setdefault("estimate", estimate.nothing_yet())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._repeated = Repeated()
        self._starts = Starts.of(self.state)
        self._estimate = None
        self.defaults.setdefault("auto_lr", False)  # pickled before there was such a thing
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group.setdefault("last_eps", group["eps"])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step over every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            if not torch.compiler.is_compiling():
                self._step_groups()
            elif self._may_be_traced():
                hypers = self._hypers()
                idle = [
                    self._step_group(group, _with_sums(h, None))
                    for group, h in zip(self.param_groups, hypers, strict=True)
                ]
                estimate.advance_traced(self._estimate, self.param_groups, hypers, idle)
            else:
                self._step_untraced()
        return loss

    # A scheduler replaces `step` by a wrapper that notes the call, unless it bears this mark; the
    # compiler refuses to trace that wrapper, so `_init_group` notes the call.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def _may_be_traced(self) -> bool:
        """Not the first step of an estimated lr, which looks at its numbers."""
        if self._estimate is None:
            return not any(group["auto_lr"] for group in self.param_groups)
        return self._estimate.belongs_to(self.param_groups) and not self._estimate.is_spread

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_untraced(self) -> None:
        self._step_groups()

    def _step_groups(self) -> None:
        """Repeat the prepared steps that still fit, and run the others from scratch."""
        self._refuse_blind_capture()
        if not self._settled:
            self._settled = sharding.refuse_replaced(self.param_groups)
        ready = self._repeated.ready(self.param_groups, self.state)
        scratch = [g for index, g in enumerate(self.param_groups) if index not in ready]
        # Everything that can be refused is refused before anything changes.
        for group in scratch:
            self._refuse(group)
        hypers = self._hypers()
        for index, (group, h) in enumerate(zip(self.param_groups, hypers, strict=True)):
            if self._resting:
                self._rest(group, h)
            elif index in ready:
                prepared, tables = ready[index]
                prepared.run(_with_sums(h, prepared.spread), tables)
            else:
                self._recover_at_last_eps(group)
                self._step_alike(group, h)
                self._repeated.keep(index, group, self._prepare(group))
        if scratch:
            self._repeated.remember(self.state)
        estimate.advance(self._estimate, self.param_groups, self.state, hypers, ready)

    def _refuse(self, group: Group) -> None:
        for index, param in enumerate(group["params"]):
            states.check_grad(options.name_of(group, index), param)
        sparse.refuse(self._method, [group])
        self._backend(group)

    def _rest(self, group: Group, h: Hyper) -> None:
        """Count a step without touching a weight: no gradient gives lr="auto" a scale yet."""
        params: list[Tensor] = []
        steps: list[Tensor] = []
        unused: list[list[Tensor]] = [[] for _ in states.LAYOUTS[self._method]]
        self._init_group(group, params, [], steps, [], *unused)
        if steps and not (h.found_inf is not None and h.found_inf.item()):
            torch._foreach_add_(steps, 1)
        self._starts.passed(params)

    def _prepare(self, group: Group) -> Prepared | None:
        backend = self._backend(group)
        if not hasattr(backend, "Launch") or all(p.grad is None for p in group["params"]):
            return None
        if capturing():  # its tables would exist in the graph's replay only
            return None
        if self._starts.any_open(p for p in group["params"] if p.grad is not None):
            return None  # x_0 is still to be read again
        spreads = set(map(sharding.spread, group["params"])) if group["auto_lr"] else {None}
        if len(spreads) > 1:  # their sums are added up among different processes
            return None
        layout_of = functools.partial(states.layout, self._method, group["momentum"])
        loan = sharding.Loan(group["params"])
        members = []
        for param, shard in zip(group["params"], loan.shards, strict=True):
            entries = self.state.get(param, {}).items()  # a wrapper's need not be tensors
            shards = {k: sharding.local(t) for k, t in entries if isinstance(t, Tensor)}
            members.append(Member(param, shard, shards))
        with loan:
            prepared = prepare(backend.Launch, self._method, members, self.state, layout_of, loan)
        if prepared is not None:
            prepared.spread = spreads.pop()
        return prepared

    def _step_alike(self, group: Group, h: Hyper) -> None:
        """Step those parameters that keep x_0 apart from those that do not.

        And apart by how they are spread over processes, if sums are wanted.
        """
        parts: dict[tuple[bool, sharding.Spread], list[Tensor]] = {}
        for param in group["params"]:
            kept = states.keeps_initial_param(group["momentum"], param)
            spread = None if h.sums is None else sharding.spread(param)
            parts.setdefault((kept, spread), []).append(param)
        for (_, spread), params in parts.items():
            self._step_group({**group, "params": params}, _with_sums(h, spread))

    def _step_group(self, group: Group, h: Hyper) -> list[Tensor]:
        """Returns the sums of stepped parameters that have no gradient now, in pairs."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        steps: list[Tensor] = []
        idle: list[Tensor] = []
        buffers: list[list[Tensor]] = [[] for _ in states.LAYOUTS[self._method]]
        has_sparse = self._init_group(group, params, grads, steps, idle, *buffers)
        if not params:
            return idle
        buffers = [buffer for buffer in buffers if buffer]
        owners = params
        if not (group["differentiable"] or torch.compiler.is_compiling()):
            grads = list(map(sharding.gradient, grads, params))
            params, *buffers = (
                [sharding.local(t) for t in column] for column in (params, *buffers)
            )
        run = self._backend(group).step
        if has_sparse:
            params, grads, steps, *buffers = sparse.step_rows(
                run, self._method, h, group["momentum"], [params, grads, steps, *buffers]
            )
        if params:
            real = [[states.real(t) for t in column] for column in (params, grads, *buffers)]
            run(self._method, h, real[0], real[1], steps, real[2:])
        if not torch.compiler.is_compiling():
            sharding.bump_versions(owners)
            self._drop_initial_params(group, h)
            self._starts.passed(owners)
        return idle

    def _recover_at_last_eps(self, group: Group) -> None:
        """Where x_0 is not kept, the weights belong to the eps they were reached with."""
        last, group["last_eps"] = group["last_eps"], group["eps"]
        if last == group["eps"] or "initial_param" not in states.LAYOUTS[self._method]:
            return
        for param in group["params"]:
            state = self.state.get(param, {})
            if "step" in state and "initial_param" not in state:
                state["initial_param"] = _recovered(param, state, last)

    def _weight(self, group: Group) -> Weight:
        """What the host knows of this step's weight."""
        lr = group["lr"]
        if self._resting or (not isinstance(lr, Tensor) and lr == 0):
            return Weight.NONE
        on_device = self._estimate is not None and not self._estimate.values.is_cpu
        if isinstance(lr, Tensor) or on_device or hasattr(self, "found_inf"):
            return Weight.UNKNOWN
        return Weight.SOME

    def _drop_initial_params(self, group: Group, h: Hyper) -> None:
        """Without momentum x is z after a step, so x_0 can be recovered and need not be kept."""
        for param in group["params"]:
            if states.keeps_initial_param(group["momentum"], param) or param.grad is None:
                continue
            if "initial_param" in self.state[param] and not _skipped(h):
                del self.state[param]["initial_param"]

    def _backend(self, group: Group) -> ModuleType:
        # What has no gradient is not stepped, wherever it is.
        live = [param for param in group["params"] if param.grad is not None]
        return self._choose(
            live if torch.compiler.is_compiling() else list(map(sharding.local, live)),
            foreach_wanted=group["foreach"],
            fused_wanted=group["fused"],
            differentiable=group["differentiable"],
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler may leave unscaling and the look for overflows to the kernels."""
        live = [g for g in self.param_groups if any(p.grad is not None for p in g["params"])]
        return all(hasattr(self._backend(group), "Launch") for group in live)

    # torch.compile knows a method of this name and runs it as it is instead of tracing it.
    def _init_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        steps: list[Tensor],
        idle: list[Tensor],
        *buffers: list[Tensor],
    ) -> bool:
        """Fill the lists with what has a gradient; give state to what had none before.

        `idle` gets the sums of parameters that have state and no gradient now, in pairs.
        """
        self._opt_called = True
        self._recover_at_last_eps(group)
        weight = self._weight(group)
        live = [param for param in group["params"] if param.grad is not None]
        layout = states.LAYOUTS[self._method]
        on_device = group["capturable"] or group["auto_lr"]
        on_device = on_device or hasattr(self._backend(group), "Launch")
        centred = any(
            "initial_param" in self.state[param]
            or states.keeps_initial_param(group["momentum"], param)
            for param in live
        )
        has_sparse = False
        for param in live:
            state = self.state[param]
            if "step" not in state:  # a wrapper may have put an entry of its own there
                state.update(self._fresh_state(param, group, on_device))
                self._starts.begin(param, state, weight)
            elif not capturing():  # a graph would read it again at every replay
                self._starts.read_again(param, state, weight)
            if on_device and state["step"].device != param.device:
                state["step"] = state["step"].to(param.device)
            if centred and "initial_param" in layout and "initial_param" not in state:
                # The run went without momentum until now.
                state["initial_param"] = _recovered(param, state, group["eps"])
            has_sparse = has_sparse or param.grad.is_sparse
            params.append(param)
            grads.append(param.grad)
            steps.append(state["step"])
            for name, buffer in zip(layout, buffers, strict=True):
                if name in state:
                    buffer.append(state[name])
        for param in group["params"]:
            if param.grad is None and "grad_sum" in self.state.get(param, {}):
                idle += [self.state[param][name] for name in ("grad_sum", "grad_sq_sum")]
        return has_sparse

    def _fresh_state(self, param: Tensor, group: Group, on_device: bool) -> dict[str, Tensor]:
        """x_0 is the value now, so weights loaded before the first step are it."""
        state = {"step": states.counter(param, on_device)}
        for name in states.layout(self._method, group["momentum"], param):
            copied = name in ("z", "initial_param")
            state[name] = states.copy(param) if copied else states.zeros(param)
        return state

    def _hypers(self) -> list[Hyper]:
        """The numbers of every group for this step."""
        if not any(group["auto_lr"] for group in self.param_groups):
            return [self._hyper(group) for group in self.param_groups]
        if self._estimate is None or not self._estimate.belongs_to(self.param_groups):
            resting = [self._hyper(group, 0.0) for group in self.param_groups]
            self._estimate = estimate.found(self.param_groups, self.state, resting)
            self._resting = self._estimate is None
            if self._estimate is None:
                self._rests = first_estimate.rested(self._rests)
                return resting
            self._rests = 0
        lr = self._estimate.renewed()
        return [
            self._hyper(group, lr)._replace(sums=part)
            for group, part in zip(self.param_groups, self._estimate.parts, strict=True)
        ]

    def _hyper(self, group: Group, estimated: float | Tensor | None = None) -> Hyper:
        on_device = group["capturable"] or torch.compiler.is_compiling()
        on_device = on_device or isinstance(estimated, Tensor)
        factor = _scalar(group["lr"], on_device)
        lr = factor if estimated is None else _times(estimated, factor)
        decoupled = group["decoupled_weight_decay"] or group["decoupled_lr"]
        return Hyper(
            lr=lr,
            momentum=_scalar(group["momentum"], on_device),
            eps=group["eps"],
            weight_decay=0.0 if decoupled else group["weight_decay"],
            shrink=options.shrink(group, factor if group["decoupled_lr"] else lr),
            maximize=group["maximize"],
            on_device=on_device,
            differentiable=group["differentiable"],
            found_inf=getattr(self, "found_inf", None),
            grad_scale=getattr(self, "grad_scale", None),
        )

    def _refuse_blind_capture(self) -> None:
        """A CUDA graph would freeze a step count and an lr that live on the host."""
        if capturing() and not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError(
                "step() is being captured in a CUDA graph with capturable=False, and would replay "
                "one step count for ever; build the optimizer with capturable=True"
            )

    def state_dict(self) -> StateDict:
        """As torch's, with plain dicts, which `torch.load(weights_only=True)` reads."""
        state_dict = state_dicts.plain(super().state_dict())
        with torch.no_grad():
            lacking = checkpoint.without_initial_param(self.param_groups, self.state, state_dict)
            for param, entries, eps in lacking:
                entries["initial_param"] = _recovered(param, self.state[param], eps)
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict whole or not at all.

        torch's own method would cast the buffers to the parameter's dtype, and so lose the
        float32 state of half-precision parameters; this one gives each buffer its own dtype.
        What a wrapper has added to the state comes along, moved to the parameter's device.
        """
        state_dict = copy.copy(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        loaded = checkpoint.checked(self._method, self.param_groups, self.defaults, state_dict)
        state: defaultdict[Tensor, Any] = defaultdict(dict, loaded.state)
        self.__setstate__({"state": state, "param_groups": loaded.groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _with_sums(h: Hyper, spread: sharding.Spread) -> Hyper:
    """Up to here `sums` are a group's, by how its parameters are spread over processes."""
    return h if h.sums is None else h._replace(sums=h.sums[spread])


def _skipped(h: Hyper) -> bool:
    """Whether a GradScaler's overflow kept the step from happening; unknown inside a graph."""
    return h.found_inf is not None and (h.on_device or bool(h.found_inf.item()))


def _recovered(param: Tensor, state: dict[str, Any], eps: float) -> Tensor:
    # Copies, since autograd may keep them while the step writes over the originals.
    shards = map(sharding.local, (param, state["grad_sum"], state["grad_sq_sum"]))
    x, *sums = (states.real(shard).clone() for shard in shards)
    centre = rule.recover_initial_param(TorchFunctions, eps, x, *sums)
    return sharding.like(torch.view_as_complex(centre) if param.is_complex() else centre, param)


def _times(estimated: float | Tensor, factor: float | Tensor) -> float | Tensor:
    """Without a launch where there is nothing to do."""
    if isinstance(factor, Tensor):
        # The step will write over the estimate, which autograd may keep for the factor's sake.
        return (estimated.clone() if isinstance(estimated, Tensor) else estimated) * factor
    return estimated if factor == 1 else estimated * factor


def _scalar(value: float | Tensor, on_device: bool) -> float | Tensor:
    if not isinstance(value, Tensor):
        return value
    return value.reshape(()) if on_device or value.requires_grad else value.item()


Shell.step = straight(Shell.step)  # type: ignore[method-assign]
