"""Every method of the paper's derivation, as dual averaging with three choices.

    s_{k+1} = s_k + λ_k g_k                          the weights λ
    z_{k+1} = centre - s_{k+1} / (d_{k+1} + ε)       the denominator d
    x_{k+1} = (1 - c_{k+1}) x_k + c_{k+1} z_{k+1}    the averaging c

Written to be read beside the paper, not for speed: `cubegrad.MADGRAD` is the one to train with.
docs/algorithm.md follows the derivation from class to class.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cubegrad import options
from cubegrad.family import checks
from cubegrad.family.checks import state_dtype
from cubegrad.state import state_dicts

Group = dict[str, Any]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# λ_k, of a group's options and of k, counted from 0.
WEIGHTS: dict[str, Callable[[Group, int], float]] = {
    "one": lambda _, __: 1.0,  # 1
    "lr": lambda o, _: float(o["lr"]),  # γ_k
    "power": lambda o, k: float(o["lr"]) * (k + 1) ** float(o["power"]),  # γ_k (k+1)^p
}

# c_k, the share of z_k in x_k, for k = 1, 2, …
AVERAGING: dict[str, Callable[[Group, int], float]] = {
    "none": lambda _, __: 1.0,  # x is z
    "constant": lambda o, _: 1 - float(o["momentum"]),  # c
    "uniform": lambda _, k: 1 / k,  # c_{k+1} = 1/(k+1): x is the mean of z_1 … z_k
    "theory": lambda _, k: 1.5 / (k + 1.5),  # (3/2)/(k+3/2)
    "polynomial": lambda o, k: (o["r"] + 1) / (k + o["j"] + o["r"]),  # (r+1)/(k+j+r)
}


class Sums(NamedTuple):
    """What a denominator is made of after step k."""

    k: int
    nu: Tensor  # ν_{k+1} = ∑ λ_i g_i², or ∑ γ_i g_i² for "unweighted"
    total: float  # Λ_{k+1} = ∑ λ_i


def _over_total(t: Sums) -> float:
    return (t.k + 1) / t.total if t.total else 0.0  # (k+1) / Λ_{k+1}; without weights ν is 0 too


def _next_bound(o: Group, t: Sums) -> Tensor:
    """λ_{k+1} G². The theory has one γ; under a schedule γ_k stands in for γ_{k+1}."""
    return WEIGHTS[o["weights"]](o, t.k + 1) * torch.as_tensor(o["grad_bound"]).to(t.nu) ** 2


# d_{k+1}
DENOMINATORS: dict[str, Callable[[Group, Sums], Tensor]] = {
    "one": lambda _, t: torch.ones_like(t.nu),  # 1
    "sqrt_step": lambda _, t: torch.full_like(t.nu, (t.k + 1) ** 0.5),  # β_{k+1} = √(k+1)
    "unweighted": lambda _, t: t.nu.sqrt(),  # √(∑ γ_i g_i²)
    "weighted": lambda _, t: t.nu.sqrt(),  # √(∑ λ_i g_i²)
    "weighted_numerator": lambda _, t: (t.nu * _over_total(t)).sqrt(),  # √(k+1) √(ν/Λ)
    "cube_root": lambda _, t: t.nu ** (1 / 3),  # ∛(∑ λ_i g_i²)
    "theory": lambda o, t: (_next_bound(o, t) + t.nu) ** (1 / 3),  # ∛(λ_{k+1} G² + ν)
}

CHOICES = {
    "weights": tuple(WEIGHTS),
    "denominator": tuple(DENOMINATORS),
    "averaging": tuple(AVERAGING),
    "centre": ("x0", "origin"),
}


class Choices(TypedDict, total=False):
    """What every method takes beside `params` and `lr`; the named ones change the defaults."""

    weights: Literal["one", "lr", "power"]
    power: float  # p of γ_k (k+1)^p
    denominator: Literal[
        "one", "sqrt_step", "unweighted", "weighted", "weighted_numerator", "cube_root", "theory"
    ]
    grad_bound: float | Tensor | None  # G, or one G per coordinate, of denominator "theory"
    averaging: Literal["none", "constant", "uniform", "theory", "polynomial"]
    momentum: float  # 1 - c of averaging "constant"
    r: float  # of averaging "polynomial"
    j: float
    centre: Literal["x0", "origin"]  # where the proximal function is 0
    eps: float
    weight_decay: float  # coupled: g + wd·x
    maximize: bool


class DualAveraging(Optimizer):
    """A dual averaging method from its three choices; each class below is one of the paper's.

    Each parameter counts its own steps and starts from its value at its own first step. The state
    is the same for all: the sums ∑ λ_i g_i and ∑ λ_i g_i², ∑ λ_i, the centre and the count, in
    float32 for half-precision parameters.
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
            "eps": 0.0,
            "weight_decay": 0.0,
            "maximize": False,
        }
        unknown = sorted(chosen.keys() - defaults.keys())
        if unknown:
            raise TypeError(f"unknown options {unknown}; a method takes {', '.join(defaults)}")
        defaults |= self.choices | chosen
        options.check_family(defaults, CHOICES)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            options.check_family(param_group, CHOICES)
            checks.check_params(param_group)
        except Exception:
            self.param_groups.pop()
            raise

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
        for group in self.param_groups:  # all that can be refused, before anything changes
            options.check_family(group, CHOICES)
            checks.check_params(group)
            checks.refuse_sparse(group)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._update(group, param, param.grad)
        return loss

    def _update(self, group: Group, param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if "step" not in state:  # a wrapper may have put something there before
            state.update(_fresh_state(group, param))
        k = int(state["step"])
        x, grad = (tensor.to(state_dtype(param)) for tensor in (param, grad))
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"]:
            grad = grad + x * group["weight_decay"]
        weight = WEIGHTS[group["weights"]](group, k)  # λ_k
        square_weight = float(group["lr"]) if group["denominator"] == "unweighted" else weight
        s = state["grad_sum"].add_(grad * weight)  # s_{k+1} = s_k + λ_k g_k
        nu = state["grad_sq_sum"].add_(grad * square_weight * grad)  # ν_{k+1} = ν_k + λ_k g_k²
        total = state["weight_sum"].add_(weight).item()  # Λ_{k+1} = Λ_k + λ_k
        d = DENOMINATORS[group["denominator"]](group, Sums(k, nu, total)) + group["eps"]
        z = state["centre"] - s * _inverse(d)  # z_{k+1} = centre - s_{k+1} / (d_{k+1} + ε)
        c = AVERAGING[group["averaging"]](group, k + 1)  # c_{k+1}
        param.copy_(x - (x - z) * c)  # x_{k+1} = (1 - c_{k+1}) x_k + c_{k+1} z_{k+1}
        state["step"] += 1

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with plain dicts, which `torch.load(weights_only=True)` reads."""
        return state_dicts.plain(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict whole or not at all.

        torch's own method would cast the buffers of a half-precision parameter to its dtype.
        What a wrapper has added to the state comes along, moved to the parameter's device.
        """
        state_dict = copy(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state, groups = checks.loaded(self.param_groups, state_dict, CHOICES)
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class DA(DualAveraging):
    """Dual averaging: x_{k+1} = x_0 - ∑ γ_i g_i / √(k+1). At lr=1 the paper's, with λ_k = 1."""

    choices: ClassVar[Choices] = {
        "weights": "lr",
        "denominator": "sqrt_step",
        "averaging": "none",
    }


class WeightedDA(DualAveraging):
    """DA with λ_i = γ_i √(i+1): the newest gradient's step is γ_k, as SGD's."""

    choices: ClassVar[Choices] = {"denominator": "sqrt_step", "averaging": "none"}


class AdaGradDA(DualAveraging):
    """AdaGrad, dual averaging form: x_{k+1} = x_0 - ∑ γ_i g_i / √(∑ γ_i g_i²)."""

    choices: ClassVar[Choices] = {
        "weights": "lr",
        "denominator": "unweighted",
        "averaging": "none",
    }


class UnweightedDenominator(DualAveraging):
    """Rejected: x_{k+1} = x_0 - ∑ λ_i g_i / √(∑ γ_i g_i²). Its bound gains nothing from λ."""

    choices: ClassVar[Choices] = {"denominator": "unweighted", "averaging": "none"}


class WeightedDenominator(DualAveraging):
    """Rejected: x_{k+1} = x_0 - ∑ λ_i g_i / √(∑ λ_i g_i²). Its effective step falls as k^{-1/4}."""

    choices: ClassVar[Choices] = {"denominator": "weighted", "averaging": "none"}


class WeightedNumerator(DualAveraging):
    """Rejected: the weights of Zou et al., d = √(k+1) √(∑ λ_i g_i² / ∑ λ_i).

    The paper prints their descent step and leaves open how to make it dual averaging; this is the
    same factor on ∑ λ_i g_i. γ cancels within d, so when γ falls d grows on as √(k+1), the sum
    does not follow, and x is drawn back to x_0.
    """

    choices: ClassVar[Choices] = {"denominator": "weighted_numerator", "averaging": "none"}


class MADGRAD(DualAveraging):
    """Algorithm 1: d = ∛(∑ λ_i g_i²), and x a moving average of z. Equal to `cubegrad.MADGRAD`."""

    choices: ClassVar[Choices] = {"eps": 1e-6}


class TheoreticalMADGRAD(DualAveraging):
    """What the theorems are about: d = ∛(λ_{k+1} G² + ν_{k+1}) and c_k = (3/2)/(k+3/2).

    `grad_bound` is G, and `lr` a constant: `theory.optimal_lr` has the theorem's.
    """

    choices: ClassVar[Choices] = {"denominator": "theory", "averaging": "theory"}


class InlineAveragedSGD(DualAveraging):
    """SGD with momentum as inline averaging: z_{k+1} = z_k - η_k g_k, with η the `lr`.

    Equal to m_{k+1} = β_k m_k + g_k, x_{k+1} = x_k - α_k m_{k+1} for

        α_k = c_{k+1} η_k        β_k = (1 - c_k) η_{k-1} / η_k

    (x_k - x_{k-1} is c_k/(1-c_k) (z_k - x_k); put z_{k+1} into the average.) With constants,
    `InlineAveragedSGD(lr=η, momentum=β)` is `torch.optim.SGD(lr=(1-β)η, momentum=β)`.
    """

    choices: ClassVar[Choices] = {"weights": "lr", "denominator": "one"}


def _inverse(d: Tensor) -> Tensor:
    """1/d, or 0 where d is 0: such a coordinate has not left the centre."""
    inverse = 1 / d
    return inverse.masked_fill(inverse.isinf(), 0.0)


def _fresh_state(group: Group, param: Tensor) -> dict[str, Tensor]:
    start = param.to(state_dtype(param), copy=True)
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "weight_sum": torch.zeros((), dtype=torch.float64),
        "grad_sum": torch.zeros_like(start),
        "grad_sq_sum": torch.zeros_like(start),
        "centre": start if group["centre"] == "x0" else torch.zeros_like(start),
    }
