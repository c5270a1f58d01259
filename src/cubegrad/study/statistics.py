"""Records -> best settings, means, two standard errors, curves. Pure.

Seeds that every setting of a method was run with choose its best setting; the other seeds of that
setting, where there are any, are what is reported, since the first ones were looked at to choose.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cubegrad.study.records import ESTIMATED_LR, Record

Setting = tuple[float, float]  # lr, decay


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float | None  # two standard errors; None for a single value
    n: int


@dataclass(frozen=True)
class Judge:
    """Which metric decides, and which way."""

    metric: str
    higher_is_better: bool

    def worth(self, records: Iterable[Record]) -> tuple[float, float]:
        """Larger is better: the mean of the metric, then, for ties, of minus the loss.

        A diverged run is worse than any other.
        """
        sign = 1 if self.higher_is_better else -1
        return _worth(records, self.metric, sign), _worth(records, "loss", -1)


def _worth(records: Iterable[Record], metric: str, sign: int) -> float:
    values = [record.last(metric) for record in records]
    known = [value for value in values if value is not None]
    return sign * estimate(known).mean if len(known) == len(values) and known else -math.inf


@dataclass(frozen=True)
class Summary:
    """What is said of one method under one schedule."""

    entry: str
    best: Setting | None  # None: every run of the search diverged
    final: dict[str, Estimate] = field(default_factory=dict)  # after the last epoch, by metric
    curves: dict[str, list[Estimate]] = field(default_factory=dict)  # by metric and epoch
    lr_curve: list[tuple[float, float | None]] = field(default_factory=list)  # at the best decay
    searched: int = 0  # runs; none where only one setting was run
    search_diverged: int = 0
    seeds: tuple[int, ...] = ()
    diverged: int = 0  # of the seeds
    at_edge: tuple[str, ...] = ()  # "lr" or "decay": the best value is an end of what was tried

    @property
    def method(self) -> str:
        return self.entry.partition("@")[0]

    def estimated_lr(self) -> list[Estimate]:
        """By epoch, before the schedule, and so what a searched rate may be held against."""
        if self.best is None:
            return []
        curve, factor = self.curves.get(ESTIMATED_LR, []), self.best[0]
        return [
            Estimate(p.mean * factor, None if p.error is None else p.error * factor, p.n)
            for p in curve
        ]


def estimate(values: Sequence[float]) -> Estimate:
    """The error is inf where it is larger than any float."""
    n = len(values)
    # By a power of two, so that nothing is rounded: the square of 1e200 is no float.
    scale = max((math.frexp(value)[1] for value in values if value), default=0)
    scaled = [math.ldexp(value, -scale) for value in values]
    mean = math.fsum(scaled) / n
    if n < 2:
        return Estimate(math.ldexp(mean, scale), None, n)
    variance = math.fsum((value - mean) ** 2 for value in scaled) / (n - 1)
    error = 2 * math.sqrt(variance / n)
    return Estimate(math.ldexp(mean, scale), _ldexp(error, scale), n)


def _ldexp(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def by_entry(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.settings.seed):
        groups[record.settings.entry].append(record)
    return dict(groups)


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.settings.lr, record.settings.decay].append(record)
    return dict(groups)


def searched(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """The runs that choose: on the held-out split where there are such, and of common seeds."""
    records = list(records)
    if any(record.settings.hold_out for record in records):
        records = [record for record in records if record.settings.hold_out]
    first = min((record.settings.seed for record in records), default=0)
    groups = {
        setting: members
        for setting, members in by_setting(records).items()
        if any(record.settings.seed == first for record in members)
    }
    seeds = [{record.settings.seed for record in members} for members in groups.values()]
    common = set.intersection(*seeds) if seeds else set()
    return {
        setting: [record for record in members if record.settings.seed in common]
        for setting, members in groups.items()
    }


def best(groups: dict[Setting, list[Record]], judge: Judge) -> Setting | None:
    """The setting of most worth; the smaller lr and decay where even the losses tie."""
    worths = {setting: judge.worth(groups[setting]) for setting in sorted(groups)}
    chosen = max(worths, key=lambda setting: worths[setting], default=None)
    return None if chosen is None or worths[chosen][0] == -math.inf else chosen


def summarise(records: Iterable[Record], judge: Judge) -> Summary:
    """Of the records of one entry."""
    records = list(records)
    entry, groups = records[0].settings.entry, searched(records)
    only = _only(groups)
    chosen = only or best(groups, judge)
    tried = [record for members in groups.values() for record in members]
    failed = sum(record.diverged for record in tried)
    if chosen is None:
        return Summary(entry, None, searched=len(tried), search_diverged=failed)
    looked_at = {record.settings.key for record in groups[chosen]}
    members = [r for r in by_setting(records)[chosen] if not r.settings.hold_out]
    fresh = [r for r in members if r.settings.key not in looked_at] or groups[chosen]
    whole = [record for record in fresh if not record.diverged]
    names = list(whole[0].curve) if whole else []
    metrics = [name for name in names if all(name in record.curve for record in whole)]
    curves = {name: _curve([record.curve[name] for record in whole]) for name in metrics}
    return Summary(
        entry,
        chosen,
        final={name: _mean([record.curve[name][-1] for record in whole]) for name in metrics},
        curves=curves,
        lr_curve=lr_curve(groups, chosen[1], judge),
        searched=0 if only else len(tried),
        search_diverged=0 if only else failed,
        seeds=tuple(record.settings.seed for record in fresh),
        diverged=len(fresh) - len(whole),
        at_edge=_edges(groups, chosen),
    )


def _only(groups: dict[Setting, list[Record]]) -> Setting | None:
    """The one setting there is: no seed chose it, so one that diverged is a result like others."""
    members = [record for group in groups.values() for record in group]
    ended = any(not record.diverged for record in members)
    return next(iter(groups)) if len(groups) == 1 and ended else None


def lr_curve(
    groups: dict[Setting, list[Record]], decay: float, judge: Judge
) -> list[tuple[float, float | None]]:
    """The metric in the search by learning rate, at one decay; None: diverged."""
    points: list[tuple[float, float | None]] = []
    for setting in sorted(groups):
        if setting[1] == decay:
            worth = judge.worth(groups[setting])[0]
            metric = worth if judge.higher_is_better else -worth
            points.append((setting[0], metric if math.isfinite(metric) else None))
    return points


def _curve(curves: Sequence[Sequence[float | None]]) -> list[Estimate]:
    """Epoch by epoch, over the runs, as far as all have it: a problem may leave a metric out."""
    return [_mean(values) for values in zip(*curves, strict=False)]


def _mean(values: Sequence[float | None]) -> Estimate:
    """A run that finished has a number everywhere."""
    return estimate([value for value in values if value is not None])


def _edges(groups: dict[Setting, list[Record]], chosen: Setting) -> tuple[str, ...]:
    edges = []
    for axis, name in enumerate(("lr", "decay")):
        values = {setting[axis] for setting in groups}
        low_end = chosen[axis] == min(values) and chosen[axis] > 0
        if len(values) > 1 and (low_end or chosen[axis] == max(values)):
            edges.append(name)
    return tuple(edges)
