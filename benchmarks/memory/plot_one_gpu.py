"""What the memory of each run of `one_gpu.py` is made of, at its peak: one stacked bar a run.

python benchmarks/memory/plot_one_gpu.py out.json --out docs/one_gpu.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

# Okabe and Ito's palette.
PARTS = {
    "weights": ("weights", "#0072B2"),
    "gradients": ("gradients", "#E69F00"),
    "state": ("optimizer state", "#009E73"),
    "master_weights": ("master weights", "#CC79A7"),
    "activations and the rest": ("activations and the rest", "#B0B0B0"),
}
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def gigabytes(size: float) -> str:
    return f"{size:.0f}" if size >= 10 else f"{size:.1f}"


def title(report: dict[str, Any], parameters: int) -> str:
    machine, settings = report["machine"], report["settings"]
    packages = ("torch", "transformers", "cubegrad", "flashoptim")
    known = [f"{name} {machine[name]}" for name in packages if machine[name] != "unknown"]
    run = f"{parameters / 1e9:.3g}B bfloat16 parameters, {settings['tokens']:,} tokens a step"
    return (
        f"Peak memory of training on {machine['device']}: {run}\n"
        f"{', '.join(known)}, {machine['date']}"
    )


def draw(report: dict[str, Any]) -> Figure:
    rows = [row for row in report["rows"] if "unavailable" not in row]
    size = (9.5, 1.5 + 0.42 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    most = max(row["memory"]["peak"] for row in rows) / 1e9
    ends = [0.0] * len(rows)
    for part, (label, colour) in PARTS.items():
        sizes = [row["memory"][part] / 1e9 for row in rows]
        axes.barh(range(len(rows)), sizes, left=ends, color=colour, height=0.7, label=label)
        for place, (value, end) in enumerate(zip(sizes, ends, strict=True)):
            if value > 0.03 * most:
                text = gigabytes(value)
                axes.text(end + value / 2, place, text, color="white", ha="center", va="center")
        ends = [end + value for end, value in zip(ends, sizes, strict=True)]
    for place, row in enumerate(rows):
        peak = f"{row['memory']['peak'] / 1e9:.1f} GB"
        axes.text(ends[place] + 0.01 * most, place, peak, va="center", weight="bold")
    axes.set_yticks(range(len(rows)), [row["optimizer"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.14 * most), xlabel="GB (10⁹ bytes)")
    axes.invert_yaxis()
    figure.suptitle(title(report, rows[0]["parameters"]), fontsize=10.5)
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="what one_gpu.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the figure to write")
    args = parser.parse_args(arguments)
    plt.rcParams.update(STYLE)
    draw(json.loads(args.json.read_text())).savefig(args.out, dpi=140)


if __name__ == "__main__":
    main()
