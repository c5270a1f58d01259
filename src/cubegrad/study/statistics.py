"""Records -> best settings, means, two standard errors, curves. Pure.

A method's best setting is chosen by the seeds that every setting was run with. If that setting was
run with further seeds, only those are reported, as the choice favours the first ones.
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
    """Which metric decides, and in which direction."""

    metric: str
    higher_is_better: bool

    def score(self, records: Iterable[Record]) -> tuple[float, float]:
        """Larger is better: the mean of the metric, signed; ties go to the lower loss.

        -inf if a run diverged.
        """
        sign = 1 if self.higher_is_better else -1
        return _score(records, self.metric, sign), _score(records, "loss", -1)


def _score(records: Iterable[Record], metric: str, sign: int) -> float:
    values = [record.last(metric) for record in records]
    known = [value for value in values if value is not None]
    return sign * estimate(known).mean if len(known) == len(values) and known else -math.inf


@dataclass(frozen=True)
class Summary:
    """The results of one method under one schedule."""

    entry: str
    best: Setting | None  # None: every run of the search diverged
    final: dict[str, Estimate] = field(default_factory=dict)  # after the last epoch, by metric
    curves: dict[str, list[Estimate]] = field(default_factory=dict)  # by metric and epoch
    lr_curve: list[tuple[float, float | None]] = field(default_factory=list)  # at the best decay
    lr_seeds: frozenset[int] = frozenset()  # of the runs in lr_curve
    searched: int = 0  # runs; 0 if only one setting was run
    search_diverged: int = 0
    search_cut: int = 0  # stopped early by --search halving
    seeds: tuple[int, ...] = ()
    diverged: int = 0  # how many of the seeds
    at_edge: tuple[str, ...] = ()  # "lr", "decay": the best value is the first or last tried

    @property
    def method(self) -> str:
        return self.entry.partition("@")[0]

    def estimated_lr(self) -> list[Estimate]:
        """By epoch, before the schedule, so comparable with a searched rate."""
        if self.best is None:
            return []
        curve, factor = self.curves.get(ESTIMATED_LR, []), self.best[0]
        return [
            Estimate(p.mean * factor, None if p.error is None else p.error * factor, p.n)
            for p in curve
        ]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and two standard errors; the error is inf if it overflows."""
    n = len(values)
    # Scaled, as the square of 1e200 overflows; by a power of two, which rounds nothing.
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
    """The search's runs: those with a held-out split, if any, and the seeds all settings share."""
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
    """The setting with the highest score; if all ties, the smaller lr, then the smaller decay."""
    scores = {setting: judge.score(groups[setting]) for setting in sorted(groups)}
    chosen = max(scores, key=lambda setting: scores[setting], default=None)
    return None if chosen is None or scores[chosen][0] == -math.inf else chosen


def summarise(records: Iterable[Record], judge: Judge) -> Summary:
    """Summarise the records of one entry. A run that was cut is no result, but was searched."""
    records = list(records)
    entry, grid = records[0].settings.entry, searched(records)
    groups = {
        setting: members
        for setting, members in grid.items()
        if not any(record.cut for record in members)
    }
    only = _only_setting(grid)
    chosen = only or best(groups, judge)
    tried = [record for members in grid.values() for record in members]
    failed, cut = sum(record.diverged for record in tried), sum(record.cut for record in tried)
    if chosen is None:
        return Summary(entry, None, searched=len(tried), search_diverged=failed, search_cut=cut)
    search_keys = {record.settings.key for record in groups[chosen]}
    members = [r for r in by_setting(records)[chosen] if not r.settings.hold_out and not r.cut]
    fresh = [r for r in members if r.settings.key not in search_keys] or groups[chosen]
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
        lr_seeds=frozenset(r.settings.seed for members in groups.values() for r in members),
        searched=0 if only else len(tried),
        search_diverged=0 if only else failed,
        search_cut=cut,
        seeds=tuple(record.settings.seed for record in fresh),
        diverged=len(fresh) - len(whole),
        at_edge=_edges(grid, chosen),
    )


def _only_setting(groups: dict[Setting, list[Record]]) -> Setting | None:
    """The setting, if there is just one and a run of it finished.

    No seed chose it, so its diverged seeds are results like the others.
    """
    members = [record for group in groups.values() for record in group]
    finished = any(record.status == "finished" for record in members)
    return next(iter(groups)) if len(groups) == 1 and finished else None


def ranked(summaries: Iterable[Summary], judge: Judge) -> list[Summary]:
    """The best result first; those without one last. Equal ones keep their order."""
    sign = -1 if judge.higher_is_better else 1

    def key(summary: Summary) -> float:
        point = summary.final.get(judge.metric)
        return math.inf if point is None else sign * point.mean

    return sorted(summaries, key=key)


def lr_curve(
    groups: dict[Setting, list[Record]], decay: float, judge: Judge
) -> list[tuple[float, float | None]]:
    """The metric in the search by learning rate, at one decay; None: diverged."""
    points: list[tuple[float, float | None]] = []
    for setting in sorted(groups):
        if setting[1] == decay:
            score = judge.score(groups[setting])[0]
            metric = score if judge.higher_is_better else -score
            points.append((setting[0], metric if math.isfinite(metric) else None))
    return points


def _curve(curves: Sequence[Sequence[float | None]]) -> list[Estimate]:
    """Mean over the runs by epoch, up to the shortest: a problem may omit a metric."""
    return [_mean(values) for values in zip(*curves, strict=False)]


def _mean(values: Sequence[float | None]) -> Estimate:
    """Of finished runs, whose values are all numbers."""
    return estimate([value for value in values if value is not None])


def _edges(groups: dict[Setting, list[Record]], chosen: Setting) -> tuple[str, ...]:
    """On each axis, beside what was tried at the chosen value of the other one."""
    edges = []
    for axis, name in enumerate(("lr", "decay")):
        values = {setting[axis] for setting in groups if setting[1 - axis] == chosen[1 - axis]}
        low_end = chosen[axis] == min(values) and chosen[axis] > 0
        if len(values) > 1 and (low_end or chosen[axis] == max(values)):
            edges.append(name)
    return tuple(edges)
