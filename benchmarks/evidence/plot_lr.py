"""Where MADGRAD's best learning rate lies beside Adam's: one panel for each kind of model.

    python benchmarks/evidence/plot_lr.py docs/coming_from.png

The values are those of docs/learning_rate.md, from the records in docs/results: what the last
result loses at each learning rate of the search, relative to the same method's best one.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import which_lr
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from cubegrad.study.statistics import Summary


class Unit(NamedTuple):
    name: str
    floor: float  # the lowest that is shown; what loses more is drawn there as an arrow


UNITS = {
    "accuracy": Unit("points of accuracy", -6.0),
    "loss": Unit("bits", -0.7),
    "ssim": Unit("SSIM", -0.006),
}
# MADGRAD is drawn last, and its star smaller, so that both are seen where they coincide.
STYLES: dict[str, dict[str, Any]] = {
    "Adam": {"color": "#0072B2", "linestyle": "--"},
    "MADGRAD": {"color": "#D55E00", "linestyle": "-"},
}
BUTT = {"solid_capstyle": "butt"}
STARS = {"Adam": 360, "MADGRAD": 110}
HALVES = {"Adam": (0.0, 0.5), "MADGRAD": (0.5, 1.0)}  # of a panel, for the paper's learning rates


def losses(summary: Summary, higher_is_better: bool) -> list[tuple[float, float]]:
    """(lr, how much worse than the best); -inf for a run that diverged."""
    sign = 1 if higher_is_better else -1
    points = [(lr, None if y is None else sign * y) for lr, y in sorted(summary.lr_curve)]
    best = max(y for _, y in points if y is not None)
    return [(lr, float("-inf") if y is None else y - best) for lr, y in points]


def draw_method(axes: Axes, name: str, points: list[tuple[float, float]], floor: float) -> None:
    style = STYLES[name]
    x, y = zip(*points, strict=True)
    axes.plot(x, [max(value, floor) for value in y], linewidth=1.8, zorder=3, **style)
    for lr, lost in points:
        marker, size = ("*", STARS[name]) if lost == 0 else ("o", 30) if lost > floor else ("v", 42)
        edge = {"edgecolors": "white", "linewidths": 0.8}
        axes.scatter(
            lr,
            max(lost, floor),
            size,
            style["color"],
            marker=marker,
            zorder=4,
            clip_on=False,
            **edge,
        )


def draw(axes: Axes, kind: which_lr.Kind) -> None:
    experiment, madgrad, adam = which_lr.search(kind)
    judge = experiment.judge
    unit = UNITS[judge.metric]
    published = experiment.paper.best if experiment.paper else {}
    for name, summary in (("Adam", adam), ("MADGRAD", madgrad)):
        draw_method(axes, name, losses(summary, judge.higher_is_better), unit.floor)
        if name.lower() in published:
            lr, color = published[name.lower()].lr, STYLES[name]["color"]
            axes.axvline(lr, *HALVES[name], color=color, linewidth=5, alpha=0.25, zorder=1, **BUTT)
    axes.set(xscale="log", xlim=(7e-5, 0.4), ylim=(1.1 * unit.floor, -0.16 * unit.floor))
    axes.set_yticks([0, unit.floor / 2, unit.floor])
    axes.set_yticklabels(["best", *(f"−{-at:g}" for at in (unit.floor / 2, unit.floor))])
    axes.set_title(f"{kind.model} ({unit.name})", fontsize=9.5, loc="left", pad=5)
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_minor_locator(LogLocator(10, subs=(2.5, 5)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(which="major", alpha=0.35)
    axes.grid(which="minor", alpha=0.12)
    axes.tick_params(labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend() -> list[Line2D]:
    labels = {"MADGRAD": "MADGRAD", "Adam": "Adam (0.2M: AdamW)"}
    lines = [Line2D([], [], linewidth=1.8, label=labels[name], **STYLES[name]) for name in labels]
    grey: dict[str, Any] = {"color": "#555555", "linestyle": "none"}
    best = Line2D([], [], marker="*", markersize=12, label="our best", **grey)
    paper = Line2D([], [], color="#999999", linewidth=5, alpha=0.5, label="the paper's")
    worse = Line2D([], [], marker="v", label="below the panel", **grey)
    return [*lines, best, paper, worse]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    options = parser.parse_args(words)
    kinds = which_lr.KINDS
    size = (7.6, 1.28 * len(kinds) + 1.0)
    figure, grid = plt.subplots(len(kinds), 1, figsize=size, sharex=True, layout="constrained")
    for axes, kind in zip(grid, kinds, strict=True):
        draw(axes, kind)
    grid[-1].set_xlabel("learning rate")
    figure.supylabel("result, relative to the method's own best", fontsize=9.5)
    figure.legend(handles=legend(), loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
