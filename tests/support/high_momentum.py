"""How far from its minimum a noisy quadratic stays with codes, over what float32 state gives.

`python tests/support/high_momentum.py` prints the table of docs/memory.md.
"""

from typing import Any

import torch

from cubegrad import MADGRAD, MirrorMADGRAD

STEPS = 3000


def mean_square(cls: type, momentum: float, seed: int, **options: Any) -> float:
    """Of the distance to the minimum, in the second half of a run at a constant learning rate."""
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(16, 256, generator=generator))
    optimizer = cls([param], lr=0.01, momentum=momentum, **options)
    total = 0.0
    for k in range(STEPS):
        param.grad = param.detach() + torch.randn(param.shape, generator=generator)
        optimizer.step()
        if 2 * k >= STEPS:
            total += param.detach().double().square().mean().item()
    return total / (STEPS // 2)


def ratio(cls: type, momentum: float, seed: int) -> float:
    compact, float32 = (mean_square(cls, momentum, seed, compact=form) for form in (True, False))
    return compact / float32


def table() -> str:
    lines = ["| momentum | MADGRAD | MirrorMADGRAD |", "|---|---:|---:|"]
    for momentum in (0.9, 0.95, 0.99, 0.995, 0.999):
        cells = []
        for cls in (MADGRAD, MirrorMADGRAD):
            ratios = [ratio(cls, momentum, seed) for seed in range(6)]
            cells.append(f"{min(ratios):.3f} to {max(ratios):.3f}")
        lines.append(f"| {momentum} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
