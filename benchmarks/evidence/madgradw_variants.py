"""MADGRADW with each of its choices made differently, for `madgradw_choices.py`."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from cubegrad.study.methods import METHODS, Method

Params = Any


class Variant(Optimizer):
    """The defaults are MADGRADW's.

    Args:
        q: newer squares weigh (k+1)^q; "schedule" weighs them by λ_k = γ_k √(k+1).
        holds: "held", "scaled" (by the inverse of the part that is not held, tensor by tensor),
            "dropped" (where x is held, z is set back to it) or "free".
        factor: on the step, not on the decay.
        decays: "both" x and z, "z" alone, or "agreeing": where the decay goes the way of x - z.
        eps_inside: √(ν + ε) instead of √ν + ε.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        momentum: float = 0.9,
        eps: float = 1e-8,
        q: float | str = 0.5,
        holds: str = "held",
        factor: float = 1.0,
        decays: str = "both",
        eps_inside: bool = False,
    ) -> None:
        self.q, self.holds, self.factor = q, holds, factor
        self.decays, self.eps_inside = decays, eps_inside
        self.steps, self.weights = 0, 0.0
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        newest = self._newest()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step(group, params, [param.grad for param in params], newest)

    def _newest(self) -> float:
        """a_k: what the newest square weighs in the mean."""
        k = self.steps
        self.steps += 1
        if not isinstance(self.q, str):
            return (self.q + 1) / (k + self.q + 1)
        weight = self.param_groups[0]["lr"] * (k + 1) ** 0.5
        self.weights += weight
        return weight / self.weights if weight else 0.0

    def _step(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], newest: float
    ) -> None:
        points, squares = self._state(params)
        shrink = 1 - group["lr"] * group["weight_decay"]
        torch._foreach_mul_(squares, 1 - newest)
        torch._foreach_addcmul_(squares, grads, grads, newest)
        inside = torch._foreach_add(squares, group["eps"]) if self.eps_inside else squares
        roots = list(torch._foreach_sqrt(inside))
        if not self.eps_inside:
            torch._foreach_add_(roots, group["eps"])
        self._decay(params, points, shrink)
        torch._foreach_addcdiv_(points, grads, roots, -group["lr"] * self.factor)
        ahead = list(torch._foreach_sub(points, params))  # z - x
        if group["momentum"] and self.holds != "free":
            follows = self._follows(ahead, grads)
            if self.holds == "dropped":  # z = x + what is left
                torch._foreach_copy_(points, torch._foreach_addcmul(params, ahead, follows))
            torch._foreach_mul_(ahead, follows)
        torch._foreach_add_(params, ahead, alpha=1 - group["momentum"])

    def _state(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        for param in params:
            if not self.state[param]:
                self.state[param] = {"z": param.clone(), "square": torch.zeros_like(param)}
        states = [self.state[param] for param in params]
        return [own["z"] for own in states], [own["square"] for own in states]

    def _decay(self, params: list[Tensor], points: list[Tensor], shrink: float) -> None:
        if self.decays == "agreeing":
            ahead = list(torch._foreach_sub(points, params))
            agree = self._follows(ahead, params)
            factors = list(torch._foreach_mul(agree, shrink - 1))
            torch._foreach_add_(factors, 1.0)
            torch._foreach_mul_(params, factors)
            torch._foreach_mul_(points, factors)
            return
        torch._foreach_mul_(points, shrink)
        if self.decays == "both":
            torch._foreach_mul_(params, shrink)

    def _follows(self, ahead: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """1 where a move of x to z goes against `grads`, else 0."""
        signs = list(torch._foreach_sign(torch._foreach_mul(ahead, grads)))
        torch._foreach_clamp_max_(signs, 0.0)
        torch._foreach_neg_(signs)
        if self.holds == "scaled":
            shares = [sign.mean().clamp_min(1e-3).reciprocal() for sign in signs]
            torch._foreach_mul_(signs, shares)
        return signs


# By its name: what a table calls it, and what is changed.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "q0": ("q 0", {"q": 0.0}),
    "q1": ("q 1", {"q": 1.0}),
    "q3": ("q 3", {"q": 3.0}),
    "by-schedule": ("squares weighed by λ", {"q": "schedule"}),
    "free": ("not held", {"holds": "free"}),
    "scaled": ("held, the rest scaled up", {"holds": "scaled"}),
    "dropped": ("what is held is dropped", {"holds": "dropped"}),
    "m0.8": ("momentum 0.8", {"momentum": 0.8}),
    "m0.95": ("momentum 0.95", {"momentum": 0.95}),
    "x1.5": ("step × 1.5", {"factor": 1.5}),
    "x2": ("step × 2", {"factor": 2.0}),
    "decay-z": ("decay of z alone", {"decays": "z"}),
    "decay-agreeing": ("decay where it agrees", {"decays": "agreeing"}),
    "eps-inside": ("ε inside the root", {"eps_inside": True}),
}
COMBINED = ("m0.8+q3", "q3+x1.5", "m0.8+x1.5", "m0.8+q3+x1.5", "free+q3")
BASE = "madgradw"
PREFIX = "madgradw/"


def _method(name: str) -> Method:
    labels, changes = zip(*(CHANGES[part] for part in name.split("+")), strict=True)
    options = {key: value for change in changes for key, value in change.items()}
    make = partial(Variant, **options)
    return Method(", ".join(labels), make, (1e-4, 1e-2), like="adamw", decoupled=True)


METHODS.update({PREFIX + name: _method(name) for name in (*CHANGES, *COMBINED)})
METHODS["adamw/beta0.99"] = Method(
    "AdamW, β₂ 0.99", partial(AdamW, betas=(0.9, 0.99)), (1e-4, 1e-2), like="adamw", decoupled=True
)
