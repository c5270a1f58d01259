"""DoG and L-DoG, "DoG is SGD's Best Friend" (arXiv 2302.12022), with the averaging of its paper.

Written from the paper, as the package dog-optimizer cannot take part in the study: it fails if a
parameter has no gradient, resumed on a GPU it moves L-DoG's distances to the CPU, and the host
waits for the device at every tensor of a step. The tests compare the two.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

GAMMA = 8.0  # of the average, as in the paper's experiments
EPS = 1e-8  # added to the sum of squared gradients


class DoG(Optimizer):
    """SGD with the rate max ‖x_i − x_0‖ / √(Σ ‖g_i‖²), over all parameters or over each alone.

    `eval()` puts the averaged weights into the parameters, `train()` takes them out again.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1.0,  # a factor
        weight_decay: float = 0.0,
        first_distance: float = 1e-6,  # times 1 + ‖x_0‖
        layerwise: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "first_distance": first_distance,
                "layerwise": layerwise,
                "steps": 0,
                "averaged": False,  # whether the parameters hold the average
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["averaged"] for group in self.param_groups):
            raise RuntimeError("the parameters hold the average; call train() before step()")
        for group in self.param_groups:
            if any(param.grad is not None for param in group["params"]):
                self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params = group["params"]
        if not group["steps"]:
            self._start(group)
        grads = [_gradient(param, group["weight_decay"]) for param in params]
        starts, averages = ([self.state[p][name] for p in params] for name in ("start", "average"))
        sums = self.state[params[0]]
        moved = self._norms(group, torch._foreach_sub(params, starts))
        torch.maximum(sums["distance"], moved, out=sums["distance"])
        sums["squares"] += self._norms(group, grads) ** 2  # Σ ‖g_i‖²
        rates = (group["lr"] * _rates(sums)).expand(len(params))
        for param, grad, rate in zip(params, grads, rates, strict=True):
            param.addcmul_(grad, rate, value=-1)
        group["steps"] += 1
        torch._foreach_lerp_(averages, params, (1 + GAMMA) / (group["steps"] + GAMMA))

    def _start(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            self.state[param] = {"start": param.clone(), "average": param.clone()}
        norms = self._norms(group, group["params"])
        # Beside the first parameter's state, so that torch loads them onto its device.
        self.state[group["params"][0]] |= {
            "distance": group["first_distance"] * (1 + norms),
            "squares": torch.full_like(norms, EPS),
        }

    def _norms(self, group: dict[str, Any], tensors: Sequence[Tensor]) -> Tensor:
        """One for each tensor, or a single one of all."""
        norms = torch.stack(torch._foreach_norm(list(tensors)))
        return norms if group["layerwise"] else norms.norm()[None]

    def estimated_lr(self) -> float:
        """The mean over the layers, before the factor; nan before the first step."""
        firsts = [self.state[group["params"][0]] for group in self.param_groups]
        rates = [_rates(sums) for sums in firsts if sums]
        return torch.cat(rates).mean().item() if rates else float("nan")

    def eval(self) -> None:
        self._swap(averaged=True)

    def train(self) -> None:
        self._swap(averaged=False)

    @torch.no_grad()
    def _swap(self, averaged: bool) -> None:
        for group in self.param_groups:
            if group["steps"] and group["averaged"] != averaged:
                for param in group["params"]:
                    other = self.state[param]["average"]
                    now = param.clone()
                    param.copy_(other)
                    other.copy_(now)
                group["averaged"] = averaged


def _rates(sums: dict[str, Tensor]) -> Tensor:
    return sums["distance"] / sums["squares"].sqrt()


def _gradient(param: Tensor, decay: float) -> Tensor:
    if param.grad is None:
        return torch.zeros_like(param)
    return param.grad.add(param, alpha=decay) if decay else param.grad
