"""The optimizers: their arguments, and what they mean."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from torch import Tensor

from cubegrad import cautions, options, rule
from cubegrad.optim import mean
from cubegrad.optim.auto import Shared, lr_of
from cubegrad.optim.auto.lookup import estimated_lr
from cubegrad.optim.base import BaseOptimizer, Flags, Params

__all__ = ["MADGRAD", "MADGRADW", "MirrorMADGRAD", "estimated_lr"]


class _Estimating(BaseOptimizer):
    """The methods of an optimizer that can have lr="auto"."""

    def estimated_lr(self) -> float:
        """The current estimate of lr="auto", without any group's factor; nan before the first step.

        Reading it waits for the device; `param_groups[0]["estimated_lr"]` is the same number as a
        tensor, at no cost. `cubegrad.estimated_lr` finds it inside a wrapper.
        """
        self._check_auto("estimated_lr()", "read param_groups[0]['lr']")
        return lr_of(self.param_groups[0]["estimate"])

    def share_estimate(self, process_group: Any = None) -> None:
        """Make one estimate of lr="auto" with the same optimizer in the other processes.

        For processes that hold different parameters as plain tensors, or parts of them: pipeline
        stages, ZeRO-1, FSDP1. All call this before the first step, have as many groups with the
        same options, and step together: each step sums a few numbers over the process group (None
        is all processes).
        """
        self._check_auto("share_estimate()", "build it with lr='auto'")
        self._auto.shared = Shared(process_group)

    def _check_auto(self, what: str, remedy: str) -> None:
        group = self.param_groups[0]
        if not group["auto_lr"]:
            raise RuntimeError(
                f"{what} needs lr='auto', and this optimizer has lr={group['lr']}; {remedy}"
            )


class MADGRAD(_Estimating):
    """MADGRAD: momentumized, adaptive, dual averaged gradients (Defazio & Jelassi).

    Algorithm 1 of the paper, for k = 0, 1, …:

        λ_k     = γ_k √(k+1)
        s_{k+1} = s_k + λ_k g_k
        ν_{k+1} = ν_k + λ_k g_k²
        z_{k+1} = x_0 − s_{k+1} / (∛ν_{k+1} + ε)
        x_{k+1} = (1−c) x_k + c z_{k+1}

    Args:
        params: tensors, named tensors or groups, as any torch optimizer takes them.
        lr: γ. Not comparable to SGD's or Adam's: sweep it. A float or a tensor; or
            "auto": it is estimated, and the groups' `lr`, 1 unless given, is a factor on it that
            a scheduler may change. `estimated_lr()` returns the estimate.
        momentum: 1 - c, in [0, 1). A plain 0 keeps no x_0: 8 instead of 12 bytes of state per
            float32 parameter (half precision keeps it). A float or a tensor.
        weight_decay: the paper's L2 term, or decoupled decay. MADGRAD needs less than others.
        eps: ε, added to the cube root and nowhere else. At 0, a coordinate that has had no
            gradient yet stays where it started.
        decoupled_weight_decay: shrink x and z by 1 - lr * weight_decay a step, as AdamW does.
        decoupled_lr: shrink them by 1 - weight_decay * lr / (the group's first lr) instead,
            which does not depend on the size of lr; implies decoupled decay.
        maximize: ascend.
        foreach: pick the backend as in torch; if this and `fused` are None, the fastest that fits.
        fused: as `foreach`.
        capturable: keep the step count on the device and never read a tensor on the host.
        differentiable: let autograd run through `step`.
        compact: keep about 4 bytes of state per parameter instead of 12 (3 at momentum 0), in
            tensors of at least 4,096 elements with rows (all but the first dimension) of at least
            64, or 65,536 in one dimension. Others, and float64, keep their usual state. See
            docs/memory.md.
        stochastic_rounding: round bfloat16 and float16 weights up or down at random, so that moves
            below their last place are made on average. compact=True does so in any case.
    """

    _rule = rule.MADGRAD


class MADGRADW(_Estimating):
    """The member of MADGRAD's family that takes AdamW's settings. It is ours, not the paper's.

    For k = 0, 1, …, with w the weight decay and c = 1 - momentum:

        a_k     = 1.5 / (k + 1.5)
        ν_{k+1} = (1 − a_k) ν_k + a_k g_k²
        z_{k+1} = (1 − γ_k w) z_k − γ_k g_k / (√ν_{k+1} + ε)
        x'      = (1 − γ_k w) x_k
        x_{k+1} = x' + c (z_{k+1} − x')

    The last line applies where (z_{k+1} − x') g_k < 0; elsewhere x_{k+1} = x'.

    The square root makes a step free of the gradient's scale, so lr and weight_decay are AdamW's
    numbers. ν is a mean over the whole run, nearly with the paper's weights √(k+1). A coordinate of
    x follows z only where that goes down by the newest gradient; what is held back is not lost,
    since z has moved. See docs/madgradw.md.

    Args:
        params: tensors, named tensors or groups, as any torch optimizer takes them.
        lr: γ, AdamW's. A float or a tensor; or "auto": it is estimated, as of `MADGRAD`. That keeps
            x_0 too: 12 bytes of state per float32 parameter, or about 4 in codes.
        momentum: 1 - c, in [0, 1): AdamW's first beta. A plain 0 keeps ν alone, unless lr is
            "auto": 4 instead of 8 bytes of state per float32 parameter. AdamW's pair of betas will
            do as well.
        eps: ε, added to the square root.
        weight_decay: decoupled decay, AdamW's.
        amsgrad: must be False; taken so that an AdamW call runs unchanged.
        betas: as AdamW takes them: the first is the momentum, the second is not needed.
        schedule_free: the learning rate needs no schedule. Gradients are taken at
            y = c z + (1-c) x, the weights while training, and x is the mean of all z, the weights
            that `eval()` puts there. See docs/madgradw.md.
        warmup_steps: with schedule_free, lr grows from 0 over so many steps.

    The other arguments are those of `MADGRAD`. decoupled_weight_decay is True unless given; False
    makes an L2 term of weight_decay, as Adam has it. compact=True keeps about 2 bytes of state per
    parameter instead of 8.
    """

    _rule = rule.MADGRADW

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | str = 1e-3,
        momentum: float | Tensor | tuple[float, float] = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        betas: tuple[float, float] | None = None,
        schedule_free: bool = False,
        warmup_steps: int = 0,
        **flags: Unpack[Flags],
    ) -> None:
        if amsgrad:
            options.refuse_unknown(type(self).__name__, ["amsgrad"])
        is_auto = isinstance(lr, str) and lr == "auto"
        if is_auto:
            self._rule = rule.MADGRADW_AUTO
        if options.flag("schedule_free", schedule_free):
            self._rule = rule.SCHEDULE_FREE_AUTO if is_auto else rule.SCHEDULE_FREE
            self._own_defaults = {"warmup_steps": warmup_steps, "train_mode": True}
        elif warmup_steps:
            raise ValueError(
                f"warmup_steps={warmup_steps} needs schedule_free=True; without it use one of "
                "torch's schedulers"
            )
        flags.setdefault("decoupled_weight_decay", True)
        group = _without_betas({"momentum": momentum} if betas is None else {"betas": betas})
        super().__init__(params, lr, group["momentum"], weight_decay, eps, **flags)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict) and "schedule_free" in param_group:
            raise ValueError(
                "a param group has schedule_free, which is for all groups or for none; pass it to "
                f"{type(self).__name__} itself"
            )
        if isinstance(param_group, dict) and param_group.get("amsgrad") is False:
            param_group = {name: own for name, own in param_group.items() if name != "amsgrad"}
        super().add_param_group(_without_betas(param_group))

    def eval(self) -> None:
        """With schedule_free put x, the mean, into the weights: to evaluate or to save them.

        Otherwise, and if it is there, nothing happens.
        """
        self._exchange(to_mean=True)

    def train(self, mode: bool = True) -> None:
        """Put back what gradients are taken at, after `eval()`."""
        self._exchange(to_mean=not mode)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The weights as after `eval()` inside this context, and as they were after it."""
        was_training = self._rule.averages and self.param_groups[0]["train_mode"]
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def _exchange(self, to_mean: bool) -> None:
        modes = {group["train_mode"] for group in self.param_groups if self._rule.averages}
        if to_mean in modes:
            self._refuse_unless_whole("eval()" if to_mean else "train()")
            mean.exchange(self, to_mean)


def _without_betas(group: dict[str, Any]) -> dict[str, Any]:
    """The group with a momentum where it has AdamW's betas."""
    betas = group.get("betas", group.get("momentum")) if isinstance(group, dict) else None
    if not isinstance(betas, tuple | list) and not (betas is not None and "betas" in group):
        return group
    momentum = options.momentum_of_betas(betas)
    cautions.warn_of_betas(*betas)
    return {name: own for name, own in group.items() if name != "betas"} | {"momentum": momentum}


class MirrorMADGRAD(BaseOptimizer):
    """The mirror-descent form of MADGRAD, as the authors' package has it.

    MADGRAD weighs g_i² by γ √(i+1). Divide its sum by γ √(k+1) and the weights become relative to
    the newest gradient's:

        ν_{k+1} = √(k/(k+1)) ν_k + g_k²

    so that MADGRAD's denominator is γ^{1/3} (k+1)^{1/6} ∛ν_{k+1}. Its newest term γ √(k+1) g_k over
    that denominator is γ^{2/3} (k+1)^{1/3} g_k / ∛ν_{k+1}. Mirror descent moves z by this newest
    term and leaves the older ones as they were added; the constant γ^{2/3} is called lr:

        z_{k+1} = z_k − γ (k+1)^{1/3} g_k / (∛ν_{k+1} + ε)
        x_{k+1} = (1−c) x_k + c z_{k+1}

    Nothing pulls back to x_0, so decoupled decay simply shrinks z and x. Arguments as for
    `MADGRAD`, with eps 0 by default; sparse gradients are refused, since ν changes everywhere.
    compact=True keeps about 2 bytes of state per parameter instead of 8.
    """

    _rule = rule.MIRROR_MADGRAD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        momentum: float | Tensor = 0.9,
        weight_decay: float = 0.0,
        eps: float = 0.0,
        **flags: Unpack[Flags],
    ) -> None:
        super().__init__(params, lr, momentum, weight_decay, eps, **flags)
