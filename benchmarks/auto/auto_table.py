"""Records of auto_quality.py -> a table of methods by problems, and how lr="auto" stands in it."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from cubegrad.study import schedules, statistics
from cubegrad.study.records import Record
from cubegrad.study.statistics import Estimate, Judge
from cubegrad.study.wording import number

# With the tuned method that each is to be as good as.
OURS = {
    "madgradw-auto": "adamw",
    "madgradw-auto-compact": "adamw",
    "madgradw-auto-schedule-free": "adamw",
    "madgrad-auto": "madgrad",
    "madgrad-auto-compact": "madgrad",
}
FREE = (*OURS, "prodigy", "prodigy, warm-up", "dadapt-adam", "dog", "ldog")
SCHEDULE_FREE = "schedulefree-adamw"  # has a learning rate, but people leave it at its default
COLUMNS = {
    "madgradw-auto": 'MADGRADW, `lr="auto"`',
    "madgradw-auto-compact": "the same, compact",
    "madgradw-auto-schedule-free": 'MADGRADW, `lr="auto"`, schedule-free',
    "madgrad-auto": 'MADGRAD, `lr="auto"`',
    "madgrad-auto-compact": "the same, compact",
    "prodigy": "Prodigy",
    "prodigy, warm-up": "Prodigy, with the problem's warm-up",
    "dadapt-adam": "D-Adapt Adam",
    "dog": "DoG",
    "ldog": "L-DoG",
    "schedulefree-adamw": "schedule-free AdamW, its default",
    "schedulefree-adamw, tuned": "schedule-free AdamW, best of 3",
    "adamw": "AdamW, best of a search",
    "madgrad": "MADGRAD, best lr",
}
DEFAULT = 2.5e-3  # of schedule-free AdamW
# Close to the tuned method: so much, or this share of it, and in words.
CLOSE = {
    "madgrad": ({"%": 0.3, "bits": 0.01}, 0.003, "0.3 % or 0.01 bits of the best fixed lr"),
    "adamw": ({"%": 0.3, "bits": 0.02}, 0.01, "1 %, 0.3 points or 0.02 bits of tuned AdamW"),
}


class Result(NamedTuple):
    """What the methods reached on one problem."""

    problem: str
    about: dict[str, Any]
    reached: dict[str, Estimate]  # by column
    lrs: dict[str, float]

    @property
    def sign(self) -> int:
        return 1 if self.about["higher_is_better"] else -1

    def behind(self, column: str, other: str) -> float:
        """By how much a column is worse than another; negative if it is better."""
        return self.sign * (self.reached[other].mean - self.reached[column].mean)

    def best(self, columns: Iterable[str]) -> str:
        there = [column for column in columns if column in self.reached]
        return max(there, key=lambda column: self.sign * self.reached[column].mean)


def results(records: Iterable[Record]) -> list[Result]:
    """Of the seeds from 1 on; seed 0 has chosen the learning rates."""
    runs: dict[str, dict[tuple[str, float], list[Record]]] = defaultdict(lambda: defaultdict(list))
    search: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        one = record.settings
        if one.seed == 0 and one.method == SCHEDULE_FREE:
            search[f"{one.problem}, {one.preset}"].append(record)
        if one.seed > 0:
            method = one.method
            if method == "prodigy" and schedules.warms_up(one.schedule):
                method = "prodigy, warm-up"
            runs[f"{one.problem}, {one.preset}"][method, one.lr].append(record)
    return [
        _result(problem, settings, best_lr(search[problem])) for problem, settings in runs.items()
    ]


def best_lr(search: list[Record]) -> float | None:
    """That of the best run which ended, or None."""
    ended = [record for record in search if record.status == "finished"]
    if not ended:
        return None
    about = ended[0].about
    judge = Judge(about["metric"], about["higher_is_better"])
    return max(ended, key=lambda record: judge.score([record])).settings.lr


def _result(
    problem: str, settings: dict[tuple[str, float], list[Record]], best: float | None
) -> Result:
    """`best` is the learning rate that the search of schedule-free AdamW has chosen."""
    about = next(iter(settings.values()))[0].about
    reached, lrs = dict[str, Estimate](), dict[str, float]()
    for (method, lr), runs in settings.items():
        values = [run.last(about["metric"]) for run in runs]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            known = [-math.inf if about["higher_is_better"] else math.inf]  # one has diverged
        found = statistics.estimate(known)
        names = [method]
        if method == SCHEDULE_FREE:
            names = [method] if lr == DEFAULT else []
            names += [f"{method}, tuned"] if lr == best else []
        for name in names:
            reached[name], lrs[name] = found, lr
    return Result(problem, about, reached, lrs)


def table(records: Iterable[Record]) -> str:
    """A row per method, a column per problem; the best method without a learning rate is bold."""
    found = results(records)
    heads = ["", *(f"{one.problem}: {_metric(one)}" for one in found)]
    lines = [heads, ["---", *["---:"] * len(found)]]
    for column, label in COLUMNS.items():
        if any(column in one.reached for one in found):
            lines.append([label, *(_cell(one, column) for one in found)])
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([body, "", *standing(found)])


def _metric(one: Result) -> str:
    unit = one.about["unit"]
    return f"{one.about['metric']}{', ' if unit else ''}{unit}"


def _cell(one: Result, column: str) -> str:
    if column not in one.reached:
        return "–"
    result = one.reached[column]
    if math.isinf(result.mean):
        return "diverged"
    text = number(result, one.about["unit"])
    lr = f" (lr {one.lrs[column]:g})" if one.lrs[column] != 1 else ""
    return (f"**{text}**" if column == one.best(FREE) else text) + lr


def standing(found: list[Result]) -> list[str]:
    """Where `lr="auto"` stands among them, in sentences."""
    lines = []
    for column, tuned in OURS.items():
        here = [one for one in found if column in one.reached]
        if not here:
            continue
        others = [name for name in FREE if name not in OURS]
        rivals = [(one, one.best(others)) for one in here if set(others) & set(one.reached)]
        ahead = sum(one.behind(column, rival) <= 0 for one, rival in rivals)
        beside = [one for one, _ in rivals if SCHEDULE_FREE in one.reached]
        also = sum(one.behind(column, one.best([*others, SCHEDULE_FREE])) <= 0 for one in beside)
        share = {
            one.problem: one.behind(column, rival) / abs(one.reached[rival].mean)
            for one, rival in rivals
        }
        worst = max(share, key=lambda name: share[name], default="")
        fixed = [one for one in here if tuned in one.reached]
        close = sum(one.behind(column, tuned) <= _close(one, tuned) for one in fixed)
        lines.append(
            f"- {_label(column)}: the best without a learning rate on {ahead} of {len(rivals)}"
            + (f" ({also} of {len(beside)} with schedule-free's default)" if beside else "")
            + (f"; at worst {100 * share[worst]:+.1f} % behind ({worst})" if worst else "")
            + f"; within {CLOSE[tuned][2]} on {close} of {len(fixed)}."
        )
    return lines


def _label(column: str) -> str:
    label = COLUMNS[column]
    return (
        label if "the same" not in label else f"{COLUMNS[column.removesuffix('-compact')]}, compact"
    )


def _close(one: Result, tuned: str) -> float:
    by_unit, share, _ = CLOSE[tuned]
    return by_unit.get(one.about["unit"], share * abs(one.reached[tuned].mean))
