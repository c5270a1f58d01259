"""What each seed gained or lost with its state in codes: one row per problem, one dot per seed.

python benchmarks/compact/plot_compact.py docs/results/compact compact.png
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import stdev

import matplotlib.pyplot as plt
from compact_table import Row, rows, signed
from matplotlib.axes import Axes

from cubegrad.study import statistics
from cubegrad.study.records import Runs

DOT, BAR = "#7f8c9b", "#c7402d"
PANELS = {"gpu": "on a GPU", "cpu": "at the CPU sizes"}


def spread(row: Row) -> float:
    """How far two seeds with a float32 state are apart: their standard deviation."""
    return stdev(row.float32) or 1.0


def label(row: Row, panel: list[Row]) -> str:
    """The problem and the metric, and whatever else tells the row from the others."""
    own, others = row.settings, [other.settings for other in panel]
    alike = [other for other in others if other.problem == own.problem]
    parts = {"method": own.method, "lr": f"lr {own.lr:g}", "epochs": f"{own.epochs} epochs"}
    apart = [text for name, text in parts.items() if len({getattr(o, name) for o in alike}) > 1]
    return f"{' '.join([own.problem, *apart])}, {row.metric}"


def draw(axes: Axes, panel: list[Row]) -> None:
    for place, row in enumerate(panel):
        gains = [gain / spread(row) for gain in row.gains]
        mean = statistics.estimate(gains)
        axes.errorbar(mean.mean, place, xerr=mean.error, fmt="D", color=BAR, capsize=4, zorder=3)
        axes.scatter(gains, [place] * len(gains), s=26, color=DOT, alpha=0.8, linewidths=0)
        text = f"{signed(row.gain, row.unit)} {row.unit}"
        axes.annotate(text, (1.02, place), xycoords=("axes fraction", "data"), va="center")
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(panel)), [label(row, panel) for row in panel])
    axes.invert_yaxis()
    most = max((abs(x) for x in axes.get_xlim()), default=1.0)
    axes.set_xlim(-most, most)
    axes.set_xlabel("← worse     with codes, in standard deviations between seeds     better →")
    axes.grid(axis="x", alpha=0.25)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="a folder with records.jsonl")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(words)
    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows(Runs(options.runs).load()[0].values()):
        panels[row.settings.preset].append(row)
    shown = [preset for preset in PANELS if panels[preset]]
    height = 1.2 + 0.36 * max(len(panels[preset]) for preset in shown)
    size = (7.2 * len(shown), height + 0.5)
    figure, grid = plt.subplots(1, len(shown), figsize=size, squeeze=False, layout="constrained")
    for axes, preset in zip(grid.flat, shown, strict=True):
        draw(axes, panels[preset])
        axes.set_title(PANELS[preset], fontsize=10)
    figure.suptitle("A dot is a seed, a diamond their mean ± 2 standard errors", fontsize=10)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
