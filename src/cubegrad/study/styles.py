"""The label, colour and line style of each curve, and which row of panels it is in."""

from collections.abc import Sequence

from cubegrad.study.methods import METHODS, estimates
from cubegrad.study.statistics import Summary

# Okabe and Ito's colour-blind safe palette, with grey for yellow, which is faint on white; the line
# styles differ too, for print.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (8, 2, 2, 2)))
# The same for the page: lighter colours on a dark ground, and SVG's dashes.
DARK = ("#FF8A3D", "#4FA8E8", "#2CC79A", "#E39AC4", "#F2B632", "#8CD0F5", "#E6E9ED", "#9AA3AE")
DASHES = ("none", "7 3", "8 3 2 3", "2 3", "8 2 2 2 2 2", "2 2", "12 3", "12 3 3 3")
FIXED = {"madgrad": 0, "sgd": 1, "adam": 2, "adagrad": 3}


def names(summaries: Sequence[Summary]) -> dict[str, str]:
    """A label for each entry: its method, with the schedule if there are several."""
    several = len({summary.entry.partition("@")[2] for summary in summaries}) > 1
    labels = {}
    for summary in summaries:
        method, _, schedule = summary.entry.partition("@")
        label = METHODS[method].label if method in METHODS else method
        labels[summary.entry] = f"{label}, {schedule}" if several else label
    return labels


def rows(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """One row of panels per schedule, as in the paper's figure on dual averaging.

    A method with a schedule of its own is in the first row. A single method is one row: then the
    schedules are what is compared.
    """
    methods = {summary.method for summary in summaries}
    schedules = list(dict.fromkeys(_shared(summary) for summary in summaries if _shared(summary)))
    if len(methods) == 1 or len(schedules) <= 1:
        return [list(summaries)]
    first = schedules[0]
    return [[s for s in summaries if (_shared(s) or first) == one] for one in schedules]


def _shared(summary: Summary) -> str:
    """The schedule; "" if it is the method's own."""
    method, _, schedule = summary.entry.partition("@")
    return "" if method in METHODS and schedule == METHODS[method].schedule else schedule


def by_lr(summaries: Sequence[Summary]) -> list[Summary]:
    """For a plot by learning rate: the methods that share a seed with those that searched one.

    Other seeds may mean other data, as the test subjects of fastmri.
    """
    searches = [s for s in summaries if len(s.lr_curve) > 1 and not estimates(s.method)]
    seeds = {seed for search in searches for seed in search.lr_seeds}
    return [s for s in summaries if not searches or s.lr_seeds & seeds]


def style(summaries: Sequence[Summary]) -> dict[str, int]:
    """An index into COLOURS and LINES for each entry; a method keeps its own from row to row."""
    keys = [_colour_key(summary, summaries) for summary in summaries]
    others = [key for key in dict.fromkeys(keys) if key not in FIXED]
    taken = {FIXED[key] for key in keys if key in FIXED}
    free = [*range(len(FIXED), len(COLOURS)), *(set(FIXED.values()) - taken)]
    chosen = {key: free[place % len(free)] for place, key in enumerate(others)} | FIXED
    return {s.entry: chosen[key] for s, key in zip(summaries, keys, strict=True)}


def _colour_key(summary: Summary, summaries: Sequence[Summary]) -> str:
    alone = sum(other.method == summary.method for other in summaries) == 1
    return summary.method if alone or len(rows(summaries)) > 1 else summary.entry
