"""Every method in the paper's derivation of MADGRAD: dual averaging with three choices.

    s_{k+1} = s_k + λ_k g_k                          weights λ
    z_{k+1} = centre - s_{k+1} / (d_{k+1} + ε)       denominator d
    x_{k+1} = (1 - c_{k+1}) x_k + c_{k+1} z_{k+1}    averaging c

Written to be read beside the paper, not for speed: train with `cubegrad.MADGRAD`.
docs/algorithm.md follows the derivation class by class.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from cubegrad.family import checks
from cubegrad.state import layout, state_dicts

Group = dict[str, Any]
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

# λ_k for k = 0, 1, …
WEIGHTS: dict[str, Callable[[Group, int], float]] = {
    "one": lambda _, __: 1.0,  # 1
    "lr": lambda group, _: float(group["lr"]),  # γ_k
    "power": lambda group, k: float(group["lr"]) * (k + 1) ** float(group["power"]),  # γ_k (k+1)^p
}

# c_k for k = 1, 2, …
AVERAGING: dict[str, Callable[[Group, int], float]] = {
    "none": lambda _, __: 1.0,  # x_k = z_k
    "constant": lambda group, _: 1 - float(group["momentum"]),  # c
    "uniform": lambda _, k: 1 / k,  # x_k is the mean of z_1 … z_k
    "theory": lambda _, k: 1.5 / (k + 1.5),  # (3/2)/(k+3/2)
    "polynomial": lambda group, k: (group["r"] + 1) / (k + group["j"] + group["r"]),
}


class Sums(NamedTuple):
    """The sums after step k, which a denominator is computed from."""

    k: int
    grad_sq_sum: Tensor  # ν_{k+1} = ∑ λ_i g_i², or ∑ γ_i g_i² for "unweighted"
    weight_sum: float  # Λ_{k+1} = ∑ λ_i


def _weighted_numerator(_: Group, sums: Sums) -> Tensor:
    scale = (sums.k + 1) / sums.weight_sum if sums.weight_sum else 0.0  # if Λ is 0, so is ν
    return (sums.grad_sq_sum * scale).sqrt()


def _theory(group: Group, sums: Sums) -> Tensor:
    """∛(λ_{k+1} G² + ν_{k+1}). The theory has a constant γ; under a schedule λ_{k+1} uses γ_k."""
    next_weight = WEIGHTS[group["weights"]](group, sums.k + 1)
    grad_bound = torch.as_tensor(group["grad_bound"]).to(sums.grad_sq_sum)
    return (next_weight * grad_bound**2 + sums.grad_sq_sum) ** (1 / 3)


# d_{k+1}
DENOMINATORS: dict[str, Callable[[Group, Sums], Tensor]] = {
    "one": lambda _, sums: torch.ones_like(sums.grad_sq_sum),  # 1
    "sqrt_step": lambda _, sums: torch.full_like(sums.grad_sq_sum, (sums.k + 1) ** 0.5),  # √(k+1)
    "unweighted": lambda _, sums: sums.grad_sq_sum.sqrt(),  # √(∑ γ_i g_i²)
    "weighted": lambda _, sums: sums.grad_sq_sum.sqrt(),  # √(∑ λ_i g_i²)
    "weighted_numerator": _weighted_numerator,  # √(k+1) √(∑ λ_i g_i² / ∑ λ_i)
    "cube_root": lambda _, sums: sums.grad_sq_sum ** (1 / 3),  # ∛(∑ λ_i g_i²)
    "theory": _theory,  # ∛(λ_{k+1} G² + ∑ λ_i g_i²)
}

CHOICES = {
    "weights": tuple(WEIGHTS),
    "denominator": tuple(DENOMINATORS),
    "averaging": tuple(AVERAGING),
    "centre": ("x0", "origin"),
}


class Choices(TypedDict, total=False):
    """The options of every method besides `params` and `lr`; the classes differ in defaults."""

    weights: Literal["one", "lr", "power"]
    power: float  # p of γ_k (k+1)^p
    denominator: Literal[
        "one", "sqrt_step", "unweighted", "weighted", "weighted_numerator", "cube_root", "theory"
    ]
    grad_bound: float | Tensor | None  # G, or one G per coordinate, of denominator "theory"
    averaging: Literal["none", "constant", "uniform", "theory", "polynomial"]
    momentum: float  # 1 - c of averaging "constant"
    r: float  # of averaging "polynomial", c_k = (r+1)/(k+j+r)
    j: float
    centre: Literal["x0", "origin"]  # where the proximal function is 0
    eps: float
    weight_decay: float  # coupled: added to the gradient as weight_decay · x
    maximize: bool


class DualAveraging(Optimizer):
    """A dual averaging method built from three choices; each subclass is a method of the paper.

    Each parameter counts its own steps, and its x_0 is its value at its own first step. The state
    is the same for all methods: ∑ λ_i g_i, ∑ λ_i g_i², ∑ λ_i, the centre and the step count, in
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
        if group["weight_decay"]:
            grad = grad + x * group["weight_decay"]
        weight = WEIGHTS[group["weights"]](group, k)  # λ_k
        square_weight = float(group["lr"]) if group["denominator"] == "unweighted" else weight
        grad_sum = state["grad_sum"].add_(grad * weight)  # s_{k+1} = s_k + λ_k g_k
        # ν_{k+1} = ν_k + λ_k g_k²
        grad_sq_sum = state["grad_sq_sum"].add_(grad * square_weight * grad)
        weight_sum = state["weight_sum"].add_(weight).item()  # Λ_{k+1} = Λ_k + λ_k
        sums = Sums(k, grad_sq_sum, weight_sum)
        denominator = DENOMINATORS[group["denominator"]](group, sums) + group["eps"]  # d_{k+1} + ε
        # z_{k+1} = centre - s_{k+1} / (d_{k+1} + ε)
        dual_point = state["centre"] - grad_sum * _inverse(denominator)
        c = AVERAGING[group["averaging"]](group, k + 1)  # c_{k+1}
        param.copy_(x - (x - dual_point) * c)  # x_{k+1} = (1 - c_{k+1}) x_k + c_{k+1} z_{k+1}
        state["step"] += 1

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
