"""Where an estimated learning rate lands among fixed ones: one dot per run, one panel per problem.

PYTHONPATH=src python3 benchmarks/plot_auto.py docs/results/auto/records.jsonl auto.png
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

FIXED, AUTO = "madgrad", "madgrad-auto"
STYLES: dict[str, dict[str, Any]] = {
    FIXED: {"color": "#7f8c9b", "marker": "o", "label": "a fixed lr"},
    AUTO: {"color": "#c7402d", "marker": "D", "label": 'lr="auto", at its last estimate'},
}
BEYOND = 20.0  # runs further from the best than 20 times the better half are left out


def panels(lines: Iterable[str]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """Finished runs by problem and decay, if there are runs of both methods."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for record in map(json.loads, lines):
        settings = record["settings"]
        if settings["method"] in STYLES and record["status"] == "finished":
            groups[settings["problem"], settings["decay"]].append(record)
    kinds = {key: {r["settings"]["method"] for r in runs} for key, runs in groups.items()}
    return {key: runs for key, runs in sorted(groups.items()) if len(kinds[key]) == len(STYLES)}


def point(record: dict[str, Any]) -> tuple[float, float]:
    """Learning rate and result."""
    curve, settings = record["curve"], record["settings"]
    rates = curve.get("estimated_lr")
    lr = rates[-1] * settings["lr"] if rates else settings["lr"]
    return lr, curve[record["about"]["metric"]][-1]


def limits(values: list[float], higher_is_better: bool) -> tuple[float, float]:
    """Around the better half of the runs, so that one that failed does not flatten the others."""
    ranked = sorted(values, reverse=higher_is_better)
    best, middle = ranked[0], ranked[len(ranked) // 2]
    half_range = abs(best - middle) or abs(best) or 1.0
    shown = [value for value in values if abs(value - best) <= BEYOND * half_range]
    room = 0.08 * (max(shown) - min(shown) or 1.0)
    return min(shown) - room, max(shown) + room


def draw(axes: Axes, key: tuple[str, float], runs: list[dict[str, Any]]) -> None:
    about = runs[0]["about"]
    points = {name: [point(r) for r in runs if r["settings"]["method"] == name] for name in STYLES}
    low, high = limits([y for some in points.values() for _, y in some], about["higher_is_better"])
    hidden = sum(not low <= y <= high for some in points.values() for _, y in some)
    for name, style in STYLES.items():
        x, y = zip(*points[name], strict=True)
        axes.scatter(x, y, s=30, alpha=0.85, linewidths=0, **style)
    axes.set(xscale="log", ylim=(low, high), xlabel="learning rate")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    arrow = "higher is better" if about["higher_is_better"] else "lower is better"
    axes.set_ylabel(f"{about['metric']}, {about['unit'] or '1'} ({arrow})".replace(", 1", ""))
    left_out = f"; {hidden} worse left out" if hidden else ""
    axes.set_title(f"{key[0]}, decay {key[1]:g}{left_out}", fontsize=10)
    axes.grid(alpha=0.25)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(words)
    groups = panels(options.records.read_text().splitlines())
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    size = (4.3 * columns, 3.4 * rows + 0.5)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    for axes, (key, runs) in zip(grid.flat, groups.items(), strict=False):
        draw(axes, key, runs)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
