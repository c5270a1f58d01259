"""Weights edited between steps: forms of the state, where z is in each, and what becomes of edits.

`python tests/support/edits.py` prints the table of docs/editing_weights.md.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import cases
import torch
from torch import Tensor, nn

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, codec
from cubegrad.functions import CodedFunctions
from cubegrad.state import blocks, layout

FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "sums": (MADGRAD, {}),
    "sums-no-momentum": (MADGRAD, {"momentum": 0.0}),
    "codes": (MADGRAD, {"compact": True}),
    "codes-no-momentum": (MADGRAD, {"compact": True, "momentum": 0.0}),
    "mirror": (MirrorMADGRAD, {}),
    "mirror-codes": (MirrorMADGRAD, {"compact": True}),
    "madgradw": (MADGRADW, {"weight_decay": 0.0}),
    "madgradw-codes": (MADGRADW, {"weight_decay": 0.0, "compact": True}),
}
SHAPE = (64, 64)  # just large enough for codes
CLIP = 0.01


def build(form: str, params: Any, backend: cases.Backend = cases.EAGER, **options: Any) -> Any:
    """With steps of about 0.01 at gradients of about 1, as Adam's are at lr=0.01."""
    cls, own = FORMS[form]
    settings = {"lr": 1e-3 if cls is MADGRAD else 1e-2, **own, **backend.flags, **options}
    optimizer = cls(params, **settings)
    if backend.module is not None:
        optimizer._backend = lambda _: backend.module
    return optimizer


def adam(params: Any) -> torch.optim.Adam:
    return torch.optim.Adam(params, lr=1e-2)


def editing(optimizer: Any, edits: bool = True, **options: Any) -> AbstractContextManager[Any]:
    """The context, if it is to be used and the optimizer has it."""
    has_it = edits and hasattr(optimizer, "edit_weights")
    return optimizer.edit_weights(**options) if has_it else nullcontext()


def dual_point(optimizer: Any, param: Tensor) -> Tensor:
    """z in float64."""
    state, x = optimizer.state[param], layout.as_real(param.detach().clone()).double()
    held = layout.held(optimizer._rule, state)
    buffers = {name: layout.as_real(state[name].clone()) for name in held.buffers}
    if held.is_coded:
        codes = blocks.codes_in_blocks(held.codes(list(buffers.values())))
        offset = codec.decode(CodedFunctions, codes).offset
        return x if offset is None else x + blocks.joined(offset, x.shape)
    if "z" in buffers:
        return buffers["z"].double()
    if "dual_offset" in buffers:
        return x + buffers["dual_offset"].double()
    if "initial_param" not in buffers:
        return x
    eps = optimizer.param_groups[0]["eps"]
    start, total, squares = (
        buffers[name].double() for name in ("initial_param", "grad_sum", "grad_sq_sum")
    )
    denominator = squares ** (1 / 3) + eps
    return start - torch.where(denominator == 0, 0.0, total / denominator)


class Noisy:
    """Gradients of a quadratic with noise: about 1 at the beginning."""

    def __init__(self, device: str = "cpu", shape: tuple[int, ...] = SHAPE) -> None:
        self.shape, self.device = shape, device
        self.start, self.minimum = (cases.randn(shape, torch.float32, seed) for seed in (0, 1))
        self.generator = torch.Generator().manual_seed(2)

    def parameter(self) -> nn.Parameter:
        return cases.parameter(self.start.clone(), self.device)

    def step(self, optimizer: Any, param: Tensor, times: int = 1, pull: float = 1.0) -> None:
        for _ in range(times):
            noise = torch.randn(self.shape, generator=self.generator)
            grad = pull * (param.detach().cpu() - self.minimum) + noise
            param.grad = grad.to(param.device)
            optimizer.step()

    def idle(self, optimizer: Any, param: Tensor, times: int = 1) -> None:
        """Steps with gradients of 0."""
        for _ in range(times):
            param.grad = torch.zeros_like(param)
            optimizer.step()


def clipped(optimizer: Any, problem: Noisy, param: Tensor, steps: int = 50, **how: Any) -> float:
    """The largest weight after steps that are each clipped to CLIP, and one without a gradient."""
    with torch.no_grad():
        param.clamp_(-CLIP, CLIP)
    for _ in range(steps):
        problem.step(optimizer, param)
        with torch.no_grad(), editing(optimizer, **how):
            param.clamp_(-CLIP, CLIP)
    problem.idle(optimizer, param)
    return param.abs().max().item()


def pruned(optimizer: Any, problem: Noisy, param: Tensor, **how: Any) -> float:
    """The mean size of pruned weights 30 steps later, whose gradients are masked too."""
    problem.step(optimizer, param, 30)
    mask = cases.randn(problem.shape, torch.float32, 3).to(param.device) > 0
    with torch.no_grad(), editing(optimizer, **how):
        param.mul_(mask)
    for _ in range(30):
        param.grad = (param.detach() - problem.minimum.to(param.device)) * mask
        optimizer.step()
    return param[~mask].abs().mean().item()


def reloaded(optimizer: Any, problem: Noisy, param: Tensor, **how: Any) -> float:
    """How much of the way from the reloaded weights 30 steps without a gradient go again."""
    problem.step(optimizer, param, 20)
    best = param.detach().clone()
    problem.step(optimizer, param, 40)
    way = (param.detach() - best).norm()
    with torch.no_grad(), editing(optimizer, **how):
        param.copy_(best)
    problem.idle(optimizer, param, 30)
    return ((param.detach() - best).norm() / way).item()


def halved(optimizer: Any, problem: Noisy, param: Tensor, **how: Any) -> float:
    """The share of the weights that is there again 41 steps after they have been halved."""
    problem.step(optimizer, param, 50, pull=0.0)
    before = param.detach().clone()
    with torch.no_grad(), editing(optimizer, **how):
        param.mul_(0.5)
    problem.step(optimizer, param, 41, pull=0.0)
    return ((param.detach() * before).sum() / before.square().sum()).item()


def averaged(optimizers: Any, problem: Noisy, params: list[Tensor], **how: Any) -> list[float]:
    """The distances per weight of two ranks before each averaging; each has data of its own."""
    spreads = []
    for _ in range(8):
        for rank, (optimizer, param) in enumerate(zip(optimizers, params, strict=True)):
            own = problem.minimum
            problem.minimum = own + (0.5 if rank else -0.5)
            problem.step(optimizer, param, 10)
            problem.minimum = own
        first, second = (param.detach() for param in params)
        spreads.append(((first - second).norm() / first.numel() ** 0.5).item())
        mean = (first + second) / 2
        for optimizer, param in zip(optimizers, params, strict=True):
            with torch.no_grad(), editing(optimizer, **how):
                param.copy_(mean)
    return spreads


def table() -> None:
    def one(scenario: Any, make: Any, how: dict[str, Any]) -> float:
        problem = Noisy()
        param = problem.parameter()
        return scenario(make([param]), problem, param, **how)

    rows = {"Adam": (adam, {}), "no context": (partial(build, "sums"), {"edits": False})}
    rows |= {form: (partial(build, form), {}) for form in FORMS}
    rows["keep_momentum=False"] = partial(build, "sums"), {"keep_momentum": False}
    for name, (make, how) in rows.items():
        numbers = [one(scenario, make, how) for scenario in (clipped, pruned, reloaded, halved)]
        problem = Noisy()
        params = [problem.parameter() for _ in range(2)]
        spreads = averaged([make([param]) for param in params], problem, params, **how)
        print(f"{name:22}", *(f"{n:9.3f}" for n in (*numbers, spreads[3], spreads[7])))  # noqa: T201


if __name__ == "__main__":
    table()
