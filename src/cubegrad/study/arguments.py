"""Values of the command line: text in, a number out, or an error with limit and remedy."""

import argparse
import math
import sys
from decimal import Decimal
from typing import Any

POWERS_OF_TEN = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
BELOW = " and < 2^63"
LARGEST_SEED = 2**32 - 1  # numpy's limit; a million times it, plus an epoch, still fits torch's


class Once(argparse.Action):
    """An option with one value. Given twice, argparse would silently keep the last.

    `namespace.given` has the options that were given, by name.
    """

    remedy = "give it once, as it takes one value"

    def __call__(
        self,
        _: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        value: Any,
        __: str | None = None,
    ) -> None:
        if self.option_strings:
            given = vars(namespace).setdefault("given", {})
            if self.dest in given:
                first, option = given[self.dest], self.option_strings[0]
                remedy = self.remedy.format(option=option, first=first, second=value)
                raise argparse.ArgumentError(self, f"given twice, {first} and {value}; {remedy}")
            given[self.dest] = value
        setattr(namespace, self.dest, value)


class OnceWithList(Once):
    remedy = "give it once, with several values as {option} {first},{second}"


def count(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text:.60} must be a whole number >= 1{BELOW}; use 1")
    return value


def parameters(text: str) -> int:
    """A number of parameters: 7B, 350M, 1.5e9, 7_000_000_000."""
    power = POWERS_OF_TEN.get(text[-1:].lower(), 0)
    digits = text[:-1] if power else text
    try:
        # Decimal, as 2.3 * 1e9 is less than 2,300,000,000.
        value = Decimal(digits).scaleb(power) if math.isfinite(float(digits)) else Decimal()
    except (ValueError, ArithmeticError):
        value = Decimal()
    if not 1 <= value <= sys.float_info.max:
        raise argparse.ArgumentTypeError(
            f"{text} must be a finite number >= 1, with k, M, B (or G) or T for its thousands, "
            "millions and so on; use 7B, 350M or 1.5e9"
        )
    return int(value)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} must be a number of seconds >= 0; use 10")
    return value


def part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be a part of a GPU in (0, 1]; use 0.25")
    return value


def seed(text: str) -> int:
    value = natural(text)
    if value > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text} must be at most {LARGEST_SEED}; use 0")
    return value


def natural(text: str) -> int:
    value = _whole(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text:.60} must be a whole number >= 0{BELOW}; use 0")
    return value


def _whole(text: str) -> int:
    """-1 if it is none, or too large for a record."""
    is_one = text.isdecimal() and len(text.lstrip("0")) < 20  # int() reads 4300 digits at most
    value = int(text) if is_one else -1
    return value if value < 2**63 else -1
