"""Every method in the paper's derivation of MADGRAD: dual averaging with three choices.

    s_{k+1} = s_k + λ_k g_k                          weights λ
    z_{k+1} = centre - s_{k+1} / (d_{k+1} + ε)       denominator d
    x_{k+1} = (1 - c_{k+1}) x_k + c_{k+1} z_{k+1}    averaging c

`MADGRADW`, which is ours and not the paper's, is mirror descent: there s_{k+1} is
s_k + λ_k g_k / (d_{k+1} + ε), and z_{k+1} is centre - s_{k+1}.

Written to be read beside the paper, not for speed: train with `cubegrad.MADGRAD` or
`cubegrad.MADGRADW`. docs/algorithm.md follows the derivation class by class.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cubegrad.family import checks
from cubegrad.family.choices import (
    AVERAGING,
    CHOICES,
    DENOMINATORS,
    SQUARE_WEIGHTS,
    WEIGHTS,
    Group,
    Sums,
)
from cubegrad.state import layout, state_dicts

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Choices(TypedDict, total=False):
    """The options of every method besides `params` and `lr`; the classes differ in defaults."""

    weights: Literal["one", "lr", "power"]
    power: float  # p of γ_k (k+1)^p
    denominator: Literal[
        "one",
        "sqrt_step",
        "unweighted",
        "weighted",
        "weighted_numerator",
        "mean",
        "cube_root",
        "theory",
    ]
    grad_bound: float | Tensor | None  # G, or one G per coordinate, of denominator "theory"
    averaging: Literal["none", "constant", "uniform", "theory", "polynomial"]
    momentum: float  # 1 - c of averaging "constant"
    r: float  # of averaging "polynomial", c_k = (r+1)/(k+j+r)
    j: float
    centre: Literal["x0", "origin"]  # where the proximal function is 0
    mirror: bool  # divide each λ_i g_i by its own d_{i+1} + ε, and not their sum by the newest
    holds: bool  # a coordinate of x moves only where that goes down by the newest gradient
    eps: float
    weight_decay: float  # added to the gradient as weight_decay · x
    decoupled_weight_decay: bool  # or: x and z shrink by 1 - lr · weight_decay
    maximize: bool


class DualAveraging(Optimizer):
    """A dual averaging method built from three choices; each subclass is a method.

    Each parameter counts its own steps, and its x_0 is its value at its own first step. The state
    is the same for all methods: the sum of the gradients, that of their squares, that of the
    squares' weights, the centre and the step count, in float32 for half-precision parameters.
    """

    choices: ClassVar[Choices] = {}

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-2, **chosen: Unpack[Choices]
    ) -> None:
        defaults: Group = {
            "lr": lr,
            "weights": "power",
            "power": 0.5,
            "denominator": "cube_root",
            "grad_bound": None,
            "averaging": "constant",
            "momentum": 0.9,
            "r": 0.5,
            "j": 1.0,
            "centre": "x0",
            "mirror": False,
            "holds": False,
            "eps": 0.0,
            "weight_decay": 0.0,
            "decoupled_weight_decay": False,
            "maximize": False,
        }
        unknown = sorted(chosen.keys() - defaults.keys())
        if unknown:
            raise TypeError(f"unknown options {unknown}; a method takes {', '.join(defaults)}")
        defaults |= self.choices | chosen
        checks.check_options(defaults, CHOICES)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            checks.check_group(param_group, CHOICES)
        except Exception:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # a separate loop: if one group is refused, none changes
            checks.check_group(group, CHOICES)
            checks.check_dense(group)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._update(group, param, param.grad)
        return loss

    def _update(self, group: Group, param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if "step" not in state:  # not `if not state`: a wrapper may have added entries of its own
            state.update(_initial_state(group, param))
        k = int(state["step"])
        x, grad = (tensor.to(layout.state_dtype(param)) for tensor in (param, grad))
        if group["maximize"]:
            grad = -grad
        if group["decoupled_weight_decay"]:
            shrink = 1 - float(group["lr"]) * float(group["weight_decay"])
            x = x * shrink
            state["centre"] *= shrink  # and so z
            state["grad_sum"] *= shrink
        elif group["weight_decay"]:
            grad = grad + x * group["weight_decay"]
        denominator = self._denominator(group, state, k, grad)  # d_{k+1} + ε
        step = grad * WEIGHTS[group["weights"]](group, k)  # λ_k g_k
        if group["mirror"]:
            state["grad_sum"] += step * _inverse(denominator)
            dual_point = state["centre"] - state["grad_sum"]
        else:
            state["grad_sum"] += step  # s_{k+1} = s_k + λ_k g_k
            # z_{k+1} = centre - s_{k+1} / (d_{k+1} + ε)
            dual_point = state["centre"] - state["grad_sum"] * _inverse(denominator)
        c = AVERAGING[group["averaging"]](group, k + 1)  # c_{k+1}
        new_x = x - (x - dual_point) * c  # x_{k+1} = (1 - c_{k+1}) x_k + c_{k+1} z_{k+1}
        if group["holds"] and c < 1:  # where c is 1, x is z
            new_x = torch.where((dual_point - x) * grad.sign() < 0, new_x, x)
        param.copy_(new_x)
        state["step"] += 1

    def _denominator(self, group: Group, state: dict[str, Tensor], k: int, grad: Tensor) -> Tensor:
        name = group["denominator"]
        weight = SQUARE_WEIGHTS.get(name, WEIGHTS[group["weights"]])(group, k)
        grad_sq_sum = state["grad_sq_sum"].add_(grad * weight * grad)  # ν_{k+1} = ν_k + λ_k g_k²
        weight_sum = state["weight_sum"].add_(weight).item()  # Λ_{k+1} = Λ_k + λ_k
        denominator = DENOMINATORS[name](group, Sums(k, grad_sq_sum, weight_sum))
        return denominator + float(group["eps"])

    def state_dict(self) -> dict[str, Any]:
        """As torch's, in plain dicts, so that `torch.load(weights_only=True)` reads it."""
        return state_dicts.plain(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if any part of it does not fit, raise and change nothing.

        torch's own method would cast the buffers of a half-precision parameter to its dtype.
        Entries that a wrapper added to the state are kept, moved to the parameter's device.
        """
        state_dict = copy(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state, groups = checks.checked_copies(self.param_groups, state_dict, CHOICES)
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class DA(DualAveraging):
    """Dual averaging: x_{k+1} = x_0 - ∑ γ_i g_i / √(k+1). The paper's, with λ_k = 1, has lr=1."""

    choices: ClassVar[Choices] = {"weights": "lr", "denominator": "sqrt_step", "averaging": "none"}


class WeightedDA(DualAveraging):
    """DA with λ_i = γ_i √(i+1), so that the newest gradient is scaled by γ_k, as in SGD."""

    choices: ClassVar[Choices] = {"denominator": "sqrt_step", "averaging": "none"}


class AdaGradDA(DualAveraging):
    """AdaGrad in its dual averaging form: x_{k+1} = x_0 - ∑ γ_i g_i / √(∑ γ_i g_i²)."""

    choices: ClassVar[Choices] = {"weights": "lr", "denominator": "unweighted", "averaging": "none"}


class UnweightedDenominator(DualAveraging):
    """Rejected by the paper: x_{k+1} = x_0 - ∑ λ_i g_i / √(∑ γ_i g_i²).

    Its bound does not benefit from the weights λ.
    """

    choices: ClassVar[Choices] = {"denominator": "unweighted", "averaging": "none"}


class WeightedDenominator(DualAveraging):
    """Rejected by the paper: x_{k+1} = x_0 - ∑ λ_i g_i / √(∑ λ_i g_i²).

    Its effective step size falls as k^{-1/4}.
    """

    choices: ClassVar[Choices] = {"denominator": "weighted", "averaging": "none"}


class WeightedNumerator(DualAveraging):
    """Rejected by the paper: the weights of Zou et al., d = √(k+1) √(∑ λ_i g_i² / ∑ λ_i).

    The paper prints their descent step but not a dual averaging form; here the same factor is
    applied to ∑ λ_i g_i. γ cancels from d: after γ drops, d still grows as √(k+1) while the sum
    hardly grows, so x is drawn back to x_0.
    """

    choices: ClassVar[Choices] = {"denominator": "weighted_numerator", "averaging": "none"}


class MADGRAD(DualAveraging):
    """Algorithm 1: d = ∛(∑ λ_i g_i²), x a moving average of z. Equal to `cubegrad.MADGRAD`."""

    choices: ClassVar[Choices] = {"eps": 1e-6}


class TheoreticalMADGRAD(DualAveraging):
    """The method of the theorems: d = ∛(λ_{k+1} G² + ν_{k+1}) and c_k = (3/2)/(k+3/2).

    `grad_bound` is G. `lr` is constant; `theory.optimal_lr` gives the theorem's.
    """

    choices: ClassVar[Choices] = {"denominator": "theory", "averaging": "theory"}


class MADGRADW(DualAveraging):
    """Ours: z_{k+1} = z_k - γ_k g_k / √(∑ w_i g_i² / ∑ w_i), with weights w_i of nearly √(i+1).

    x is a moving average of z, and held where z lies uphill by the newest gradient. With
    decoupled_weight_decay=True it equals `cubegrad.MADGRADW`.
    """

    choices: ClassVar[Choices] = {
        "weights": "lr",
        "denominator": "mean",
        "mirror": True,
        "holds": True,
        "eps": 1e-8,
    }


class InlineAveragedSGD(DualAveraging):
    """SGD with momentum as inline averaging: z_{k+1} = z_k - η_k g_k, where η is `lr`.

    Equal to m_{k+1} = β_k m_k + g_k, x_{k+1} = x_k - α_k m_{k+1} for

        α_k = c_{k+1} η_k        β_k = (1 - c_k) η_{k-1} / η_k

    (since x_k - x_{k-1} = c_k/(1-c_k) (z_k - x_k)). With constant η and c = 1 - β,
    `InlineAveragedSGD(lr=η, momentum=β)` is `torch.optim.SGD(lr=(1-β)η, momentum=β)`.
    """

    choices: ClassVar[Choices] = {"weights": "lr", "denominator": "one"}


def _inverse(denominator: Tensor) -> Tensor:
    """1/d, or 0 where d is 0: such a coordinate has not left the centre."""
    inverse = 1 / denominator
    return inverse.masked_fill(inverse.isinf(), 0.0)


def _initial_state(group: Group, param: Tensor) -> dict[str, Tensor]:
    start = param.to(layout.state_dtype(param), copy=True)
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "weight_sum": torch.zeros((), dtype=torch.float64),
        "grad_sum": torch.zeros_like(start),
        "grad_sq_sum": torch.zeros_like(start),
        "centre": start if group["centre"] == "x0" else torch.zeros_like(start),
    }
