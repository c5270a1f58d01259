"""Rules that choose MADGRAD's learning rate while it trains, as one optimizer with options.

Every candidate has lr = d^{3/2}/√H, times the schedule's factor f. They differ in how the distance
d and the size H of the gradients are estimated, and in where d starts.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOMENTUM, EPS = 0.9, 1e-6
# With a flat rate and independent gradients of one size, rms(u)/√k of MADGRAD is d/WALK.
WALK = math.sqrt(2) * (2 / 3) ** (1 / 3)


@dataclass(frozen=True)
class Parts:
    """The options of one candidate."""

    distance: str = "inner"  # or walk, both, drift, bet: see estimate()
    pace: float = 1.0  # κ, C or p of the estimate
    point: str = "x"  # or z, which does not lag behind
    norm: str = "l1"  # or A, quiet
    scale: str = "mean"  # H^{2/3} = mean ∛ν/(Σλ)^{1/3}; or max: the largest rms gradient
    start: float = 0.01  # d_0
    relative: bool = True  # in units of rms(x_0)
    growth: float = math.inf  # d grows at most by this factor per step
    alone: bool = False  # each tensor has its own d and H


CANDIDATES = {
    "distance": Parts(),  # d = max Σλ⟨g, x_0 − x⟩/‖s‖₁, d_0 = 0.01 rms(x_0)
    "distance-2": Parts(pace=2.0),  # d twice as large
    "distance-z": Parts(point="z"),  # with z in place of x
    "distance-A": Parts(norm="A"),  # with √(Σ s²/∛ν · Σ∛ν) in place of ‖s‖₁
    "distance-A-slow": Parts(norm="A", start=0.02, growth=1.02),
    "distance-0.02": Parts(start=0.02),  # d_0 = 0.02 rms(x_0)
    "distance-0.03": Parts(start=0.03),
    "distance-quiet": Parts(norm="quiet"),  # with Σ√(s² − ν Σλ²/Σλ): s minus its noise
    "distance-alone": Parts(alone=True),  # each tensor has its own d and H
    "distance-1e-4": Parts(start=1e-4, relative=False),
    "distance-1e-6": Parts(start=1e-6, relative=False),
    "distance-max": Parts(scale="max"),
    "first": Parts(scale="max", start=1e-6, relative=False),  # the first attempt
    "walk": Parts("walk"),  # d = max 1.24 rms(u)/√k
    "walk-1e-4": Parts("walk", start=1e-4, relative=False),
    "both": Parts("both"),  # the larger of distance and walk
    "drift-0.1": Parts("drift", 0.1),  # d = d_0 exp(max 0.1 Σ f ln T)
    "drift-0.03": Parts("drift", 0.03),
    "bet": Parts("bet"),  # d = d_0 exp(max 0.1 (Σfq)²/Σfq²)
}

Memory = dict[str, Any]
total = partial(torch.sum, dtype=torch.float64)
mean = partial(torch.mean, dtype=torch.float64)


def estimate(
    parts: Parts, m: Memory, f: float, weight: Tensor, products: Tensor, u: Tensor, root: Tensor
) -> Tensor:
    """d after a step of factor f and weight λ; `products` are g (x_0 − x), `root` is ∛ν."""
    match parts.distance:
        case "both":
            ways = (replace(parts, distance=way) for way in ("inner", "walk"))
            return torch.maximum(*(estimate(p, m, f, weight, products, u, root) for p in ways))
        case "inner":  # for convex f and κ = 1 at most ‖x_0 − x*‖_∞
            m["inner"] += weight * total(products)
            norm = total(m["s"].abs())
            if parts.norm == "A":
                norm = (total(m["s"].square() / (root + EPS)) * total(root)).sqrt()
            elif parts.norm == "quiet":  # Σλ²g², which is E s² if g is noise, is about ν Σλ²/Σλ
                noise = m["nu"] * (m["weight_sq"] / m["weight"])
                norm = total((m["s"].square() - noise).clamp(min=0).sqrt())
            return parts.pace * m["inner"] / norm.clamp(min=1e-300)
        case "walk":  # how far z moves per step if it is a random walk
            return parts.pace * WALK * mean(u.square()).sqrt() / math.sqrt(m["step"])
        case "drift":  # T, the ratio, is 1 for a random walk of z, and larger if it drifts
            ratio = mean(u.square()) * m["weight"] / (m["weight_sq"] * mean(root))
            m["log"] += parts.pace * f * ratio.clamp(1e-3, 1e3).log()
            return m["start"] * m["log"].exp()
        case _:  # "bet": the wealth of a gambler who bets that gradients keep their direction
            q = total(products) / total(products.abs()).clamp(min=1e-300)
            m["won"] += f * q
            m["bets"] += f * q * q
            wealth = m["won"].clamp(min=0).square() / m["bets"].clamp(min=1e-300)
            return m["start"] * (parts.pace * (1 - MOMENTUM) * wealth).exp()


class Auto(Optimizer):
    """MADGRAD on one vector of all parameters, or one per tensor. `lr` is the schedule's factor.

    Has one group. The memories are kept in it, as a checkpoint saves groups unchanged.
    """

    latest: "Auto | None" = None  # the one of the current run

    def __init__(self, params: Any, parts: Parts, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.parts = parts
        Auto.latest = self

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        group = self.param_groups[0]
        params = [param for param in group["params"] if param.grad is not None]
        vectors = [[param] for param in params] if self.parts.alone else [params]
        memories = group["memories"] = group.get("memories") or [{} for _ in vectors]
        for members, memory in zip(vectors, memories, strict=True):
            self.update(members, memory, group["lr"], group["weight_decay"])

    def update(self, params: list[Tensor], m: Memory, factor: float, decay: float) -> None:
        parts = self.parts
        x = torch.cat([param.flatten() for param in params])
        raw = torch.cat([param.grad.flatten() for param in params])
        g = raw + decay * x
        if not m:
            m.update(initial_memory(parts, x, g))
        away = m["x_0"] - (x if parts.point == "x" else m["z"])
        m["largest"] = torch.maximum(m["largest"], mean(raw.square()).sqrt())
        size = m["largest"] if parts.scale == "max" else m["size"]
        m["lr"] = m["d"].pow(1.5) / size.clamp(min=1e-30).sqrt()  # γ = d^{3/2}/√H
        weight = factor * m["lr"] * math.sqrt(m["step"] + 1)  # λ_k = f γ √(k+1)
        weighted = weight.to(g.dtype) * g
        m["s"] += weighted
        m["nu"] += weighted * g
        m["step"] += 1
        root = m["nu"].pow(1 / 3)
        u = m["s"] / (root + EPS)
        m["z"] = m["x_0"] - u
        x += (1 - MOMENTUM) * (m["z"] - x)
        for param, part in zip(params, x.split([p.numel() for p in params]), strict=True):
            param.copy_(part.view(param.shape))
        if factor:  # a step of weight 0 carries no information
            m["weight"] += weight
            m["weight_sq"] += weight * weight
            m["size"] = (mean(root) / m["weight"].pow(1 / 3)).pow(1.5)
            d = estimate(parts, m, factor, weight, g * away, u, root)
            m["d"] = torch.maximum(m["d"], torch.minimum(d, m["d"] * parts.growth))


def initial_memory(parts: Parts, x: Tensor, g: Tensor) -> Memory:
    start = torch.tensor(parts.start, dtype=torch.float64, device=x.device)
    if parts.relative:
        least = 1e-4 if parts.alone else 1e-6  # biases may start at 0
        start = (start * mean(x.square()).sqrt()).clamp(min=least)
    names = ("lr", "largest", "weight", "weight_sq", "inner", "log", "won", "bets")
    return {
        **{name: torch.zeros_like(start) for name in names},
        **{name: torch.zeros_like(x) for name in ("s", "nu")},
        **{name: x.clone() for name in ("x_0", "z")},
        "step": 0,
        "start": start,
        "d": start.clone(),
        "size": mean(g.abs().pow(2 / 3)).pow(1.5),  # H of one gradient
    }
