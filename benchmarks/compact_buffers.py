"""Which buffer may be rounded how coarsely? Fine-tuning with one buffer of the state rounded alone.

    PYTHONPATH=src python3 benchmarks/compact_buffers.py --data data --seeds 6

The study's `finetune` at its CPU size, at a learning rate so small that the same seed leads to
nearly the same weights. So a difference is the rounding's, not chance. Every run starts from the
same weights and has the same batches; the buffers are float32 numbers that went through their codes
and back.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from compact_problems import prepare
from torch import Tensor
from torch.optim import Optimizer

from cubegrad import codec, rule
from cubegrad.functions import CodedFunctions
from cubegrad.options import Hyper
from cubegrad.state import compact
from cubegrad.study import catalogue, methods, train
from cubegrad.study.sweep import Plan

LR = 1e-3

# What is rounded: bits of z - x, bits of the root's mantissa, whether x_0 is.
VARIANTS: dict[str, tuple[int, int, bool]] = {
    "nothing": (0, 0, False),
    "z - x to 8 bits": (8, 0, False),
    "z - x to 7 bits": (7, 0, False),
    "z - x to 5 bits": (5, 0, False),
    "x_0 to 16 bits": (0, 0, True),
    "the root to 4 bits of mantissa": (0, 4, False),
    "the root to 5 bits of mantissa": (0, 5, False),
    "the root to 6 bits of mantissa": (0, 6, False),
    "as it ships: 7, 6 and 16 bits": (7, 6, True),
}


class Rounded(Optimizer):
    """MADGRAD from ∛ν and z - x in float32, of which some are rounded after each step."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        rounded: tuple[int, int, bool],
        seed: int,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.offset_bits, self.root_places, self.rounds_initial = rounded
        self.count, self.random = 0, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            h = Hyper(group["lr"], 0.9, 1e-6, group["weight_decay"], None, False)
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, h)
        self.count += 1

    def _step(self, param: Tensor, grad: Tensor, h: Hyper) -> None:
        state, coded = self.state[param], compact.is_coded(param)
        x = compact.blocks(param) if coded else param
        g = compact.blocks(grad) if coded else grad
        if not state:
            state["offset"], state["root"] = torch.zeros_like(x), torch.zeros_like(x)
            state["initial"], state["scale"] = x.clone(), torch.zeros(())
            if coded and self.rounds_initial:
                code, scale = codec.encode_integers(CodedFunctions, x, codec.LARGEST_INITIAL)
                state["initial"] = code * scale
        x, offset, root, _ = rule.madgrad_from_root(
            CodedFunctions, h, self.count, x, g, state["offset"], state["root"], state["initial"]
        )
        if coded and self.offset_bits:
            z, largest = x + offset, 2 ** (self.offset_bits - 1) - 1
            dither = torch.rand(x.shape, generator=self.random) - 0.5
            code, scale = codec.encode_integers(CodedFunctions, offset, largest, dither)
            offset = code * scale
            x = z - offset
        if coded and self.root_places:
            bits = torch.randint(0, 2**31, x.shape, generator=self.random, dtype=torch.int32)
            rounded = codec.encode_roots(
                CodedFunctions, root, bits, 6 - self.root_places, state["scale"]
            )
            root, state["scale"] = (
                codec.decode_roots(CodedFunctions, *rounded),
                rounded[1],
            )
        state["offset"], state["root"] = offset, root
        param.copy_(compact.joined(x, param.shape) if coded else x)


def share_far_below(optimizer: Rounded) -> float:
    """Of the roots, those more than 7 binades below the largest of their block."""
    roots = [s["root"] for p, s in optimizer.state.items() if compact.is_coded(p)]
    far = sum(((r > 0) & (r < r.amax(-1, keepdim=True) / 128)).sum().item() for r in roots)
    return float(far / sum((root > 0).sum().item() for root in roots))


def train_once(data: Path, name: str, seed: int) -> tuple[float, float]:
    """The loss, and the share of roots far below their block's largest."""
    problem, made = catalogue.find("finetune"), list[Rounded]()

    def make(params: Iterable[Tensor], lr: float, weight_decay: float) -> Rounded:
        made.append(Rounded(params, lr, weight_decay, VARIANTS[name], seed))
        return made[-1]

    methods.METHODS["rounded"] = methods.Method("rounded", make, (LR, LR))
    preset = problem.presets["cpu"]
    plan = Plan(problem, "cpu", preset, (), "cpu")
    settings = plan.settings(methods.entry("rounded", preset), (LR, 0.0), seed, hold_out=False)
    checkpoint = data / f"rounded-{seed}.checkpoint"
    checkpoint.unlink(missing_ok=True)
    record = train.run(problem, settings, train.Place(data, save_every=math.inf), checkpoint)
    checkpoint.unlink(missing_ok=True)
    loss = record.last("loss")
    assert loss is not None
    return loss, share_far_below(made[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="with novels/ and wikitext-2/")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", help="parts of names, with commas between them")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds} must be >= 2, for a standard error")
    prepare("finetune", options.data, "cpu", "cpu")
    parts = (options.only or "").split(",")
    chosen = [n for n in VARIANTS if n == "nothing" or any(part in n for part in parts)]
    losses: dict[str, list[float]] = {name: [] for name in chosen}
    print("| rounded | loss, bits | better by |\n| --- | --- | --- |")
    for name in chosen:
        for seed in range(1, options.seeds + 1):
            loss, share = train_once(options.data, name, seed)
            losses[name].append(loss)
            text = f"{name}, seed {seed}: loss {loss:.5f}, roots below 2^-7: {1e6 * share:.1f} ppm"
            print(text, file=sys.stderr, flush=True)
        print(row(name, losses[name], losses["nothing"]), flush=True)


def row(name: str, losses: list[float], exact: list[float]) -> str:
    gains: list[Any] = [b - a for a, b in zip(losses, exact, strict=True)]
    error = 2 * stdev(gains) / math.sqrt(len(gains))
    gain = "" if losses is exact else f"{fmean(gains):+.5f} ± {error:.5f}".replace("-", "−")
    return f"| {name} | {fmean(losses):.4f} | {gain} |"


if __name__ == "__main__":
    main()
