"""How much the folds of `fastmri` differ: each one's slices, and the SSIM without a network.

    PYTHONPATH=src python3 benchmarks/mri_folds.py --data data

The image is that of the measured lines alone, the others are 0. docs/problems/fastmri.md has the
numbers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cubegrad.study import Setup
from cubegrad.study.data.mr_slices import FOLDS
from cubegrad.study.models.kspace import root_sum_of_squares, to_images
from cubegrad.study.problems import fastmri


class ZeroFilled(nn.Module):
    def forward(self, measurement: Tensor, lines: Tensor, low: int) -> Tensor:  # noqa: ARG002
        return root_sum_of_squares(to_images(measurement))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    data = parser.parse_args(words).data
    preset = fastmri.problem().presets["gpu"]
    print("| seed | training slices | test slices | SSIM |\n|---|---|---|---|")
    for seed in range(FOLDS):
        parts = fastmri.sources(Setup(preset, seed, torch.device("cpu"), data))
        found = fastmri.metrics(ZeroFilled(), parts["test"], preset.options["low"], 32)
        print(f"| {seed} | {len(parts['train'])} | {len(parts['test'])} | {found['ssim']:.3f} |")


if __name__ == "__main__":
    main()
