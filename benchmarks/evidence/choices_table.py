"""Records of `madgradw_choices.py` -> Markdown. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from madgradw_variants import BASE, CHANGES, COMBINED, PREFIX

from cubegrad.study import comparison, methods
from cubegrad.study.comparison import Difference
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Judge

OTHERS = ("adamw", "adamw/beta0.99", BASE, "madgradw-compact")
FREE = ("schedulefree-adamw", "madgradw-schedule-free")  # under a schedule of their own
ORDER = (*OTHERS, *FREE, *(PREFIX + name for name in (*CHANGES, *COMBINED)))
Results = dict[Settings, dict[str, dict[int, Record]]]  # by setting, method and seed


def table(records: Iterable[Record], columns: Sequence[Settings]) -> str:
    """By how much each method is better than MADGRADW, seed for seed, and the rates tried.

    A column is a setting; its method, schedule and seed do not matter.
    """
    results = grouped(records)
    found = [one for one in map(_common, columns) if BASE in results.get(one, {})]
    parts = [_gains(results, found)] if found else []
    return "\n\n".join([*parts, *_rates(results)])


def grouped(records: Iterable[Record]) -> Results:
    results: Results = defaultdict(lambda: defaultdict(dict))
    for record in records:
        one = record.settings
        results[_common(one)][one.method][one.seed] = record
    return results


def _common(one: Settings) -> Settings:
    return replace(one, method=BASE, schedule="", seed=0)


def gain(first: dict[int, Record], second: dict[int, Record]) -> Difference:
    """How much the first runs are better than the second ones."""
    about = next(iter(second.values())).about
    judge = Judge(about["metric"], about["higher_is_better"])
    last = [
        {seed: run.last(judge.metric) for seed, run in runs.items()} for runs in (first, second)
    ]
    return comparison.difference(last[0], last[1], judge)


def _gains(results: Results, columns: Sequence[Settings]) -> str:
    names = [_column(one, next(iter(results[one][BASE].values()))) for one in columns]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    tried = dict.fromkeys(method for one in columns for method in results[one])
    for method in sorted(tried, key=_order):
        cells = [_cell(method, results[one]) for one in columns]
        lines.append(f"| {_label(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _column(one: Settings, run: Record) -> str:
    unit = run.about["unit"]
    return f"{_name(one)}{f', {unit}' if unit else ''}"


def _name(one: Settings) -> str:
    return f"{one.problem}, {one.epochs} epoch{'s' if one.epochs > 1 else ''}"


def _cell(method: str, by_method: dict[str, dict[int, Record]]) -> str:
    if method not in by_method:
        return "–"
    if method == BASE:
        about = by_method[BASE][min(by_method[BASE])].about
        values = [run.last(about["metric"]) for run in by_method[BASE].values()]
        known = [value for value in values if value is not None]
        return f"{sum(known) / len(known):.3f}" if len(known) == len(values) else "diverged"
    found = gain(by_method[method], by_method[BASE])
    if found.lost or found.estimate is None:
        return "diverged" if found.lost else "–"
    each = [_signed(found.gains[seed]) for seed in sorted(found.gains)]
    text = _signed(found.estimate.mean)
    if len(each) == 2:
        text += f" ({', '.join(each)})"
    elif found.interval:
        text += f" [{', '.join(map(_signed, found.interval))}]"
        text = (f"**{text}**" if found.sign else text) + f", {len(each)} seeds"
    return text


def _signed(value: float) -> str:
    text = f"{value:+.3f}".replace("-", "−")
    return text if float(f"{value:.3f}") else "0.000"


def _rates(results: Results) -> list[str]:
    """A table for each problem that ran at several rates, with the results themselves."""
    by_problem: dict[Settings, list[Settings]] = defaultdict(list)
    for one in results:
        by_problem[replace(one, lr=0.0)].append(one)
    return [
        _rate_table(results, sorted(settings, key=lambda one: one.lr))
        for settings in by_problem.values()
        if len(settings) > 1
    ]


def _rate_table(results: Results, settings: Sequence[Settings]) -> str:
    first = settings[0]
    rates = " | ".join(f"lr {one.lr:g}" for one in settings)
    lines = [f"| {_name(first)} | {rates} |"]
    lines.append(f"|---|{'---:|' * len(settings)}")
    for method in ORDER:
        runs = [results[one].get(method, {}) for one in settings]
        if sum(map(bool, runs)) > 1:
            cells = " | ".join(_result(some) for some in runs)
            lines.append(f"| {_label(method)} | {cells} |")
    return "\n".join(lines)


def _result(runs: dict[int, Record]) -> str:
    """Of the lowest seed, with which rates are compared."""
    if not runs:
        return "–"
    run = runs[min(runs)]
    value = run.last(run.about["metric"])
    return "diverged" if value is None else f"{value:.3f}"


def _order(method: str) -> tuple[int, str]:
    return ORDER.index(method) if method in ORDER else len(ORDER), method


def _label(method: str) -> str:
    return methods.METHODS[method].label if method in methods.METHODS else method
