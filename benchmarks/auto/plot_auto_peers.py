"""How far each method is behind the best one on each problem: one row per problem.

python benchmarks/auto/plot_auto_peers.py docs/results/peers peers.png
"""

import argparse
import math
from pathlib import Path

import matplotlib.pyplot as plt
from auto_table import COLUMNS, OURS, Result, results
from matplotlib.figure import Figure

from cubegrad.study.records import Runs

LIMIT = 10.0  # %; what is further behind is drawn there
# Ours stand out; what needs no search is filled, tuned methods are open.
MARKS = {
    "madgradw-auto": ("*", "#a30000"),
    "madgradw-auto-compact": ("X", "#a30000"),
    "madgradw-auto-schedule-free": ("p", "#e69f00"),
    "madgrad-auto": ("D", "#d55e00"),
    "madgrad-auto-compact": ("d", "#d55e00"),
    "prodigy": ("o", "#0072b2"),
    "prodigy, warm-up": ("h", "#56b4e9"),
    "dadapt-adam": ("s", "#009e73"),
    "dog": ("^", "#cc79a7"),
    "ldog": ("v", "#cc79a7"),
    "schedulefree-adamw": ("P", "#7f7f7f"),
    "schedulefree-adamw, tuned": ("P", "#7f7f7f"),
    "adamw": ("o", "#000000"),
    "madgrad": ("D", "#d55e00"),
}
TUNED = ("schedulefree-adamw, tuned", "adamw", "madgrad")  # drawn open


def behind(one: Result, column: str) -> float:
    """In % of the best result of the row."""
    best = one.best(one.reached)
    share = 100 * one.behind(column, best) / abs(one.reached[best].mean)
    return min(share, LIMIT) if math.isfinite(share) else LIMIT


def draw(found: list[Result]) -> Figure:
    figure, axes = plt.subplots(figsize=(9.5, 1.9 + 0.55 * len(found)), layout="constrained")
    for column, (marker, colour) in MARKS.items():
        points = [(behind(o, column), y) for y, o in enumerate(found) if column in o.reached]
        if points:
            axes.scatter(
                *zip(*points, strict=True),
                s=75 if column in OURS else 45,
                marker=marker,
                facecolors="none" if column in TUNED else colour,
                edgecolors=colour,
                label=COLUMNS[column].replace("`", ""),
                zorder=4 if column in OURS else 3,
            )
    for place in range(len(found)):
        axes.axhline(place, color="#dddddd", linewidth=0.8, zorder=1)
    axes.set_yticks(range(len(found)), [f"{o.problem}\n{o.about['metric']}" for o in found])
    axes.set(xlim=(-0.3, LIMIT + 0.3), xlabel="% behind the best of the row (10: or more)")
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    title = "Filled: no learning rate, or the default. Open: the best of a search."
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="a folder with records.jsonl")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(words)
    found = results(Runs(options.runs).load()[0].values())
    draw([one for one in found if set(one.reached) - set(OURS)]).savefig(options.out, dpi=140)


if __name__ == "__main__":
    main()
