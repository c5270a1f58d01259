"""Plot the results of `step_time.py`.

    python benchmarks/speed/plot_step_time.py out.json --out out.png

Bars are percent of the floor, the speed of a copy. The last panel is the time of a step as the same
number of elements is split into more and more tensors.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

Row = dict[str, Any]

OURS = "cubegrad "
REPLAY = "graph replay"
# Okabe and Ito's palette: cool for cubegrad, warm for the peers, light for a replayed graph.
COLOURS = {
    (True, False): ("#0072B2", "cubegrad"),
    (True, True): ("#56B4E9", "cubegrad, replayed in a CUDA graph"),
    (False, False): ("#D55E00", "peers"),
    (False, True): ("#E69F00", "peers, replayed in a CUDA graph"),
}
COLUMNS = 2
ROW_INCHES = 0.205
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def kind(name: str) -> tuple[bool, bool]:
    """Whether the optimizer is cubegrad's, and whether a graph was replayed."""
    return name.startswith(OURS), name.endswith(REPLAY)


def by_case(report: dict[str, Any]) -> dict[str, list[Row]]:
    tables: defaultdict[str, list[Row]] = defaultdict(list)
    for row in report["rows"]:
        if row["unavailable"] is None:
            tables[row["case"]].append(row)
    return dict(tables)


def head(ax: Axes, case: str, tensors: str, row: Row) -> None:
    millions = row["parameters"] / 1e6
    elements = f"{millions:,.0f}M" if millions >= 10 else f"{millions:.1f}M"
    ax.set_title(case, loc="left", fontsize=10.5, weight="bold", pad=17)
    below = f"{elements} elements in {tensors}, {row['dtype']}"
    ax.annotate(
        below, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=8.5
    )


def bars(ax: Axes, rows: list[Row]) -> None:
    tensors = rows[0]["tensors"]
    head(ax, rows[0]["case"], f"{tensors:,} tensor{'s' if tensors > 1 else ''}", rows[0])
    values = [row["percent_of_floor"] for row in rows]
    colours = [COLOURS[kind(row["optimizer"])][0] for row in rows]
    ax.barh(range(len(rows)), values, color=colours, height=0.76)
    ax.axvline(100, color="0.3", linestyle="--", linewidth=1)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        percent = f"{value:.1f} %" if value >= 0.05 else "<0.1 %"
        time = f"{row['median_ms']:#.3g}".rstrip(".") + " ms"
        for x, text in ((142, percent), (192, time)):
            ax.text(x, place, text, ha="right", va="center", fontsize=8.5)
    names = [row["optimizer"].removeprefix(OURS) for row in rows]
    ax.set_yticks(range(len(rows)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, 192)
    ax.set_xticks((0, 50, 100), ("0", "50 %", "100 %"))
    ax.spines["bottom"].set_bounds(0, 100)


def curves(ax: Axes, rows: list[Row]) -> None:
    sizes = [row["tensors"] for row in rows]
    head(ax, rows[0]["case"], f"{min(sizes):,} to {max(sizes):,} tensors", rows[0])
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        points = [row for row in rows if row["optimizer"] == name]
        counts = [row["tensors"] for row in points]
        times = [row["median_ms"] for row in points]
        quartiles = [
            [abs(row["quartiles_ms"][end] - row["median_ms"]) for row in points] for end in (0, 1)
        ]
        colour, marker = COLOURS[kind(name)][0], "o" if kind(name)[0] else "s"
        ax.errorbar(counts, times, quartiles, color=colour, marker=marker, capsize=2, label=name)
        ax.plot(counts, [row["floor_ms"] for row in points], "--", color=colour, linewidth=1.2)
    ax.plot([], [], "--", color="0.3", linewidth=1.2, label="the floor of each")
    ax.set(xscale="log", yscale="log", xlabel="tensors", ylabel="ms per step (quartiles)")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.grid(color="0.9")
    ax.legend(frameon=False, loc="upper left")


def title(machine: dict[str, str]) -> str:
    packages = ("torch", "triton", "cubegrad", "python")
    known = [f"{name} {machine[name]}" for name in packages if machine[name] != "unknown"]
    return (
        f"One optimizer step on {machine['device']}, in percent of the speed of a copy\n"
        f"{', '.join(known)}, {machine['date']}"
    )


def draw(report: dict[str, Any]) -> Figure:
    tables = by_case(report)
    growth = tables.pop("growth", None)
    cases = list(tables.values())
    lines = -(-(len(cases) + bool(growth)) // COLUMNS)
    # A row of panels is as high as its longest table.
    heights = [max([9, *map(len, cases[COLUMNS * n :][:COLUMNS])]) + 4 for n in range(lines)]
    size = (5 * COLUMNS, ROW_INCHES * sum(heights) + 1)
    figure, axes = plt.subplots(
        lines, COLUMNS, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    panels = list(axes.flat)
    for rows in cases:
        bars(panels.pop(0), rows)
    if growth:
        curves(panels.pop(0), growth)
    for panel in panels:
        panel.set_axis_off()
    used = {kind(row["optimizer"]) for rows in cases for row in rows}
    handles = [Patch(color=c, label=text) for key, (c, text) in COLOURS.items() if key in used]
    figure.suptitle(title(report["machine"]), fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.get_layout_engine().set(w_pad=0.1, hspace=0.04)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what step_time.py wrote with --json")
    parser.add_argument("--out", type=Path, required=True, help="the figure to write")
    args = parser.parse_args(arguments)
    plt.rcParams.update(STYLE)
    draw(json.loads(args.json.read_text())).savefig(args.out, dpi=140)


if __name__ == "__main__":
    main()
