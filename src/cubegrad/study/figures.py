"""Statistics -> plots, in the paper's layout: test left, training right, ± two standard errors."""

import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from cubegrad.study.methods import METHODS, estimates
from cubegrad.study.statistics import Estimate, Judge, Summary

# Okabe and Ito's, which colour-blind readers can tell apart; the lines differ too, for print.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
FIXED = {"madgrad": 0, "sgd": 1, "adam": 2, "adagrad": 3}
# Text stays text, and the same numbers give the same file.
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "cubegrad", "font.size": 10}

Draw = Callable[[Axes, Sequence[Summary]], None]


def names(summaries: Sequence[Summary]) -> dict[str, str]:
    """What to call each entry: its method, with the schedule where that differs."""
    several = len({summary.entry.partition("@")[2] for summary in summaries}) > 1
    labels = {}
    for summary in summaries:
        method, _, schedule = summary.entry.partition("@")
        label = METHODS[method].label if method in METHODS else method
        labels[summary.entry] = f"{label}, {schedule}" if several else label
    return labels


def rows(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """One row of panels a schedule, as in the paper's figure on dual averaging.

    A method under several schedules is one row: there the schedules are what is compared.
    """
    methods = {summary.method for summary in summaries}
    schedules = list(dict.fromkeys(summary.entry.partition("@")[2] for summary in summaries))
    if len(methods) == 1 or len(schedules) == 1:
        return [list(summaries)]
    return [[s for s in summaries if s.entry.partition("@")[2] == one] for one in schedules]


def style(summaries: Sequence[Summary]) -> dict[str, int]:
    """A colour and line for each entry; the same method keeps its own from row to row."""
    keys = [_colour_key(summary, summaries) for summary in summaries]
    others = [key for key in dict.fromkeys(keys) if key not in FIXED]
    taken = {FIXED[key] for key in keys if key in FIXED}
    free = [*range(len(FIXED), len(COLOURS)), *(set(FIXED.values()) - taken)]
    chosen = {key: free[place % len(free)] for place, key in enumerate(others)} | FIXED
    return {s.entry: chosen[key] for s, key in zip(summaries, keys, strict=True)}


def _colour_key(summary: Summary, summaries: Sequence[Summary]) -> str:
    return summary.method if len(rows(summaries)) > 1 else _alone(summary, summaries)


def _alone(summary: Summary, summaries: Sequence[Summary]) -> str:
    method = summary.method
    same = [other for other in summaries if other.method == method]
    return method if len(same) == 1 else summary.entry


class _Plain(LogFormatter):
    """The labels that matplotlib chooses for a logarithmic axis, as 0.2 in place of 2 x 10^-1."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def draw_curves(
    axes: Axes, summaries: Sequence[Summary], metric: str, styles: dict[str, int], log: bool
) -> None:
    labels = names(summaries)
    for summary in summaries:
        curve = summary.curves.get(metric)
        if curve and summary.best is not None:
            label = _with_lr(labels[summary.entry], summary.method, summary.best[0])
            _draw_curve(axes, curve, label, styles[summary.entry], log)
    _by_epoch(axes, log)


def _draw_curve(axes: Axes, curve: Sequence[Estimate], label: str, index: int, log: bool) -> None:
    epochs = range(1, len(curve) + 1)
    low, mean, high = zip(*(_band(point) for point in curve), strict=True)
    if log:
        low = tuple(max(value, middle / 10) for value, middle in zip(low, mean, strict=True))
    axes.plot(epochs, mean, linestyle=LINES[index], color=COLOURS[index], label=label)
    axes.fill_between(epochs, low, high, color=COLOURS[index], alpha=0.15, linewidth=0)


def _with_lr(label: str, method: str, lr: float) -> str:
    """What estimates its learning rate says so in its name; a factor is then news, a 1 is not."""
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
        axes.yaxis.set_minor_formatter(_Plain(minor_thresholds=(2, 0.5)))


def _band(point: Estimate) -> tuple[float, float, float]:
    error = point.error or 0.0
    return point.mean - error, point.mean, point.mean + error


def draw_test(
    axes: Axes, summaries: Sequence[Summary], judge: Judge, unit: str, styles: dict[str, int]
) -> None:
    draw_curves(axes, summaries, judge.metric, styles, log=False)
    axes.set_ylabel(f"test {judge.metric}{f', {unit}' if unit else ''}")
    # The climb of the first quarter would flatten what is to be compared.
    curves = [summary.curves.get(judge.metric, []) for summary in summaries]
    late = [point.mean for curve in curves for point in curve[len(curve) // 4 :]]
    late += [end for curve in curves if curve for end in _band(curve[-1])]
    if late and max(late) > min(late):
        margin = 0.08 * (max(late) - min(late))
        axes.set_ylim(min(late) - margin, max(late) + margin)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:  # matplotlib warns of an empty one
        axes.legend(frameon=False, fontsize=9)


def draw_train(axes: Axes, summaries: Sequence[Summary], styles: dict[str, int]) -> None:
    draw_curves(axes, summaries, "train_loss", styles, log=True)
    axes.set_ylabel("training loss")
    _legend(axes)


def draw_lrs(
    axes: Axes, summaries: Sequence[Summary], judge: Judge, unit: str, styles: dict[str, int]
) -> None:
    """The metric of the search by learning rate; a cross at the bottom is a diverged run.

    What estimates its learning rate has no place on that axis: its result is a level, unless
    nothing else is there and the axis can be its factors.
    """
    labels = names(summaries)
    factors = all(estimates(summary.method) for summary in summaries)
    for summary in summaries:
        index = styles[summary.entry]
        if estimates(summary.method) and not factors:
            _draw_level(axes, summary, labels[summary.entry], index)
            continue
        known = [(lr, value) for lr, value in summary.lr_curve if value is not None]
        lost = [lr for lr, value in summary.lr_curve if value is None]
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
    curves = [[v for _, v in s.lr_curve if v is not None] for s in summaries]
    if any(curves):
        axes.set_ylim(*visible(curves, judge.higher_is_better))
    axes.set(
        xscale="log",
        xlabel="factor of the estimated learning rate" if factors else "learning rate",
        ylabel=f"{judge.metric}{f', {unit}' if unit else ''}",
    )
    axes.grid(alpha=0.3)
    _legend(axes)


def _draw_level(axes: Axes, summary: Summary, label: str, index: int) -> None:
    for lr, value in summary.lr_curve:
        if summary.best is not None and lr == summary.best[0] and value is not None:
            label = _with_lr(label, summary.method, lr)
            axes.axhline(value, linestyle=LINES[index], color=COLOURS[index], label=label)


def visible(curves: Sequence[Sequence[float]], higher_is_better: bool) -> tuple[float, float]:
    """The better three quarters, and two points of every curve.

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
        axes.set_title(line[0].entry.partition("@")[2], loc="left", fontsize=10)


def curves(summaries: Sequence[Summary], judge: Judge, unit: str, title: str) -> Figure:
    """The whole figure: a row a schedule, test left and training right."""
    lines, styles = rows(summaries), style(summaries)
    figure = Figure(figsize=(10, 4 * len(lines) + 0.4), layout="constrained")
    panels = figure.subplots(len(lines), 2, squeeze=False)
    for line, (left, right) in zip(lines, panels, strict=True):
        draw_test(left, line, judge, unit, styles)
        draw_train(right, line, styles)
        _name_row(left, line, len(lines) > 1)
    figure.suptitle(title, fontsize=11)
    return figure


def lr_figure(summaries: Sequence[Summary], judge: Judge, unit: str, title: str) -> Figure:
    """A panel a row of `curves`."""
    lines, styles = rows(summaries), style(summaries)
    draw = partial(draw_lrs, judge=judge, unit=unit, styles=styles)
    return _stacked(lines, draw, len(lines) > 1, title)


def _stacked(lines: Sequence[Sequence[Summary]], draw: Draw, several: bool, title: str) -> Figure:
    figure = Figure(figsize=(7, 4 * len(lines) + 0.4), layout="constrained")
    for line, (axes,) in zip(lines, figure.subplots(len(lines), 1, squeeze=False), strict=True):
        draw(axes, line)
        _name_row(axes, line, several)
    figure.suptitle(title, fontsize=11)
    return figure


def draw_estimates(axes: Axes, summaries: Sequence[Summary], styles: dict[str, int]) -> None:
    """Estimated learning rates before the schedule, and the best of MADGRAD's search beside."""
    labels = names(summaries)
    for summary in summaries:
        curve, index = summary.estimated_lr(), styles[summary.entry]
        if curve and summary.best is not None:
            label = _with_lr(labels[summary.entry], summary.method, summary.best[0])
            _draw_curve(axes, curve, label, index, log=True)
        if summary.method == "madgrad" and summary.best is not None and len(summary.lr_curve) > 1:
            label = f"{labels[summary.entry]}, best lr {summary.best[0]:g}"
            axes.axhline(summary.best[0], linestyle="--", color=COLOURS[index], label=label)
    _by_epoch(axes, log=True)
    axes.set_ylabel("estimated learning rate")
    _legend(axes)


def estimated(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """The rows of `curves` in which something estimates its learning rate."""
    return [line for line in rows(summaries) if any(s.estimated_lr() for s in line)]


def estimate_figure(summaries: Sequence[Summary], title: str) -> Figure:
    """A panel a row of `estimated`."""
    draw = partial(draw_estimates, styles=style(summaries))
    return _stacked(estimated(summaries), draw, len(rows(summaries)) > 1, title)


def panels(summaries: Sequence[Summary], judge: Judge, unit: str) -> list[list[Figure]]:
    """By row: test, training, learning rates and, where there are such, estimated ones.

    Each is a figure of its own, for a narrow page.
    """
    lines, styles, made = rows(summaries), style(summaries), []
    draws: list[Draw] = [
        partial(draw_test, judge=judge, unit=unit, styles=styles),
        partial(draw_train, styles=styles),
        partial(draw_lrs, judge=judge, unit=unit, styles=styles),
        partial(draw_estimates, styles=styles),
    ]
    for line in lines:
        wanted = draws if estimated(line) else draws[:3]
        figures = [Figure(figsize=(5, 4), layout="constrained") for _ in wanted]
        for draw, figure in zip(wanted, figures, strict=True):
            axes = figure.subplots()
            draw(axes, line)
            _name_row(axes, line, len(lines) > 1)
        made.append(figures)
    return made


def save(figure: Figure, path: Path) -> None:
    """As PNG and as SVG."""
    with mpl.rc_context(STYLE):
        figure.savefig(path.with_suffix(".png"), dpi=150)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def inline(figure: Figure) -> str:
    """The <svg> element alone, as wide as its place."""
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
