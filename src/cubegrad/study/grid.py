"""The values that a search tries: an infinite grid, ranges of it, and how they grow. Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cubegrad.study.problem import StudyError

LARGEST = 3e38  # a little less than the largest float32


@dataclass(frozen=True)
class Grid:
    """Mantissas times powers of a base: [1, 2.5, 5] x 10^i, or 2^i."""

    mantissas: tuple[float, ...] = (1.0, 2.5, 5.0)
    base: int = 10

    def value(self, index: int) -> float:
        power, mantissa = divmod(index, len(self.mantissas))
        if self.base == 10:
            return float(f"{self.mantissas[mantissa]}e{power}")  # the same float as 2.5e-4
        return math.ldexp(self.mantissas[mantissa], power) if power < 1024 else math.inf

    def index_below(self, value: float) -> int:
        """The index of the largest grid value < `value`."""
        index = math.ceil(math.log(value, self.base) + 1) * len(self.mantissas)
        while self.value(index) >= value:
            index -= 1
        return index

    def above(self, value: float) -> float:
        index = self.index_below(value) + 1
        return self.value(index + (self.value(index) == value))

    def below(self, value: float) -> float:
        return self.value(self.index_below(value))

    def between(self, low: float, high: float) -> list[float]:
        index, values = self.index_below(low) + 1, []
        while (value := self.value(index)) <= high:
            values.append(value)
            index += 1
        return values


def parse_grid(text: str) -> Grid:
    """`1,2.5,5`, mantissas of powers of ten, or `powers-of-2`."""
    if text == "powers-of-2":
        return Grid((1.0,), 2)
    remedy = "use 1,2.5,5 (times powers of ten) or powers-of-2"
    try:
        mantissas = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise StudyError(f"--grid {text!r} is not a list of numbers; {remedy}") from None
    rising = all(low < high for low, high in itertools.pairwise(mantissas))
    if not rising or not mantissas[0] >= 1 or not mantissas[-1] < 10:
        raise StudyError(f"--grid {text!r} must rise within [1, 10); {remedy}")
    return Grid(mantissas)


def parse_values(text: str, grid: Grid, name: str) -> tuple[float, ...]:
    """Values and ranges of the grid, as in `0,1e-5..1e-3`."""
    values: set[float] = set()
    for part in text.split(","):
        if "..." in part:  # else 1e-4...1e-1 would mean 1e-4 to 0.1e-1
            raise StudyError(f"--{name} {part} has three dots; use two, as in 1e-4..1e-1")
        low, dots, high = part.partition("..")
        first = _number(low, name)
        if not dots:
            values.add(first)
            continue
        last = _number(high, name)
        inside = grid.between(first, last) if first > 0 else []
        if not inside:
            raise StudyError(f"--{name} {part} has no value of the grid; use 1e-4..1e-1")
        values.update(inside)
    return tuple(sorted(values))


def next_value(
    tried: Sequence[float], best: float | None, first: Sequence[float], grid: Grid, limit: int
) -> float | None:
    """The grid value beyond the best one if that is the smallest or largest tried; else None.

    None too if the first grid has one value, if the best is 0, and once `limit` values have been
    added beyond that end of the first grid. `best=None`, as all runs diverged, extends downwards.
    """
    if len(first) < 2:
        return None
    low, high = min(tried), max(tried)
    if best is None or best == low:
        beyond = sum(value < min(first) for value in tried)
        return _usable(grid.below(low)) if low > 0 and beyond < limit else None
    if best == high:
        beyond = sum(value > max(first) for value in tried)
        return _usable(grid.above(high)) if beyond < limit else None
    return None


def growing_ends(values: Sequence[float]) -> int:
    """At how many ends a grid grows if the best value is there: not beyond 0, nor a lone value."""
    return 0 if len(values) < 2 else 2 - (min(values) == 0)


def _usable(value: float) -> float | None:
    return value if 0 < value <= LARGEST else None


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise StudyError(f"--{name} {text!r} is not a number; use 1e-4..1e-1 or 0.1,0.2") from None
    if LARGEST < value < math.inf:
        raise StudyError(f"--{name} {text} is too large for a float32; use 1e-3")
    if not 0 <= value < math.inf:
        raise StudyError(f"--{name} {text} must be >= 0 and finite; use 1e-3")
    return value
