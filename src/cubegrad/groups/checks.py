"""What param_groups() refuses."""

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from cubegrad import options
from cubegrad.groups.places import KINDS, Use, matches

RESERVED = ("params", "name", "param_names")


def check_numbers(
    lr: float | Tensor | str | None, weight_decay: float | None, layer_decay: float | None
) -> None:
    if layer_decay is not None:
        value = options.one_number("layer_decay", layer_decay, "use 0.65 to 0.9")
        if not 0 < value <= 1:
            raise ValueError(f"layer_decay={layer_decay} must be in (0, 1]; use 0.65 to 0.9")
        if lr is None:
            raise ValueError(
                f"layer_decay={layer_decay} needs lr, which it multiplies; pass lr=1e-3, or "
                "lr='auto' if MADGRAD is built with it"
            )
    if not (isinstance(lr, str) and lr == "auto"):
        _number("lr", lr)
    _number("weight_decay", weight_decay)


def _number(name: str, value: Any) -> None:
    if value is not None:
        number = options.number(name, value)
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{name}={number} must be finite and >= 0; {options.REMEDY[name]}")


def check_patterns(patterns: Mapping[str, Mapping[str, Any]], uses: list[Use]) -> None:
    if not isinstance(patterns, Mapping) or not all(
        isinstance(pattern, str) and isinstance(given, Mapping)
        for pattern, given in patterns.items()
    ):
        raise TypeError(
            f"patterns={patterns!r} must be a dict of globs to dicts; use {{'head': {{'lr': 0.1}}}}"
        )
    for pattern, given in patterns.items():
        taken = [name for name in RESERVED if name in given]
        if taken:
            raise ValueError(
                f"patterns[{pattern!r}] sets {taken[0]!r}, which param_groups() sets itself; use "
                "options of the optimizer, such as lr"
            )
        for name in ("lr", "weight_decay"):
            _number(name, given.get(name))
        options.flags({name: value for name, value in given.items() if value is not None})
        if not any(matches(pattern, use) for use in uses):
            names = {
                ".".join(use.path[:end]) for use in uses for end in range(1, len(use.path) + 1)
            }
            close = difflib.get_close_matches(pattern, sorted(names), 3, cutoff=0.0)
            raise ValueError(
                f"patterns[{pattern!r}] matches no parameter or module; the nearest are "
                f"{', '.join(close)}. A pattern is a glob for the whole name: `*` stands for any "
                "characters, dots too"
            )


def checked_kinds(no_decay: Iterable[str]) -> set[str]:
    kinds = {no_decay} if isinstance(no_decay, str) else set(no_decay or ())
    for kind in sorted(kinds - set(KINDS)):
        raise ValueError(
            f"no_decay has {kind!r}, and its kinds are {', '.join(KINDS)}; to name parameters use "
            f"patterns={{{kind!r}: {{'weight_decay': 0.0}}}}"
        )
    return kinds
