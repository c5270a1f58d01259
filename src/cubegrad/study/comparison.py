"""Methods beside each other: differences, ranks, the width of a learning rate's optimum. Pure.

A mean in the reports is ± 2 standard errors, which with 3 seeds covers the truth in 82 % of cases
only. That is good enough to show spread, but not to say that a method is better: an interval of a
difference here is Student's, 95 %, so with 3 seeds ± 4.3 standard errors.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from cubegrad.study.records import Record
from cubegrad.study.statistics import Estimate, Judge, Summary, estimate

LEVEL = 0.95
GRID_STEP = math.log10(2.5)  # the largest step of the grid 1, 2.5, 5, in decades


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """|t| is below this with probability `level`; Student's t with so many degrees of freedom."""
    return float(stats.t.ppf((1 + level) / 2, freedom))


@dataclass(frozen=True)
class Difference:
    """What a method gains over another one, seed for seed; positive is better."""

    gains: dict[int, float]  # by seed
    lost: tuple[int, ...] = ()  # seeds with which one of the two diverged

    @property
    def estimate(self) -> Estimate | None:
        return estimate([*self.gains.values()]) if self.gains else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the mean gain, 95 %; None with fewer than two seeds."""
        point = self.estimate
        if point is None or point.error is None:
            return None
        half = point.error / 2 * t_quantile(point.n - 1)
        return point.mean - half, point.mean + half

    @property
    def sign(self) -> int:
        """1: better, -1: worse, 0: the interval has both, or there is none."""
        low, high = self.interval or (-math.inf, math.inf)
        return 1 if low > 0 else -1 if high < 0 else 0


def difference(
    first: Mapping[int, float | None], second: Mapping[int, float | None], judge: Judge
) -> Difference:
    """What `first` gains over `second`, from final results by seed; None: diverged."""
    way = 1 if judge.higher_is_better else -1
    gains, lost = {}, []
    for seed in sorted(first.keys() & second.keys()):
        one, other = first[seed], second[seed]
        if one is None or other is None:
            lost.append(seed)
        else:
            gains[seed] = way * (one - other)
    return Difference(gains, tuple(lost))


def reported(records: Iterable[Record], summary: Summary) -> dict[int, Record]:
    """By seed, the runs behind the result of a summary of these records."""
    runs = [
        record
        for record in records
        if (record.settings.lr, record.settings.decay) == summary.best
        and record.settings.entry == summary.entry
        and record.settings.seed in summary.seeds
        and not record.cut
    ]
    # A run on the test set replaces the one with a held-out split that chose the setting.
    ordered = sorted(runs, key=lambda record: not record.settings.hold_out)
    return {record.settings.seed: record for record in ordered}


def ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """1 for the largest; equal scores share the mean of their ranks."""
    values = list(scores.values())
    return {
        name: 1 + sum(other > score for other in values) + (values.count(score) - 1) / 2
        for name, score in scores.items()
    }


@dataclass(frozen=True)
class Rate:
    """A learning rate that was run."""

    offset: float  # in decades from the best one
    behind: float  # in % of the best result; inf: diverged


def lr_profile(
    curve: Sequence[tuple[float, float | None]], chosen: float, higher_is_better: bool
) -> list[Rate]:
    """How far each learning rate of a search is behind the chosen one; [] if that was not run.

    Several rates may have the best result, so which of them was chosen must be given.
    """
    way = 1 if higher_is_better else -1
    top = dict(curve).get(chosen)
    if top is None or chosen <= 0:
        return []

    def behind(metric: float | None) -> float:
        if metric is None:
            return math.inf
        gap = way * (top - metric)
        return 100 * gap / abs(top) if top else math.inf if gap else 0.0

    return [Rate(math.log10(lr / chosen), behind(metric)) for lr, metric in curve if lr > 0]


def common_span(profiles: Iterable[Sequence[Rate]]) -> tuple[float, float]:
    """The decades around the best rate that every profile reaches."""
    ends = [(rates[0].offset, rates[-1].offset) for rates in profiles if rates]
    return max((low for low, _ in ends), default=0.0), min((high for _, high in ends), default=0.0)


@dataclass(frozen=True)
class Share:
    """Decades of a span of learning rates."""

    within: float
    run: float
    span: float

    @property
    def missing(self) -> float:
        """Not covered by a rate that was run."""
        return max(self.span - self.run, 0.0)


def share_within(profile: Sequence[Rate], percent: float, span: tuple[float, float]) -> Share:
    """How much of a span has rates at most so many percent behind the best.

    A rate stands for the decades up to the middle between it and the next one that was run, but
    for no more than half a step of the grid: what lies further away was not run.
    """
    low, high = span
    run = within = 0.0
    for place, rate in enumerate(profile):
        left, right = rate.offset - GRID_STEP / 2, rate.offset + GRID_STEP / 2
        if place:
            left = max(left, (profile[place - 1].offset + rate.offset) / 2)
        if place + 1 < len(profile):
            right = min(right, (rate.offset + profile[place + 1].offset) / 2)
        width = max(min(right, high) - max(left, low), 0.0)
        run += width
        within += width if rate.behind <= percent else 0.0
    return Share(within, run, high - low)


def one_step_off(profile: Sequence[Rate]) -> tuple[float | None, float | None]:
    """How far the next lower and the next higher rate of the grid are behind; None: not run."""
    tolerance = GRID_STEP * 1.001
    lower = [r for r in profile if -tolerance <= r.offset < 0]
    higher = [r for r in profile if 0 < r.offset <= tolerance]
    return (lower[-1].behind if lower else None), (higher[0].behind if higher else None)


def first_epoch(curve: Sequence[Estimate], target: float, higher_is_better: bool) -> int | None:
    """The first epoch, from 1, whose mean is as good as the target; None: never."""
    way = 1 if higher_is_better else -1
    reached = (n for n, point in enumerate(curve, 1) if way * point.mean >= way * target)
    return next(reached, None)
