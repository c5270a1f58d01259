"""The values that are tried: a grid without ends, its parts, and how it grows. Pure."""

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

    def value(self, rung: int) -> float:
        power, place = divmod(rung, len(self.mantissas))
        if self.base == 10:
            return float(f"{self.mantissas[place]}e{power}")  # 2.5e-4 as a reader would write it
        return math.ldexp(self.mantissas[place], power) if power < 1024 else math.inf

    def rung_below(self, value: float) -> int:
        """Of the largest value < `value`."""
        rung = math.ceil(math.log(value, self.base) + 1) * len(self.mantissas)
        while self.value(rung) >= value:
            rung -= 1
        return rung

    def above(self, value: float) -> float:
        rung = self.rung_below(value) + 1
        return self.value(rung + (self.value(rung) == value))

    def below(self, value: float) -> float:
        return self.value(self.rung_below(value))

    def between(self, low: float, high: float) -> list[float]:
        rung, values = self.rung_below(low) + 1, []
        while (value := self.value(rung)) <= high:
            values.append(value)
            rung += 1
        return values


def parse_grid(text: str) -> Grid:
    """`1,2.5,5`, mantissas of powers of ten, or `powers-of-2`."""
    if text == "powers-of-2":
        return Grid((1.0,), 2)
    mantissas = tuple(_number(part, "grid") for part in text.split(","))
    if sorted(set(mantissas)) != list(mantissas) or mantissas[0] < 1 or mantissas[-1] >= 10:
        raise StudyError(f"grid {text!r} must rise within [1, 10); use 1,2.5,5 or powers-of-2")
    return Grid(mantissas)


def parse_values(text: str, grid: Grid, name: str) -> tuple[float, ...]:
    """Values and ranges of the grid, as in `0,1e-5..1e-3`."""
    values: set[float] = set()
    for part in text.split(","):
        if "..." in part:  # float would take the third dot for that of .1e-1
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


def grown(
    tried: Sequence[float], best: float | None, first: Sequence[float], grid: Grid, limit: int
) -> float | None:
    """The next value beside the best one, if that lies on an edge; None if it does not.

    None also if only one value was asked for, at an edge 0 (nothing lies below), and once `limit`
    values stand beyond that edge of the first grid. With no best value, as all diverged, it grows
    downwards.
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


def _usable(value: float) -> float | None:
    return value if 0 < value <= LARGEST else None


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise StudyError(f"--{name} {text!r} is not a number; use 1e-4..1e-1 or 0.1,0.2") from None
    if LARGEST < value < math.inf:
        raise StudyError(f"--{name} {text} is more than a float32 holds; use 1e-3")
    if not 0 <= value < math.inf:
        raise StudyError(f"--{name} {text} must be >= 0 and finite; use 1e-3")
    return value
