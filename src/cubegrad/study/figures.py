"""Statistics -> plots, in the paper's layout: test left, training right, ± two standard errors."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from cubegrad.study.methods import estimates
from cubegrad.study.statistics import Estimate, Judge, Summary
from cubegrad.study.styles import COLOURS, LINES, by_lr, names, rows, style
from cubegrad.study.wording import one_line

# Text is not converted to paths, and the same numbers give the same file.
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "cubegrad", "font.size": 10}

LARGEST = 1e100  # larger values are not drawn: matplotlib overflows long before a float does

Draw = Callable[[Axes, Sequence[Summary]], None]


def _labels(summaries: Sequence[Summary]) -> dict[str, str]:
    labels = {entry: _literal(name) for entry, name in names(summaries).items()}
    # Matplotlib leaves labels that begin with "_" out of a legend.
    return {entry: f" {name}" if name.startswith("_") else name for entry, name in labels.items()}


def _literal(text: str) -> str:
    """Escape dollars: matplotlib would read a formula between two of them."""
    return one_line(text).replace("$", r"\$")


def _measure(judge: Judge, unit: str) -> str:
    return _literal(f"{judge.metric}{f', {unit}' if unit else ''}")


def _drawable(value: float | None) -> float:
    return value if value is not None and abs(value) <= LARGEST else math.nan


class _Plain(LogFormatter):
    """Labels a logarithmic axis where matplotlib would, but with 0.2 instead of 2 x 10^-1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw_curves(
    axes: Axes, summaries: Sequence[Summary], metric: str, styles: dict[str, int], log: bool
) -> None:
    labels = _labels(summaries)
    log = log and _positive(point for s in summaries for point in s.curves.get(metric, []))
    for summary in summaries:
        curve = summary.curves.get(metric)
        if curve and summary.best is not None:
            label = _with_lr(labels[summary.entry], summary.method, summary.best[0])
            _draw_curve(axes, curve, label, styles[summary.entry], log)
    _by_epoch(axes, log)


def _positive(points: Iterable[Estimate]) -> bool:
    """Whether a logarithmic axis can show them; a log-likelihood may be negative."""
    means = [_drawable(point.mean) for point in points]
    return not all(map(math.isnan, means)) and not any(mean <= 0 for mean in means)


def _draw_curve(axes: Axes, curve: Sequence[Estimate], label: str, index: int, log: bool) -> None:
    epochs = range(1, len(curve) + 1)
    low, mean, high = zip(*(_band(point) for point in curve), strict=True)
    if log:
        low = tuple(max(value, middle / 10) for value, middle in zip(low, mean, strict=True))
    axes.plot(epochs, mean, linestyle=LINES[index], color=COLOURS[index], label=label)
    axes.fill_between(epochs, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)


def _with_lr(label: str, method: str, lr: float) -> str:
    """Append the lr, or the factor of an estimated one unless it is 1."""
    if estimates(method):
        return label if lr == 1 else f"{label}, factor {lr:g}"
    return f"{label}, lr {lr:g}"


def _by_epoch(axes: Axes, log: bool) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_Plain())
        axes.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.7)))


def _band(point: Estimate) -> tuple[float, float, float]:
    error = point.error or 0.0
    low, mean, high = map(_drawable, (point.mean - error, point.mean, point.mean + error))
    return low, mean, high


def draw_test(
    axes: Axes, summaries: Sequence[Summary], judge: Judge, unit: str, styles: dict[str, int]
) -> None:
    draw_curves(axes, summaries, judge.metric, styles, log=False)
    axes.set_ylabel(f"test {_measure(judge, unit)}")
    # Without the first quarter, whose climb would flatten the differences at the end.
    curves = [summary.curves.get(judge.metric, []) for summary in summaries]
    late = [_drawable(point.mean) for curve in curves for point in curve[len(curve) // 4 :]]
    late += [end for curve in curves if curve for end in _band(curve[-1])]
    late = [value for value in late if not math.isnan(value)]
    if late and max(late) > min(late):
        margin = 0.08 * (max(late) - min(late))
        axes.set_ylim(min(late) - margin, max(late) + margin)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:  # matplotlib warns about an empty legend
        axes.legend(frameon=False, fontsize=9)


def draw_train(axes: Axes, summaries: Sequence[Summary], styles: dict[str, int]) -> None:
    draw_curves(axes, summaries, "train_loss", styles, log=True)
    axes.set_ylabel("training loss")
    _legend(axes)


def draw_lrs(
    axes: Axes, summaries: Sequence[Summary], judge: Judge, unit: str, styles: dict[str, int]
) -> None:
    """The metric of the search by learning rate; a cross at the bottom is a diverged run.

    A method that estimates its learning rate is a horizontal line. If all methods do, the axis
    shows their factors instead. Methods that were run with other seeds only are not shown.
    """
    labels = _labels(summaries)
    summaries = by_lr(summaries)
    factors = all(estimates(summary.method) for summary in summaries)
    for summary in summaries:
        index = styles[summary.entry]
        if estimates(summary.method) and not factors:
            _draw_horizontal(axes, summary, labels[summary.entry], index)
            continue
        points = [(lr, value) for lr, value in summary.lr_curve if 1 / LARGEST <= lr <= LARGEST]
        known = [(lr, value) for lr, value in points if not math.isnan(_drawable(value))]
        lost = [lr for lr, value in points if value is None]
        if known:
            axes.plot(
                *zip(*known, strict=True),
                linestyle=LINES[index],
                color=COLOURS[index],
                marker="o",
                markersize=4,
                label=labels[summary.entry],
            )
        if lost:
            bottom = axes.get_xaxis_transform()
            axes.plot(lost, [0.02] * len(lost), "x", color=COLOURS[index], transform=bottom)
    drawn = [[_drawable(value) for _, value in s.lr_curve] for s in summaries]
    curves = [[value for value in curve if not math.isnan(value)] for curve in drawn]
    if any(curves):
        axes.set_ylim(*visible(curves, judge.higher_is_better))
    axes.set(
        xscale="log",
        xlabel="factor of the estimated learning rate" if factors else "learning rate",
        ylabel=_measure(judge, unit),
    )
    axes.grid(alpha=0.3)
    _legend(axes)


def _draw_horizontal(axes: Axes, summary: Summary, label: str, index: int) -> None:
    for lr, value in summary.lr_curve:
        height = _drawable(value)
        if summary.best is not None and lr == summary.best[0] and not math.isnan(height):
            label = _with_lr(label, summary.method, lr)
            axes.axhline(height, linestyle=LINES[index], color=COLOURS[index], label=label)


def visible(curves: Sequence[Sequence[float]], higher_is_better: bool) -> tuple[float, float]:
    """Limits that show the better three quarters of all points, and two of every curve.

    One rate that learns nothing would flatten the rest.
    """
    ranked = [sorted(curve, reverse=higher_is_better) for curve in curves if curve]
    together = sorted((v for curve in ranked for v in curve), reverse=higher_is_better)
    shown = together[: len(together) - len(together) // 4]
    shown += [v for curve in ranked for v in curve[:2]]
    low, high = min(shown), max(shown)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or math.ulp(1.0)
    return low - margin, high + margin


def _name_row(axes: Axes, line: Sequence[Summary], several: bool) -> None:
    if several:
        axes.set_title(_literal(line[0].entry.partition("@")[2]), loc="left", fontsize=10)


def curves(summaries: Sequence[Summary], judge: Judge, unit: str, title: str) -> Figure:
    """The whole figure: one row per schedule, test left and training right."""
    lines, styles = rows(summaries), style(summaries)
    figure = Figure(figsize=(10, 4 * len(lines) + 0.4), layout="constrained")
    panels = figure.subplots(len(lines), 2, squeeze=False)
    for line, (left, right) in zip(lines, panels, strict=True):
        draw_test(left, line, judge, unit, styles)
        draw_train(right, line, styles)
        _name_row(left, line, len(lines) > 1)
    figure.suptitle(_literal(title), fontsize=11)
    return figure


def lr_figure(summaries: Sequence[Summary], judge: Judge, unit: str, title: str) -> Figure:
    """One panel per row of `curves`."""
    lines, styles = rows(summaries), style(summaries)
    draw = partial(draw_lrs, judge=judge, unit=unit, styles=styles)
    return _stacked(lines, draw, len(lines) > 1, title)


def _stacked(lines: Sequence[Sequence[Summary]], draw: Draw, several: bool, title: str) -> Figure:
    figure = Figure(figsize=(7, 4 * len(lines) + 0.4), layout="constrained")
    for line, (axes,) in zip(lines, figure.subplots(len(lines), 1, squeeze=False), strict=True):
        draw(axes, line)
        _name_row(axes, line, several)
    figure.suptitle(_literal(title), fontsize=11)
    return figure


def draw_estimates(axes: Axes, summaries: Sequence[Summary], styles: dict[str, int]) -> None:
    """Estimated learning rates before the schedule, and the best of MADGRAD's search."""
    labels = _labels(summaries)
    log = _positive(point for summary in summaries for point in summary.estimated_lr())
    for summary in summaries:
        curve, index = summary.estimated_lr(), styles[summary.entry]
        if curve and summary.best is not None:
            label = _with_lr(labels[summary.entry], summary.method, summary.best[0])
            _draw_curve(axes, curve, label, index, log)
        if summary.method == "madgrad" and summary.best is not None and len(summary.lr_curve) > 1:
            label = f"{labels[summary.entry]}, best lr {summary.best[0]:g}"
            axes.axhline(summary.best[0], linestyle="--", color=COLOURS[index], label=label)
    _by_epoch(axes, log)
    axes.set_ylabel("estimated learning rate")
    _legend(axes)


def estimated(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """The rows of `curves` that have a method which estimates its learning rate."""
    return [line for line in rows(summaries) if any(s.estimated_lr() for s in line)]


def estimate_figure(summaries: Sequence[Summary], title: str) -> Figure:
    """One panel per row of `estimated`."""
    draw = partial(draw_estimates, styles=style(summaries))
    return _stacked(estimated(summaries), draw, len(rows(summaries)) > 1, title)


def save(figure: Figure, path: Path) -> None:
    """Save as PNG and as SVG."""
    with mpl.rc_context(STYLE):
        # Not with_suffix, which would cut "net1.5-curves" at the dot.
        figure.savefig(path.with_name(f"{path.name}.png"), dpi=150)
        figure.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None})
