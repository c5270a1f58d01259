"""Values of the command line: text in, a number out, or an error with limit and remedy."""

import argparse

LARGEST_SEED = 2**32 - 1  # numpy's limit; a million times it, plus an epoch, still fits torch's


def count(text: str) -> int:
    value = int(text) if text.lstrip("-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number >= 1; use 1")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} must be a number >= 1; use 7e9") from None


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
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number >= 0; use 0")
    return int(text)
