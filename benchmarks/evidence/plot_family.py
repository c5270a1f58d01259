"""The methods of the paper's derivation when all gradients are 1: a figure of docs/algorithm.md.

    python benchmarks/evidence/plot_family.py --out docs/family.png

The left panel has the newest gradient's share of a step, the right one how far z is from x_0 before
and after the learning rate falls tenfold.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import nn

from cubegrad import family

# The colours are Okabe and Ito's palette.
METHODS: dict[str, tuple[type[family.DualAveraging], str, str]] = {
    "DA": (family.DA, "#0072B2", "--"),
    "WeightedDA": (family.WeightedDA, "#0072B2", "-"),
    "AdaGradDA": (family.AdaGradDA, "#009E73", "--"),
    "UnweightedDenominator": (family.UnweightedDenominator, "#009E73", "-"),
    "WeightedDenominator": (family.WeightedDenominator, "#CC79A7", "-"),
    "WeightedNumerator": (family.WeightedNumerator, "#E69F00", "-"),
    "MADGRAD": (family.MADGRAD, "#D55E00", "-"),
}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def unit_gradients(
    method: type[family.DualAveraging], lrs: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The effective step sizes λ_k/d_{k+1}, and |z_{k+1} - x_0|, if all gradients are 1."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = method([param], averaging="none")
    group = optimizer.param_groups[0]
    step_sizes, distances = [], []
    for k, lr in enumerate(lrs):
        group["lr"] = lr
        param.grad = torch.ones_like(param)
        optimizer.step()
        distances.append(-param.item())
        grad_sum = optimizer.state[param]["grad_sum"].item()
        step_sizes.append(family.WEIGHTS[group["weights"]](group, k) * distances[-1] / grad_sum)
    return np.array(step_sizes), np.array(distances)


def style(name: str) -> dict[str, object]:
    _, colour, line = METHODS[name]
    return {"color": colour, "linestyle": line, "linewidth": 2.6 if name == "MADGRAD" else 1.4}


def label(ax: Axes, x: float, y: float, text: str) -> None:
    """Name lines that lie on top of each other, which colours cannot tell apart."""
    ax.text(x, y, text, transform=ax.transAxes, color="0.3", fontsize=8.5)


def draw_unit_gradients(effective: Axes, distance: Axes, steps: int) -> None:
    drop = steps // 2
    for name, (method, *_) in METHODS.items():
        step_sizes, _ = unit_gradients(method, [0.1] * steps)
        effective.plot(range(1, steps + 1), step_sizes / step_sizes[0], **style(name))
        _, distances = unit_gradients(method, [0.1 if k < drop else 0.01 for k in range(steps)])
        distance.plot(range(1, steps + 1), distances / distances[drop - 1], **style(name))
    effective.set(
        xscale="log",
        yscale="log",
        xlabel="step k",
        ylabel=r"$\lambda_k / d_{k+1}$, relative to $k = 0$",
    )
    effective.set_title("The newest gradient's share, all gradients 1", loc="left")
    effective.set_ylim(top=3)
    label(
        effective,
        0.03,
        0.89,
        "level: WeightedDA, UnweightedDenominator,\nWeightedNumerator, MADGRAD",
    )
    label(effective, 0.52, 0.64, r"$k^{-1/4}$: WeightedDenominator")
    label(effective, 0.06, 0.30, r"$k^{-1/2}$: DA and AdaGradDA")
    distance.set(xlabel="step k", ylabel=r"$|z - x_0|$, relative to its value at the drop")
    distance.set_ylim(0.5, 1.25)
    distance.axvline(drop, color="0.6", linewidth=1)
    label(distance, 0.52, 0.04, "γ falls tenfold")
    label(distance, 0.67, 0.55, "WeightedDA and\nWeightedNumerator")
    label(distance, 0.80, 0.36, "DA")
    label(distance, 0.53, 0.84, "MADGRAD and\nUnweightedDenominator")
    distance.set_title(r"After γ falls, some are drawn back to $x_0$", loc="left")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the figure to write")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
        draw_unit_gradients(*axes, options.steps)
        for ax in axes:
            ax.grid(color="0.92")
        handles = [plt.Line2D([], [], label=name, **style(name)) for name in METHODS]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(options.out, dpi=140)
        plt.close(figure)


if __name__ == "__main__":
    main()
