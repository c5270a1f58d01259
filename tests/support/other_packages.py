"""Optimizers of other MADGRAD packages, as cubegrad.interop meets them."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from short_runs import cloned
from torch import Tensor

import cubegrad
from cubegrad.interop import convert

LR, EPS = 0.05, 1e-3  # an eps that shows wherever it is added
MIRROR, FLAGLESS = "madgrad, mirror", "madgrad, no flag"
FLAGS = {
    "madgrad": "decouple_decay",
    MIRROR: "decouple_decay",
    "timm": "decoupled_decay",
    "pytorch_optimizer": "weight_decouple",
}
LAYOUTS = [*FLAGS, FLAGLESS]
INSTALLED = [layout for layout in LAYOUTS if layout != "timm"]  # timm needs torchvision


class Simulated:
    """What the packages compute, in float64, and the state dict that each makes of it.

    They add eps to the learning rate, and all but timm count steps for all parameters together.
    """

    def __init__(self, layout: str, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        self.layout, self.params, self.k = layout, tensors(0), 0
        self.runs: dict[int, Any] = {}
        self.group: dict[str, Any] = {"lr": LR, "eps": EPS, "momentum": momentum}
        self.group |= {"weight_decay": weight_decay, "params": [0, 1]}
        if layout in FLAGS:
            self.group[FLAGS[layout]] = False
        if layout == "pytorch_optimizer":
            self.group |= {"foreach": None, "step": 0}

    def step(self, grads: list[Tensor | None]) -> None:
        names = ("lr", "eps", "momentum", "weight_decay")
        o = oracle.Settings(**{name: float(self.group[name]) for name in names})
        if o.lr or self.layout == "timm":
            o = replace(o, lr=o.lr + EPS)
        method = oracle.MirrorMadgrad if self.layout == MIRROR else oracle.Madgrad
        for index, grad in enumerate(grads):
            if grad is not None:
                run = self.runs.setdefault(index, method(self.params[index].numpy()))
                if self.layout != "timm":
                    run.k = self.k
                run.step(grad.numpy(), o)
                self.params[index] = torch.from_numpy(run.x)
        self.k += 1

    def state_dict(self) -> dict[str, Any]:
        names = {"z": "z"} if self.layout == MIRROR else {"s": "s"}
        names |= {"nu": "grad_sum_sq"}
        if self.layout != MIRROR and self.group["momentum"]:
            names["x0"] = "x0"
        state: dict[Any, Any] = {
            index: {name: torch.from_numpy(getattr(run, ours)) for ours, name in names.items()}
            for index, run in self.runs.items()
        }
        if self.layout == "timm":
            for index, run in self.runs.items():
                state[index]["step"] = run.k
        elif self.k:
            state["k"] = torch.tensor([self.k])
        return deepcopy({"state": state, "param_groups": [self.group]})


class Real:
    """The package itself, where it is installed."""

    def __init__(
        self, layout: str, momentum: float = 0.9, weight_decay: float = 0.0, **options: Any
    ) -> None:
        self.params = [torch.nn.Parameter(x) for x in tensors(0)]
        options = {"lr": LR, "momentum": momentum, "weight_decay": weight_decay} | options
        self.optimizer = package_class(layout)(self.params, eps=EPS, **options)
        self.state_dict, self.group = self.optimizer.state_dict, self.optimizer.param_groups[0]
        if layout == FLAGLESS:
            del self.group["decouple_decay"]

    def step(self, grads: list[Tensor | None]) -> None:
        step(self.optimizer, self.params, grads)


def package_class(layout: str) -> Any:
    module = pytest.importorskip(layout.split(",")[0], exc_type=ImportError)
    return module.MirrorMADGRAD if layout == MIRROR else module.MADGRAD


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in [(3, 4), (5,)]]


def step(optimizer: Any, params: list[Any], grads: list[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def saved(layout: str = "madgrad", **options: Any) -> dict[str, Any]:
    """The state dict of a package after three steps."""
    peer = Simulated(layout, **options)
    for k in range(3):
        peer.step(tensors(k + 1))
    return peer.state_dict()


def continued(
    state_dict: dict[str, Any], params: list[Tensor], layout: str = "madgrad", **flags: Any
) -> tuple[Any, list[torch.nn.Parameter]]:
    """cubegrad, built with settings that the checkpoint must replace."""
    params = cloned(params)
    optimizer = cubegrad.MirrorMADGRAD if layout == MIRROR else cubegrad.MADGRAD
    optimizer = optimizer(params, lr=0.7, momentum=0.3, weight_decay=0.2, eps=0.1, **flags)
    optimizer.load_state_dict(convert(state_dict))
    return optimizer, params
