"""The optimizers and the schedules of `early_progress.py`."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from cubegrad import MADGRAD, MirrorMADGRAD, family

Params = Iterable[tuple[str, Tensor]]


class AdamWith(torch.optim.Optimizer):
    """Adam with one part of MADGRAD's denominator, and Adam itself.

    root: 2, or 3 for the cube root of the mean of g².
    size_root: each tensor's step gets the root mean square that it has with this root (`root`
        unless given). So the root acts inside the tensors only, or between them only.
    where: `root` is for tensors whose name has this part; the others have 2.
    memory: the mean of g² is a moving one with β_2 = memory, or, for "whole", the mean over the
        whole run with weights √(k+1), as MADGRAD's is at a constant learning rate.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        root: int = 2,
        size_root: int | None = None,
        memory: float | str = 0.999,
        where: str = "",
    ) -> None:
        options = {"root": root, "size_root": size_root or root, "memory": memory, "where": where}
        super().__init__(params, {"lr": lr, **options})
        self.steps, self.weights = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        self.weights += self.steps**0.5
        for group in self.param_groups:
            whole = group["memory"] == "whole"
            newest = self.steps**0.5 / self.weights if whole else 1 - group["memory"]
            correction = 1.0 if whole else 1 - group["memory"] ** self.steps
            for name, param in zip(group["param_names"], group["params"], strict=True):
                state, root = self.state[param], group["root"] if group["where"] in name else 2
                if not state:
                    state.update({key: torch.zeros_like(param) for key in ("mean", "square")})
                mean = state["mean"].lerp_(param.grad, 0.1)
                square = state["square"].lerp_(param.grad.square(), newest) / correction
                step = mean / (square ** (1 / root) + 1e-8)
                if group["size_root"] != root:
                    like = mean / (square ** (1 / group["size_root"]) + 1e-8)
                    step *= like.norm() / (step.norm() + 1e-30)
                param.sub_(step, alpha=group["lr"] / (1 - 0.9**self.steps))


class SquareRootMADGRAD(torch.optim.Optimizer):
    """MADGRAD with d = √ν Λ^{-1/6} instead of ∛ν, where Λ is the sum of all λ.

    Both are ∛Λ if every gradient is 1, so step sizes over the run are those of MADGRAD; but a
    coordinate whose gradients are a times as large has the same steps, as in Adam.
    """

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.steps, self.weights = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        weight = self.param_groups[0]["lr"] * self.steps**0.5  # λ_k
        self.weights += weight
        for param in self.param_groups[0]["params"]:
            if not self.state[param]:
                zeros = {key: torch.zeros_like(param) for key in ("sum", "square")}
                self.state[param] = {"start": param.clone(), **zeros}
            state = self.state[param]
            state["sum"].add_(param.grad, alpha=weight)
            state["square"].addcmul_(param.grad, param.grad, value=weight)
            denominator = state["square"].sqrt().mul_(self.weights ** (-1 / 6)).add_(1e-12)
            param.lerp_(state["start"] - state["sum"] / denominator, 0.1)


METHODS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": partial(torch.optim.Adam, foreach=True),
    "Adam, whole-run mean": partial(AdamWith, memory="whole"),
    "Adam, cube root": partial(AdamWith, root=3),
    "Adam, cube root between tensors": partial(AdamWith, size_root=3),
    "Adam, cube root inside tensors": partial(AdamWith, root=3, size_root=2),
    "Adam, cube root inside the embedding": partial(AdamWith, root=3, size_root=2, where="bytes."),
    "Adam, cube root inside attention's inputs": partial(
        AdamWith, root=3, size_root=2, where=".into."
    ),
    "MADGRAD": MADGRAD,
    "MADGRAD, square root": SquareRootMADGRAD,
    "MADGRAD, starting over": MADGRAD,
    "MADGRAD, constant λ": partial(family.MADGRAD, power=0.0),
    "MADGRAD, momentum 0.8": partial(MADGRAD, momentum=0.8),
    "MADGRAD, momentum 0.97": partial(MADGRAD, momentum=0.97),
    "MirrorMADGRAD": MirrorMADGRAD,
}


def shape(step: int, warm: float, decay: str, steps: int) -> float:
    rising = (step + 1) / (warm * steps) if warm else 1.0
    if rising < 1 or decay == "flat":
        return min(1.0, rising)
    left = 1 - (step - warm * steps) / (steps * (1 - warm))
    return max(0.0, min(1.0, left))


def as_in_adam(wanted: list[float]) -> list[float]:
    """The factors for which λ_k/∛(∑ λ_i) of MADGRAD is in proportion to `wanted`.

    With Λ' = λ = wanted Λ^{1/3}, Λ is (2/3 ∑ wanted)^{3/2}, so γ_k is in proportion to
    wanted_k √(mean of wanted_0 … wanted_k).
    """
    sums = accumulate(wanted)
    return [
        one * (total / (k + 1)) ** 0.5
        for k, (one, total) in enumerate(zip(wanted, sums, strict=True))
    ]


def as_in_madgrad(lrs: list[float]) -> list[float]:
    """λ_k/∛(∑_{i≤k} λ_i): MADGRAD's step sizes if all gradients have the same size."""
    weights = [lr * (k + 1) ** 0.5 for k, lr in enumerate(lrs)]
    sums = accumulate(weights)
    return [
        weight / total ** (1 / 3) if total else 0.0
        for weight, total in zip(weights, sums, strict=True)
    ]


def factors(schedule: str, steps: int) -> list[float]:
    """Of the learning rate, step by step: "10% linear", "2% flat", "10% linear, as in Adam"."""
    plain, _, other = schedule.partition(", ")
    warm, decay = plain.split()
    found = [shape(step, float(warm.rstrip("%")) / 100, decay, steps) for step in range(steps)]
    if not other:
        return found
    changed = {"as in Adam": as_in_adam, "as in MADGRAD": as_in_madgrad}[other](found)
    return [one / max(changed) for one in changed]
