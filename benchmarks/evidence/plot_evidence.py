"""The figure of evidence.py: ranks over the problems, and what a rate one step off loses."""

import math
import statistics
from typing import NamedTuple

import matplotlib.pyplot as plt
from evidence_rows import MADGRAD, Comparison, profile
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cubegrad.study import comparison

# The methods of the paper, and AdamW.
RANKED = {
    "MADGRAD": MADGRAD,
    "Adam": "adam",
    "AdamW": "adamw",
    "SGD": "sgd",
    "AdaGrad": "adagrad",
}
# Okabe and Ito's blue and vermilion; the shapes differ too.
COLOURS = {"images": "#0072b2", "text": "#d55e00"}
MARKS = {"images": "o", "text": "s"}
BOXES = {"images": "round", "text": "square"}
LEAST, MOST = 0.05, 100.0  # %, the ends of the right panel


class Place(NamedTuple):
    method: str
    problem: str
    kind: str
    rank: float
    whole: bool  # whether all methods of RANKED were run with seeds that chose nothing


def places(found: list[Comparison]) -> list[Place]:
    """The rank of each method on each problem."""
    listed = []
    for one in found:
        rows = {name: one.row(method) for name, method in RANKED.items()}
        sign = 1 if one.judge.higher_is_better else -1
        ranks = comparison.ranks({n: sign * one.final(r).mean for n, r in rows.items() if r})
        whole = all(row is not None and not row.chosen_by_its_seeds for row in rows.values())
        listed += [
            Place(name, one.short_title, one.kind, rank, whole) for name, rank in ranks.items()
        ]
    return listed


def mean_ranks(listed: list[Place]) -> dict[str, float]:
    """Over the problems with all methods; the best method first."""
    whole = {name: [p.rank for p in listed if p.method == name and p.whole] for name in RANKED}
    means = {name: statistics.fmean(ranks) for name, ranks in whole.items() if ranks}
    return dict(sorted(means.items(), key=lambda item: item[1]))


class Cost(NamedTuple):
    """What the worse of the two rates beside the best one loses."""

    problem: str
    kind: str
    percent: float
    both: bool  # whether both were run


def step_costs(found: list[Comparison]) -> dict[str, list[Cost]]:
    """By method, on the problems with all of them, in the same order."""
    costs: dict[str, list[Cost]] = {name: [] for name in RANKED}
    for one in found:
        rows = {name: row for name, method in RANKED.items() if (row := one.row(method))}
        profiles = {name: profile(one, row) for name, row in rows.items() if row.searched_lr}
        if len(profiles) < len(RANKED):
            continue
        for name, rates in profiles.items():
            known = [side for side in comparison.one_step_off(rates) if side is not None]
            worst = max(known, default=math.inf)
            costs[name].append(Cost(one.short_title, one.kind, worst, len(known) == 2))
    return costs


def medians(costs: dict[str, list[Cost]]) -> dict[str, float]:
    """Over the problems where every method has both sides: one side alone flatters."""
    columns = [
        column for column in zip(*costs.values(), strict=True) if all(c.both for c in column)
    ]
    return {
        name: statistics.median(column[place].percent for column in columns)
        for place, name in enumerate(costs)
        if columns
    }


def draw(found: list[Comparison]) -> Figure:
    """Narrow, so that it can be read on a phone."""
    listed = places(found)
    means = mean_ranks(listed)
    with plt.rc_context({"font.size": 13}):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(6.4, 15.6), height_ratios=(1.27, 1.2), layout="constrained"
        )
        figure.set_facecolor("white")
        _ranks(top, listed, means)
        _costs(bottom, found, list(means))
        handles = [
            Line2D([], [], color=colour, marker=MARKS[kind], linestyle="", markersize=9, label=kind)
            for kind, colour in COLOURS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontweight="bold")
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for y in range(1, len(names)):
        axes.axhline(y - 0.5, color="#d0d0d0", linewidth=0.8)


def _ranks(axes: Axes, listed: list[Place], means: dict[str, float]) -> None:
    _rows(axes, [f"{name}\nmean {mean:.1f}" for name, mean in means.items()])
    for y, name in enumerate(means):
        for rank in sorted({place.rank for place in listed if place.method == name}):
            here = [p for p in listed if p.method == name and p.rank == rank]
            for place, shift in zip(here, _shifts(len(here), 0.23), strict=True):
                colour = COLOURS[place.kind]
                axes.text(
                    rank, y + shift, place.problem, ha="center", va="center", fontsize=10.5,
                    color="white" if place.whole else colour,
                    bbox={
                        "boxstyle": f"{BOXES[place.kind]},pad=0.22",
                        "facecolor": colour if place.whole else "white",
                        "edgecolor": colour,
                    },
                )  # fmt: skip
    axes.set_xlim(0.45, len(RANKED) + 0.55)
    axes.set_xticks(range(1, len(RANKED) + 1), ["1st", "2nd", "3rd", "4th", "5th"])
    axes.xaxis.tick_top()
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0)
    title = "Rank by the mean result"
    if not all(place.whole for place in listed):
        title += " (white: a method\nlacks seeds, so it is not in the mean)"
    axes.set_title(title, fontsize=12)


def _shifts(count: int, step: float) -> list[float]:
    """Where labels of one cell go, from top to bottom; closer together if there are many."""
    step = min(step, 0.92 / max(count, 1))
    return [step * (place - (count - 1) / 2) for place in range(count)]


def _costs(axes: Axes, found: list[Comparison], names: list[str]) -> None:
    _rows(axes, names)
    costs = step_costs(found)
    middles = medians(costs)
    for y, name in enumerate(names):
        for cost, shift in zip(costs[name], _shifts(len(costs[name]), 0.16), strict=True):
            x = min(max(cost.percent, LEAST), MOST)
            colour, left = COLOURS[cost.kind], x > MOST / 4
            axes.plot(
                x, y + shift, MARKS[cost.kind], markersize=9, color=colour,
                fillstyle="full" if cost.both else "none", markeredgewidth=1.6, zorder=4,
            )  # fmt: skip
            axes.annotate(
                cost.problem, (x, y + shift), (-9 if left else 9, 0), textcoords="offset points",
                ha="right" if left else "left", va="center", fontsize=10.5, color=colour,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip
        if name in middles:
            middle = min(max(middles[name], LEAST), MOST)
            axes.plot([middle] * 2, [y - 0.44, y + 0.44], color="black", linewidth=2, zorder=1.5)
    axes.set(xscale="log", xlim=(LEAST * 0.85, MOST * 1.3))
    ticks = (0.1, 1, 10, 100)
    axes.set_xticks(ticks, [f"{value:g} %{'+' if value == MOST else ''}" for value in ticks])
    axes.xaxis.minorticks_off()
    axes.grid(axis="x", color="#e8e8e8")
    axes.set_axisbelow(True)
    opened = any(not cost.both for row in costs.values() for cost in row)
    axes.set_title(
        "What a rate one step (×2 to ×2.5) off the best loses,\n"
        "on the worse side, by one seed, where all were run\n"
        + ("(open: one side only; bar: median without these)" if opened else "(bar: median)"),
        fontsize=12,
    )
