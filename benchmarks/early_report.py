"""The tables and the figure of `early_progress.py`."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from early_methods import as_in_madgrad, factors

Record = dict[str, Any]
SHARES = (0.05, 0.1, 0.3, 0.5, 1.0)  # of the run, after which a table has the loss
ADAM, MADGRAD, MAIN = "Adam", "MADGRAD", "10% linear"
ATTENTION, EMBEDDING = 1, 2  # places in "moves"
# Okabe and Ito's palette. A method with its root exchanged has the colour of its root.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"
ROOTS = {
    ADAM: (BLUE, "-", "Adam"),
    "MADGRAD, square root": (BLUE, "--", "MADGRAD with a square root"),
    MADGRAD: (ORANGE, "-", "MADGRAD"),
    "Adam, cube root": (ORANGE, "--", "Adam with a cube root"),
}
WARM_UPS = {"0%": "#F0B48A", "2%": "#E6864A", "10%": "#D55E00", "50%": "#7A2E00"}


def loss_at(record: Record, share: float) -> float:
    found = record["validation"].get(f"{share:g}", math.inf)  # a run that diverged has ended
    return float(found) if math.isfinite(found) else math.inf


def best(records: Sequence[Record], share: float) -> float:
    """The learning rate of the run with the lowest loss after this share of its steps."""
    return float(min(records, key=lambda record: loss_at(record, share))["lr"])


def chosen(
    records: Sequence[Record], method: str, schedule: str, share: float = 1.0
) -> list[Record]:
    """All seeds at the learning rate that was best with the first one."""
    mine = [r for r in records if (r["method"], r["schedule"]) == (method, schedule)]
    if not mine:
        return []
    lr = best([record for record in mine if record["seed"] == 0], share)
    return sorted((r for r in mine if r["lr"] == lr), key=lambda record: int(record["seed"]))


def mean(values: Sequence[float], sign: str = "") -> str:
    """With two standard errors."""
    if len(values) < 2:
        return f"{values[0]:{sign}.3f}"
    error = 2 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):{sign}.3f} ± {error:.3f}"


def attention_share(runs: Sequence[Record]) -> float:
    """How far the attention's weights move for a move of the embedding, in the first half."""
    moves = [move for run in runs for move in run["moves"][: len(run["moves"]) // 2]]
    return statistics.geometric_mean(move[ATTENTION] / move[EMBEDDING] for move in moves)


def row(runs: Sequence[Record], peers: Sequence[Record], lr: str) -> list[str]:
    by_seed = {peer["seed"]: loss_at(peer, 1.0) for peer in peers}
    above = [loss_at(run, 1.0) - by_seed[run["seed"]] for run in runs if run["seed"] in by_seed]
    cells = [runs[0]["method"], runs[0]["schedule"], lr, str(len(runs))]
    cells += [f"{statistics.fmean(loss_at(run, share) for run in runs):.2f}" for share in SHARES]
    cells.append(f"{attention_share(runs):.2f}")
    return [*cells, "" if runs[0]["method"] == ADAM else mean(above, "+") if above else "?"]


def table(records: Sequence[Record], pairs: Sequence[tuple[str, str]]) -> str:
    """A row for each (method, schedule); the last column is seed for seed."""
    shares = [f"{share:.0%}" for share in SHARES[:-1]]
    head = ["method", "warm-up and decay", "lr", "seeds", *shares, "end", "attention/embedding"]
    lines = [[*head, "end, above Adam"]]
    for method, schedule in pairs:
        plain = schedule.split(",")[0]
        runs, peers = chosen(records, method, schedule), chosen(records, ADAM, plain)
        if runs:
            lines.append(row(runs, peers, f"{runs[0]['lr']:g}"))
            early = chosen(records, method, schedule, 0.1)
            if len(early) > 1 and early[0]["lr"] != runs[0]["lr"]:
                lines.append(row(early, peers, f"{early[0]['lr']:g} (best at 10%)"))
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def step_table(records: Sequence[Record]) -> str:
    """Step sizes relative to those at the end of the warm-up, as predicted and as measured."""
    lines = [["", "schedule", *(f"{share:.1%}" for share in (0.025, 0.05, 0.1, 0.3, 0.5, 0.75))]]
    for schedule in ("10% linear", "50% linear"):
        for method in (ADAM, MADGRAD):
            runs = chosen(records, method, schedule)
            if not runs:
                continue
            steps, count = runs[0]["steps"], len(runs[0]["moves"])
            each = steps // count
            sizes = factors(schedule, steps)
            predicted = (as_in_madgrad(sizes) if method == MADGRAD else sizes)[each - 1 :: each]
            measured = [
                statistics.geometric_mean(max(run["moves"][place][0], 1e-12) for run in runs)
                for place in range(count)
            ]
            peak = round(float(schedule.split("%")[0]) / 100 * count) - 1
            for name, found in (("predicted", predicted), ("measured", measured)):
                places = [round(share * count) - 1 for share in (0.025, 0.05, 0.1, 0.3, 0.5, 0.75)]
                values = [f"{found[place] / found[peak]:.2f}" for place in places]
                lines.append([f"{method}, {name}", schedule, *values])
    return markdown(lines)


def mean_curve(runs: Sequence[Record], part: int | None = None) -> list[float]:
    """The training loss, or the ratio of moves (attention over embedding), by the mean of seeds."""
    if part is None:
        return [statistics.fmean(at) for at in zip(*(run["curve"] for run in runs), strict=True)]
    moves = zip(*(run["moves"] for run in runs), strict=True)
    return [statistics.geometric_mean(one[part] / one[EMBEDDING] for one in at) for at in moves]


def draw(records: Sequence[Record], path: Path) -> None:
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    for method, (colour, dash, label) in ROOTS.items():
        runs = chosen(records, method, MAIN)
        if not runs:
            continue
        losses, ratios = mean_curve(runs), mean_curve(runs, ATTENTION)
        x = [100 * (place + 1) / len(losses) for place in range(len(losses))]
        style: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": 1.8}
        left.plot(x, losses, label=label, **style)
        middle.plot(x[:-1], ratios[:-1], label=label, **style)
    for warm, colour in WARM_UPS.items():
        pair = [chosen(records, method, f"{warm} linear") for method in (ADAM, MADGRAD)]
        if not all(pair):
            continue
        adam, madgrad = (mean_curve(runs) for runs in pair)
        x = [100 * (place + 1) / len(adam) for place in range(len(adam))]
        above = [b - a for a, b in zip(adam, madgrad, strict=True)]
        right.plot(x, above, color=colour, linewidth=1.8, label=f"warm-up of {warm}")
    left.set(title="The cube root makes the middle of the run slow", ylabel="training loss (bits)")
    left.set(ylim=(2.7, 4.6))
    left.legend(frameon=False)
    middle.set(title="because attention's small gradients get small steps", yscale="log")
    middle.set(ylabel="step of the attention's weights / of the embedding")
    right.set(title="Early: the longer the warm-up, the larger MADGRAD's lead")
    right.set(ylabel="MADGRAD's loss − Adam's (bits)")
    right.axhline(0, color=GREY, linewidth=0.8)
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.set(xlabel="% of the steps", xlim=(0, 100))
    figure.savefig(path, dpi=130)
