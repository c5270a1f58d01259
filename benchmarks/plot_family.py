"""The methods of the paper's derivation side by side: a figure and a table.

    python3 benchmarks/plot_family.py --out docs/family.png

Two panels follow one coordinate whose gradient is always 1; two show ℓ1 regression with one random
row per step and a minimiser from scipy. Each method runs with the learning rate, a power of two,
that has the smallest mean f(x) - f(x_*) at the last step, over the seeds of the figure.
"""

import argparse
import math
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import linprog
from torch import Tensor, nn

import cubegrad
from cubegrad import family, theory

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
ROWS, DIMENSION, MOMENTUM = 200, 10, 0.9


@dataclass(frozen=True)
class Size:
    steps: int
    seeds: int
    exponents: range  # of the learning rates, powers of two


FULL, QUICK = Size(1000, 32, range(-28, 5)), Size(60, 4, range(-8, 1))


@dataclass(frozen=True)
class Regression:
    """f(x) = mean |a_i·x - b_i|, where the columns of a have scales from 1 to 1/30."""

    a: Tensor
    b: Tensor
    minimiser: Tensor  # x_*
    minimum: float  # f(x_*)

    def gap(self, x: Tensor) -> Tensor:
        """f(x) - f(x_*)."""
        return (x @ self.a.T - self.b).abs().mean(-1) - self.minimum

    def gradient(self, x: Tensor, index: Tensor) -> Tensor:
        """The subgradient of |a_i·x - b_i| for each i in `index`."""
        a = self.a[index]
        return torch.sign((x * a).sum(-1) - self.b[index])[..., None] * a


def regression() -> Regression:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS, DIMENSION, generator=generator, dtype=torch.float64)
    a *= torch.logspace(0, -1.5, DIMENSION, dtype=torch.float64)
    b = a @ torch.ones(DIMENSION, dtype=torch.float64)
    b += 0.3 * torch.randn(ROWS, generator=generator, dtype=torch.float64)
    identity = np.eye(ROWS)
    table = np.block([[a.numpy(), -identity], [-a.numpy(), -identity]])  # ±(a·x - b) ≤ t
    cost = np.concatenate([np.zeros(DIMENSION), np.full(ROWS, 1 / ROWS)])
    bounds = [(None, None)] * DIMENSION + [(0, None)] * ROWS
    solution = linprog(cost, A_ub=table, b_ub=np.concatenate([b, -b]), bounds=bounds)
    if solution.status:
        raise RuntimeError(f"scipy found no minimiser: {solution.message}")
    return Regression(a, b, torch.from_numpy(solution.x[:DIMENSION]), solution.fun)


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


def best_run(
    problem: Regression, method: type[family.DualAveraging], size: Size, **options: float
) -> tuple[float, np.ndarray]:
    """The best learning rate, and f(x_k) - f(x_*) with it by step and seed.

    All runs share one optimizer: a group for each learning rate, a row for each seed.
    """
    zeros = torch.zeros(size.seeds, DIMENSION, dtype=torch.float64)
    params = [nn.Parameter(zeros.clone()) for _ in size.exponents]
    groups = [
        {"params": [param], "lr": 2.0**exponent}
        for param, exponent in zip(params, size.exponents, strict=True)
    ]
    optimizer = method(groups, averaging="constant", momentum=MOMENTUM, **options)
    generator = torch.Generator().manual_seed(1)
    gaps = []
    for _ in range(size.steps):
        index = torch.randint(ROWS, (size.seeds,), generator=generator)
        for param in params:
            param.grad = problem.gradient(param.detach(), index)
        optimizer.step()
        gaps.append(torch.stack([problem.gap(param.detach()) for param in params]))
    by_lr = torch.stack(gaps, 1).numpy()  # learning rate, step, seed
    best = int(np.argmin(by_lr[:, -1].mean(-1)))
    return 2.0 ** size.exponents[best], by_lr[best]


def theorem(problem: Regression, size: Size) -> dict[str, np.ndarray]:
    """The bounds on TheoreticalMADGRAD by step, and its mean gap, with the theorem's γ."""
    distance = torch.linalg.vector_norm(problem.minimiser).item()
    grad_bound = problem.a.abs().max().item()
    sizes = (distance, grad_bound, DIMENSION)
    lr = theory.optimal_lr(size.steps, *sizes)
    param = nn.Parameter(torch.zeros(size.seeds, DIMENSION, dtype=torch.float64))
    optimizer = family.TheoreticalMADGRAD([param], lr=lr, grad_bound=grad_bound)
    generator = torch.Generator().manual_seed(2)
    rows = []
    for k in range(size.steps + 1):
        x = param.detach().clone()
        param.grad = problem.gradient(x, torch.randint(ROWS, (size.seeds,), generator=generator))
        optimizer.step()
        run = (k, lr, problem.minimiser, optimizer.state[param]["grad_sq_sum"], grad_bound)
        rows.append(
            [
                theory.anytime_bound(k, lr, *sizes),
                theory.adaptive_bound(*run).mean().item(),
                theory.sharp_adaptive_bound(*run).mean().item(),
                problem.gap(x).mean().item(),
            ]
        )
    names = ("any γ, any k", "adaptive bound", "the same, sharp", r"$f(x_k) - f(x_*)$, mean")
    lines = dict(zip(names, np.array(rows).T, strict=True))
    by_theorem = [theory.convergence_bound(k, *sizes) for k in range(1, size.steps + 1)]
    return {
        r"theorem: $6\,\Vert x_0 - x_*\Vert\, G \sqrt{D/k}$": np.array([math.inf, *by_theorem]),
        **lines,
    }


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


def draw_regression(ax: Axes, problem: Regression, size: Size) -> None:
    print(f"{'method':<24}{'best rate':>12}   f(x) - f(x_*) at the last step, mean ± 2 s.e.")
    runs: list[tuple[str, type[family.DualAveraging], dict[str, float]]] = [
        *((name, method, {}) for name, (method, *_) in METHODS.items()),
        ("MADGRAD, p = 1", family.MADGRAD, {"power": 1.0}),
        ("MADGRAD, p = 2", family.MADGRAD, {"power": 2.0}),
        ("InlineAveragedSGD", family.InlineAveragedSGD, {}),
    ]
    for name, method, options in runs:
        lr, gaps = best_run(problem, method, size, **options)
        error = 2 * gaps[-1].std(ddof=1) / math.sqrt(size.seeds)
        print(f"{name:<24}{f'2^{math.log2(lr):.0f}':>12}   {gaps[-1].mean():.5f} ± {error:.5f}")
        if name in METHODS:
            ax.plot(range(1, size.steps + 1), gaps.mean(-1), **style(name))
    ax.set(
        xscale="log", yscale="log", xlabel="step k", ylabel=r"$f(x_k) - f(x_*)$, mean over seeds"
    )
    ax.set_title(f"ℓ1 regression, each at its best γ, momentum {MOMENTUM}", loc="left")


def draw_theorem(ax: Axes, problem: Regression, size: Size) -> None:
    styles = [("0.6", "-"), ("0.6", "--"), ("#56B4E9", "-"), ("#0072B2", "-"), ("#D55E00", "-")]
    for (name, line), (colour, dash) in zip(theorem(problem, size).items(), styles, strict=True):
        width = 2.6 if name.endswith("mean") else 1.4
        ax.plot(range(len(line)), line, color=colour, linestyle=dash, linewidth=width, label=name)
    ax.set(xscale="log", yscale="log", xlabel="step k", xlim=(1, size.steps))
    ax.set_ylim(top=1e5)
    ax.set_title(f"TheoreticalMADGRAD with γ for k = {size.steps}", loc="left")
    ax.legend(frameon=False, fontsize=8)


def draw(size: Size) -> Figure:
    problem = regression()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    draw_unit_gradients(axes[0, 0], axes[0, 1], max(size.steps, 100))
    draw_regression(axes[1, 0], problem, size)
    draw_theorem(axes[1, 1], problem, size)
    for ax in axes.flat:
        ax.grid(color="0.92")
    handles = [plt.Line2D([], [], label=name, **style(name)) for name in METHODS]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"The paper's derivation, method by method; {size.seeds} seeds, torch "
        f"{torch.__version__}, cubegrad {cubegrad.__version__}, Python {platform.python_version()}"
    )
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the figure to write")
    parser.add_argument("--quick", action="store_true", help="few steps and seeds")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plt.rcParams.update(STYLE)
    draw(QUICK if args.quick else FULL).savefig(args.out, dpi=140)


if __name__ == "__main__":
    main()
