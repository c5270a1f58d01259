"""What torch's tests need of an optimizer: the ways to build each of ours, and to run it."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD


class EstimatedMADGRAD(MADGRAD):
    """MADGRAD with lr="auto" by default."""

    def __init__(self, params: Any, lr: Any = "auto", **options: Any) -> None:
        super().__init__(params, lr, **options)


# Without foreach, fused and differentiable: the tests combine these with IMPLEMENTATIONS.
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no momentum": {"momentum": 0.0},
    "l2": {"weight_decay": 0.1},
    "maximize": {"weight_decay": 0.1, "maximize": True},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "decoupled lr": {"weight_decay": 1e-3, "decoupled_lr": True},
    "capturable": {"capturable": True},
    "compact": {"compact": True},
    "stochastic rounding": {"stochastic_rounding": True},
}
WITH_LR: dict[str, dict[str, Any]] = {
    "large lr": {"lr": 0.05},
    "tensors": {"lr": torch.tensor(0.01), "momentum": torch.tensor(0.9)},
    "capturable tensors": {"lr": torch.tensor(0.01), "capturable": True},
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "forloop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class Case:
    """One way to build an optimizer."""

    cls: type[MADGRAD] | type[MirrorMADGRAD] | type[MADGRADW]
    config: str
    implementation: str

    def __str__(self) -> str:
        return f"{self.cls.__name__}-{self.config}-{self.implementation}"

    @property
    def options(self) -> dict[str, Any]:
        """A copy, since a scheduler writes into a tensor lr."""
        config = (CONFIGS | WITH_LR)[self.config]
        return copy.deepcopy(config) | IMPLEMENTATIONS[self.implementation]

    def build(self, params: Any, **others: Any) -> Any:
        return self.cls(params, **self.options | others)

    @property
    def maximize(self) -> bool:
        return bool(self.options.get("maximize"))


CLASSES = (MADGRAD, MirrorMADGRAD, MADGRADW, EstimatedMADGRAD)
CASES = [
    Case(cls, config, implementation)
    for cls in CLASSES
    for config in (CONFIGS if cls is EstimatedMADGRAD else CONFIGS | WITH_LR)
    for implementation in IMPLEMENTATIONS
]
DEFAULTS = [case for case in CASES if case.config == "default"]

each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_default = pytest.mark.parametrize("case", DEFAULTS, ids=str)
each_class = pytest.mark.parametrize("cls", CLASSES)


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)


def line(contiguous: bool = True) -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    """A weight, a bias and an input, of which `line_loss` is a convex function."""
    generator = torch.Generator().manual_seed(3)

    def values(*shape: int) -> Tensor:
        wide = torch.randn((*shape, 2), generator=generator)
        return wide[..., 0].contiguous() if contiguous else wide[..., 0]

    return nn.Parameter(values(10, 5)), nn.Parameter(values(10)), values(5)


def line_loss(weight: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
    return (weight.mv(inputs) + bias).square().sum()
