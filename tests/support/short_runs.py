"""Small runs that many tests make: parameters and gradients from seeds, steps, comparisons."""

import io
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import cases
import torch
from torch import Tensor, nn


def tanh_net(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers from each size to the next, with tanh between them."""
    torch.manual_seed(seed)
    layers = [[nn.Linear(*pair), nn.Tanh()] for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers))[:-1]


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (3,)))


def parameters(
    shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[nn.Parameter]:
    """Random values, the same at each call."""
    return [cases.parameter(cases.randn(s, dtype, i), device) for i, s in enumerate(shapes)]


def cloned(params: Iterable[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def set_grads(params: Iterable[Tensor], k: int) -> None:
    """Random gradients, others for each parameter and each step k."""
    for i, param in enumerate(params):
        param.grad = cases.randn(tuple(param.shape), param.dtype, 100 * k + i).to(param.device)


def advance(optimizer: Any, params: Iterable[Tensor], steps: Iterable[int]) -> Any:
    params = list(params)
    for k in steps:
        set_grads(params, k)
        optimizer.step()
    return optimizer


def held_walk(steps: int, lr: float, unit: float, share: float = 0.1) -> float:
    """How far x goes on average if it is rounded at random to multiples of `unit`, and is held.

    All gradients are 1. A coordinate that is rounded beyond z waits there until z has passed it,
    so the mean runs ahead of that of an x that is not rounded, by less than a unit.
    """
    chances = [1.0] + [0.0] * steps  # of having made so many moves
    for k in range(1, steps + 1):
        ups = [share * max(0.0, lr * k - j * unit) / unit for j in range(steps)]
        assert max(ups) < 1
        moving = [chance * up for chance, up in zip(chances, ups, strict=False)]
        stays = [chance - part for chance, part in zip(chances, [*moving, 0.0], strict=True)]
        chances = [a + b for a, b in zip(stays, [0.0, *moving], strict=True)]
    return sum(j * unit * chance for j, chance in enumerate(chances))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def same_bits(params: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    pairs = zip(params, others, strict=True)
    return all(cases.same_bits(p.detach(), q.detach()) for p, q in pairs)


def peak_of(function: Callable[[], Any]) -> int:
    """The most bytes of CPU memory alive at once above the level before the call."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak


class FusedAndEager:
    """The same parameters stepped by a fused backend and by the eager one."""

    def __init__(
        self,
        shapes: Iterable[tuple[int, ...]],
        fused: cases.Backend = cases.NATIVE,
        **options: Any,
    ) -> None:
        self.k = 0
        self.runs = []
        for backend in (fused, cases.EAGER):
            params = parameters(shapes, device=fused.device)
            self.runs.append((params, cases.build(cases.MADGRAD, backend, params, options)))

    @property
    def fused(self) -> tuple[list[nn.Parameter], Any]:
        return self.runs[0]

    def step(self, change: Callable[..., Any] = lambda *_: None, times: int = 1) -> None:
        """Call `change(params, optimizer)` between setting the gradients and the step."""
        for _ in range(times):
            for params, optimizer in self.runs:
                set_grads(params, self.k)
                change(params, optimizer)
                optimizer.step()
            self.k += 1

    def assert_close(self) -> None:
        (params, fused), (others, eager) = self.runs
        options = {"rtol": 1e-5, "atol": 1e-6, "check_device": False}
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param.resolve_neg(), other.resolve_neg(), **options)
            for name, value in eager.state[other].items():
                torch.testing.assert_close(fused.state[param][name], value, **options)
