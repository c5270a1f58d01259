"""The tables and the figure of `early_progress.py`."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from early_methods import as_in_madgrad, factors

Record = dict[str, Any]
SHARES = (0.05, 0.1, 0.3, 0.5, 1.0)  # of the run, after which a table has the loss
ADAM, MADGRAD, MAIN = "Adam", "MADGRAD", "10% linear"
AS_ADAM = f"{MAIN}, as in Adam"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"  # Okabe and Ito's palette
CURVES = {
    (MADGRAD, MAIN): (ORANGE, "-", "MADGRAD"),
    ("MirrorMADGRAD", MAIN): (ORANGE, "--", "MADGRAD without x₀ (mirror form)"),
    ("MADGRAD, square root", AS_ADAM): (ORANGE, ":", "MADGRAD, square root, Adam's step sizes"),
    (ADAM, MAIN): (BLUE, "-", "Adam"),
}
BARS = {
    ("Adam, whole-run mean", MAIN): "Adam, whole-run mean of g²",
    ("Adam, cube root between tensors", MAIN): "Adam, cube root between tensors",
    ("Adam, cube root inside tensors", MAIN): "Adam, cube root inside tensors",
    ("Adam, cube root", MAIN): "Adam, cube root",
    (MADGRAD, MAIN): "MADGRAD",
    (MADGRAD, AS_ADAM): "MADGRAD, Adam's step sizes",
    ("MirrorMADGRAD", MAIN): "MADGRAD without x₀ (mirror form)",
    ("MADGRAD, square root", MAIN): "MADGRAD, square root",
    ("MADGRAD, square root", AS_ADAM): "MADGRAD, square root, Adam's step sizes",
}
LONG = "50% linear"


def loss_at(record: Record, share: float) -> float:
    found = record["validation"].get(f"{share:g}", math.inf)  # a run that diverged has ended
    return float(found) if math.isfinite(found) else math.inf


def best(records: Sequence[Record], share: float) -> float:
    """The learning rate with the lowest mean loss after this share of the steps.

    Only those that most seeds have run are compared.
    """
    losses: dict[float, list[float]] = defaultdict(list)
    for record in records:
        losses[record["lr"]].append(loss_at(record, share))
    most = max(len(each) for each in losses.values())
    full = {lr: statistics.fmean(each) for lr, each in losses.items() if len(each) == most}
    return min(full, key=lambda lr: full[lr])


def chosen(
    records: Sequence[Record], method: str, schedule: str, share: float = 1.0
) -> list[Record]:
    """The seeds at the best learning rate."""
    mine = [r for r in records if (r["method"], r["schedule"]) == (method, schedule)]
    lr = best(mine, share) if mine else None
    return sorted((r for r in mine if r["lr"] == lr), key=lambda record: int(record["seed"]))


def mean(values: Sequence[float], sign: str = "") -> str:
    """With two standard errors."""
    if len(values) < 2:
        return f"{values[0]:{sign}.3f}"
    error = 2 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{sign}.3f} ± {error:.3f}"


def above(runs: Sequence[Record], peers: Sequence[Record]) -> list[float]:
    """How far the last loss is above the peer's, seed for seed."""
    last = {peer["seed"]: loss_at(peer, 1.0) for peer in peers}
    return [loss_at(run, 1.0) - last[run["seed"]] for run in runs if run["seed"] in last]


def row(runs: Sequence[Record], peers: Sequence[Record], lr: str) -> list[str]:
    cells = [runs[0]["method"], runs[0]["schedule"], lr, str(len(runs))]
    cells += [f"{statistics.fmean(loss_at(run, share) for run in runs):.2f}" for share in SHARES]
    differences = [] if runs is peers else above(runs, peers)
    return [*cells, mean(differences, "+") if differences else ""]


def table(records: Sequence[Record], pairs: Sequence[tuple[str, str]]) -> str:
    """A row for each (method, schedule); the last column is seed for seed."""
    shares = [f"{share:.0%}" for share in SHARES[:-1]]
    head = ["method", "warm-up and decay", "lr", "seeds", *shares, "end", "end, above Adam"]
    lines = [head]
    for method, schedule in pairs:
        plain = schedule.split(",")[0]
        peers = chosen(records, ADAM, plain)
        runs = peers if (method, schedule) == (ADAM, plain) else chosen(records, method, schedule)
        if runs:
            lines.append(row(runs, peers, f"{runs[0]['lr']:g}"))
            early = chosen(records, method, schedule, 0.1)
            if len(early) > 1 and early[0]["lr"] != runs[0]["lr"]:
                lines.append(row(early, peers, f"{early[0]['lr']:g} (best at 10%)"))
    return markdown(lines)


def first_seed(records: Sequence[Record], method: str, schedule: str) -> list[Record]:
    keys = {"method": method, "schedule": schedule, "seed": 0}
    mine = [r for r in records if all(r[key] == value for key, value in keys.items())]
    return sorted(mine, key=lambda record: float(record["lr"]))


def lr_table(records: Sequence[Record]) -> str:
    """What each learning rate gives early and at the end, with the first seed."""
    lines = [["method", "warm-up and decay", "lr", "5%", "10%", "end"]]
    for schedule in (MAIN, LONG):
        for run in [*first_seed(records, ADAM, schedule), *first_seed(records, MADGRAD, schedule)]:
            losses = [f"{loss_at(run, share):.2f}" for share in (0.05, 0.1, 1.0)]
            lines.append([run["method"], schedule, f"{run['lr']:g}", *losses])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def step_sizes(records: Sequence[Record], method: str, schedule: str) -> dict[str, list[float]]:
    """At the points of the curve: for gradients that are all of one size, and measured."""
    runs = chosen(records, method, schedule)
    steps, count = runs[0]["steps"], len(runs[0]["moves"])
    sizes = factors(schedule, steps)
    sizes = as_in_madgrad(sizes) if method == MADGRAD else sizes
    moves = zip(*(run["moves"] for run in runs), strict=True)
    measured = [statistics.geometric_mean(max(one, 1e-12) for one in at) for at in moves]
    return {"predicted": sizes[steps // count - 1 :: steps // count], "measured": measured}


def step_table(records: Sequence[Record]) -> str:
    """MADGRAD's step over Adam's, relative to what it is at the end of the warm-up."""
    shares = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
    lines = [
        ["warm-up and decay", "MADGRAD's step ÷ Adam's", *(f"{share:.1%}" for share in shares)]
    ]
    for schedule in (MAIN, LONG):
        if all(chosen(records, method, schedule) for method in (ADAM, MADGRAD)):
            adam, ours = (step_sizes(records, method, schedule) for method in (ADAM, MADGRAD))
            for name, found in ours.items():
                ratios = [mine / its for mine, its in zip(found, adam[name], strict=True) if its]
                place = {share: round(share * len(found)) - 1 for share in shares}
                peak = ratios[place[0.1 if schedule == MAIN else 0.5]]
                values = [f"{ratios[place[share]] / peak:.2f}" for share in shares]
                lines.append([schedule, name, *values])
    return markdown(lines)


def mean_curve(runs: Sequence[Record]) -> list[float]:
    """The training loss, by the mean of the seeds."""
    return [statistics.fmean(at) for at in zip(*(run["curve"] for run in runs), strict=True)]


def percent(count: int) -> list[float]:
    return [100 * (place + 1) / count for place in range(count)]


def draw_warm_up(axes: Any, records: Sequence[Record]) -> None:
    """All learning rates of the long warm-up, with the first seed."""
    beside = {"textcoords": "offset points", "va": "center"}
    for method, colour in ((ADAM, BLUE), (MADGRAD, ORANGE)):
        if runs := first_seed(records, method, LONG):
            early, last = ([loss_at(run, share) for run in runs] for share in (0.05, 1.0))
            axes.plot(early, last, "o-", color=colour, linewidth=2, markersize=7)
            for run, x, y in zip(runs, early, last, strict=True):
                shift = (0, -15 if y == min(last) else 15)  # away from the line
                axes.annotate(f"{run['lr']:g}", (x, y), shift, color=colour, ha="center", **beside)
            where = max(zip(early, last, strict=True), key=lambda point: point[1])
            axes.annotate(method, where, (12, 0), color=colour, weight="bold", **beside)
    axes.set(title="1  In a long warm-up lr decides who leads,\nand that says little about the end")
    axes.set(xlabel="validation loss after 5 % of the steps\n(numbers: lr; the warm-up is 50 %)")
    axes.set(ylabel="at the end (bits a byte)")
    axes.margins(0.1, 0.16)


def draw_curves(axes: Any, records: Sequence[Record]) -> None:
    """The two whole methods are named at their curves, which lie apart; the variants above."""
    for pair, (colour, dash, label) in CURVES.items():
        if runs := chosen(records, *pair):
            curve = mean_curve(runs)
            x, style = percent(len(curve)), {"color": colour, "linestyle": dash}
            axes.plot(x, curve, label=label if dash != "-" else None, linewidth=2, **style)
            if dash == "-":
                place, up = round(0.7 * len(curve)), 1 if label == MADGRAD else -1
                ends = {"ha": "left", "va": "bottom"} if up > 0 else {"ha": "right", "va": "top"}
                ends |= {"textcoords": "offset points", "color": colour, "weight": "bold"}
                axes.annotate(label, (x[place], curve[place]), (4 * up, 4 * up), **ends)
    axes.set(title="2  After the warm-up, the pull to x₀\nand the cube root hold MADGRAD back")
    axes.set(xlabel="% of the steps (the warm-up is 10 %)", xlim=(0, 100))
    axes.set(ylabel="training loss (bits a byte)", ylim=(2.8, 4.4))
    if axes.get_legend_handles_labels()[0]:  # the toy size has no variants
        axes.legend(frameon=False, loc="upper right", fontsize=12, handlelength=1.6)


def draw_bars(axes: Any, records: Sequence[Record]) -> None:
    """Each bar's name is above it: beside it, the names would take half of the width."""
    adam, names = chosen(records, ADAM, MAIN), list[str]()
    for pair, label in BARS.items():
        if found := above(chosen(records, *pair), adam):
            colour, y = BLUE if label.startswith(ADAM) else ORANGE, len(names)
            axes.barh(y, statistics.fmean(found), color=colour, alpha=0.55, height=0.4)
            axes.scatter(found, [y] * len(found), 26, color=colour, zorder=3)
            axes.annotate(label, (0, y - 0.25), (3, 0), textcoords="offset points", va="bottom")
            names.append(label)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(names) - 0.5, -0.9)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set(title="3  Parts of MADGRAD in Adam,\nand parts of Adam in MADGRAD")
    axes.set(xlabel="last validation loss − Adam's (bits; dots: seeds)")


def draw(records: Sequence[Record], path: Path) -> None:
    """Narrow, so that it can be read on a phone."""
    from matplotlib import pyplot as plt

    plain = {"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(plain):
        figure, (early, losses, bars) = plt.subplots(
            3, 1, figsize=(6, 15), height_ratios=(1, 1.1, 1.4), layout="constrained"
        )
        draw_warm_up(early, records)
        draw_curves(losses, records)
        draw_bars(bars, records)
        for axes in (early, losses, bars):
            axes.set_title(axes.get_title(), loc="left", fontsize=13.5, fontweight="bold", pad=12)
            axes.set_title("", loc="center")
        figure.get_layout_engine().set(hspace=0.06)
        figure.savefig(path, dpi=150)
        plt.close(figure)
