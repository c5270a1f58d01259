"""Records of both forms of a state -> what each seed gained or lost, and a table of it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from cubegrad.study import methods, statistics
from cubegrad.study.records import Record, Settings
from cubegrad.study.report import number
from cubegrad.study.statistics import Estimate

SUFFIX = "-compact"  # of the methods that keep codes

Forms = dict[bool, dict[int, Record]]  # whether it keeps codes -> seed -> run


class Row(NamedTuple):
    """One metric of one setting, with the seeds that both forms have."""

    settings: Settings  # of the float32 form, with seed 0
    metric: str
    unit: str
    float32: list[float]
    compact: list[float]
    gains: list[float]  # of codes over float32, seed for seed; negative is worse

    @property
    def gain(self) -> Estimate:
        return statistics.estimate(self.gains)

    @property
    def holds(self) -> bool:
        """Whether codes are no worse, within two standard errors."""
        return self.gain.mean + (self.gain.error or 0.0) >= 0


def rows(records: Iterable[Record]) -> list[Row]:
    groups: dict[Settings, Forms] = defaultdict(lambda: {False: {}, True: {}})
    for record in records:
        one = record.settings
        method = one.method.removesuffix(SUFFIX)
        forms = groups[replace(one, method=method, seed=0)]
        forms[method != one.method][one.seed] = record
    return [row for key, forms in groups.items() for row in _rows(key, forms)]


def _rows(key: Settings, forms: Forms) -> Iterator[Row]:
    """One for the metric that decides, and one for an accuracy beside it."""
    seeds = sorted(forms[False].keys() & forms[True].keys())
    if len(seeds) < 2:
        return
    about = forms[False][seeds[0]].about
    decides = about["metric"], about["higher_is_better"], about["unit"]
    beside = [("accuracy", True, "%")] if "accuracy" in about.get("beside", ()) else []
    for metric, higher_is_better, unit in (decides, *beside):
        pairs = [tuple(forms[form][seed].last(metric) for form in (False, True)) for seed in seeds]
        finished = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(finished) == len(pairs):
            sign = 1 if higher_is_better else -1
            float32, compact = map(list, zip(*finished, strict=True))
            gains = [sign * (b - a) for a, b in finished]
            yield Row(key, metric, unit, float32, compact, gains)


def setting(one: Settings) -> str:
    method = "" if one.method == "madgrad" else f"{methods.METHODS[one.method].label}, "
    lr = "" if methods.estimates(one.method) else f"lr {one.lr:g}, "
    decay = f", decay {one.decay:g}" if one.decay else ""
    return f"{method}{lr}{one.epochs} epochs{decay}"


def signed(point: Estimate, unit: str) -> str:
    text = number(point, unit)
    return f"−{text[1:]}" if text.startswith("-") else f"+{text}"


def table(records: Iterable[Record]) -> str:
    """Markdown."""
    head = ["problem", "setting", "result", "seeds", "float32", "compact", "better by", "holds"]
    lines = [head, ["---"] * len(head)]
    for row in rows(records):
        name = f"{row.settings.problem}, {row.settings.preset}"
        metric = f"{row.metric}, {row.unit}" if row.unit else row.metric
        results = (statistics.estimate(values) for values in (row.float32, row.compact))
        cells = [name, setting(row.settings), metric, str(len(row.gains))]
        cells += [number(result, row.unit) for result in results]
        lines.append([*cells, signed(row.gain, row.unit), "yes" if row.holds else "no"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
