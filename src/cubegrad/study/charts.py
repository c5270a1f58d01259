"""Statistics -> the data of the page's charts, which page.js draws: plain lists and dicts."""

import math
from collections.abc import Sequence
from typing import Any

from cubegrad.study import styles
from cubegrad.study.experiments import Experiment
from cubegrad.study.methods import estimates, lr_text
from cubegrad.study.statistics import Estimate, Summary
from cubegrad.study.wording import number, value

LARGEST = 1e100  # larger values are not drawn: differences of them overflow

Chart = dict[str, Any]


def groups(experiment: Experiment) -> list[dict[str, Any]]:
    """One group of charts per row of `styles.rows`; a group shares its legend."""
    lines, result = styles.rows(experiment.summaries), []
    for line in lines:
        chosen = [summary for summary in experiment.ranked if summary in line]
        schedule = chosen[0].entry.partition("@")[2] if len(lines) > 1 else ""
        charts = [_test(experiment, chosen), _train(chosen), _search(experiment, chosen)]
        if any(summary.estimated_lr() for summary in chosen):
            charts.append(_estimates(chosen))
        shown = [chart for chart in charts if chart["series"]]
        result.append(
            {"name": schedule, "legend": _legend(experiment, chosen), "charts": shown},
        )
    return result


def _legend(experiment: Experiment, summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    labels, chosen = styles.names(experiment.summaries), styles.style(experiment.summaries)
    return [
        {"id": s.entry, "label": labels[s.entry], "style": chosen[s.entry], "setting": _lr(s)}
        for s in summaries
    ]


def _lr(summary: Summary) -> str:
    return "" if summary.best is None else f"lr {lr_text(summary.method, summary.best[0])}"


def _test(experiment: Experiment, summaries: Sequence[Summary]) -> Chart:
    judge, unit = experiment.judge, experiment.unit
    title = f"test {judge.metric}{f', {unit}' if unit else ''}"
    chart = _by_epoch(title, summaries, [s.curves.get(judge.metric, []) for s in summaries], unit)
    # Scaled to the second half: the climb before it would flatten the differences at the end.
    return chart | {"better": 1 if judge.higher_is_better else -1, "skip": 0.5, "log": False}


def _train(summaries: Sequence[Summary]) -> Chart:
    return _by_epoch(
        "training loss", summaries, [s.curves.get("train_loss", []) for s in summaries]
    )


def _estimates(summaries: Sequence[Summary]) -> Chart:
    curves = [summary.estimated_lr() for summary in summaries]
    chart = _by_epoch("estimated learning rate, before the schedule", summaries, curves)
    for summary in summaries:
        if summary.method == "madgrad" and summary.best is not None and len(summary.lr_curve) > 1:
            lr = summary.best[0]
            chart["series"].append({"id": summary.entry, "level": lr, "text": f"{lr:g}, searched"})
    return chart


def _by_epoch(
    title: str, summaries: Sequence[Summary], curves: Sequence[Sequence[Estimate]], unit: str = ""
) -> Chart:
    """Logarithmic if every mean is positive; a log-likelihood may be negative."""
    series = [
        {"id": summary.entry, "points": points}
        for summary, curve in zip(summaries, curves, strict=True)
        if summary.best is not None and (points := _points(curve, unit))
    ]
    log = all(point[1] > 0 for one in series for point in one["points"])
    return {"title": title, "x": "epoch", "log": log, "better": -1, "series": series}


def _points(curve: Sequence[Estimate], unit: str) -> list[list[Any]]:
    """Epoch, mean, error, and the text for the reader."""
    return [
        [epoch, point.mean, error, number(point, unit)]
        for epoch, point in enumerate(curve, 1)
        if abs(point.mean) <= LARGEST and (error := point.error or 0.0) <= LARGEST
    ]


def _search(experiment: Experiment, summaries: Sequence[Summary]) -> Chart:
    """The metric by learning rate. A method that estimates its rate is a horizontal line."""
    summaries = styles.by_lr(summaries)
    judge, unit = experiment.judge, experiment.unit
    factors = all(estimates(summary.method) for summary in summaries)
    series: list[dict[str, Any]] = []
    for summary in summaries:
        within = [(lr, y) for lr, y in summary.lr_curve if 1 / LARGEST <= lr <= LARGEST]
        known = [(lr, y) for lr, y in within if y is not None and abs(y) <= LARGEST]
        if estimates(summary.method) and not factors:
            best = summary.best[0] if summary.best else math.nan
            series += [
                {"id": summary.entry, "level": y, "text": value(y, unit)}
                for lr, y in known
                if lr == best
            ]
        elif within:
            points = [[lr, y, 0.0, value(y, unit)] for lr, y in known]
            lost = [lr for lr, y in within if y is None]
            series.append({"id": summary.entry, "points": points, "lost": lost, "dots": True})
    return {
        "title": f"{judge.metric} of the search{f', {unit}' if unit else ''}",
        "x": "factor of the estimated learning rate" if factors else "learning rate",
        "log": False,
        "logx": True,
        "better": 1 if judge.higher_is_better else -1,
        "cut": True,  # one rate that learns nothing would flatten the rest
        "series": series,
    }
