"""Learning-rate schedules: step -> factor of the learning rate, pure. Steps count from 0.

Written as text, in presets and after the `@` of an entry:

    flat                 1
    tenthing:150-225     1/10 from epoch 150, 1/100 from epoch 225; also 50%-75% of the epochs
    sqrt:100             1/√(i+100): the paper's a/√(i+b), with the learning rate as a
    inverse-sqrt:4000    linear to 1 in 4,000 steps, then √(4000/(i+1))
    polynomial:10000     linear to 1 in 10,000 steps, then linear to 0 at the end
    cosine               half a cosine wave from 1 to 0 at the end
    warmup:100           linear to 1 in 100 steps, then 1; also 5% of the steps
"""

import math
from collections.abc import Callable, Sequence

from cubegrad.study.problem import StudyError

Schedule = Callable[[int], float]


def flat(step: int) -> float:  # noqa: ARG001
    return 1.0


def tenthing(step: int, milestones: Sequence[int]) -> float:
    """Divided by ten at each milestone, given in steps."""
    return float(f"1e-{sum(step >= milestone for milestone in milestones)}")


def sqrt_decay(step: int, b: float) -> float:
    return 1 / math.sqrt(step + b)


def inverse_sqrt(step: int, warmup: int) -> float:
    """The first step has 1/warmup: a step of rate 0 would be wasted."""
    if step + 1 < warmup:
        return (step + 1) / warmup
    return math.sqrt(max(warmup, 1) / (step + 1))


def polynomial(step: int, warmup: int, total: int, power: float = 1.0) -> float:
    if step + 1 < warmup:
        return (step + 1) / warmup
    left = max(total - step, 0) / max(total - max(warmup - 1, 0), 1)
    return float(min(left, 1.0) ** power)


def cosine(step: int, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(step / total, 1.0)))


def warm_up(step: int, warmup: float) -> float:
    return min((step + 1) / max(warmup, 1.0), 1.0)


def warms_up(spec: str) -> bool:
    return spec.partition(":")[0] in ("inverse-sqrt", "polynomial", "warmup")


def parse(spec: str, epochs: int, steps_per_epoch: int) -> Schedule:
    """The schedule named by `spec`, for a run of this length."""
    name, _, argument = spec.partition(":")
    total = epochs * steps_per_epoch
    if spec == "flat":
        return flat
    if spec == "cosine":
        return lambda step: cosine(step, total)
    if name == "tenthing":
        stops = [_part(part, spec, epochs) for part in argument.split("-")]
        milestones = [round(min(stop * steps_per_epoch, 1e18)) for stop in stops]
        return lambda step: tenthing(step, milestones)
    if name == "sqrt":
        b = _number(argument, spec)
        return lambda step: sqrt_decay(step, b)
    if name == "inverse-sqrt":
        warmup = int(_number(argument, spec))
        return lambda step: inverse_sqrt(step, warmup)
    if name == "polynomial":
        warmup = int(_number(argument, spec))
        if warmup >= total:
            raise StudyError(
                f"schedule {spec!r} warms up for {warmup} steps and the run has {total}; "
                f"use polynomial:{total // 10}"
            )
        return lambda step: polynomial(step, warmup, total)
    if name == "warmup":
        steps = _part(argument, spec, total)
        return lambda step: warm_up(step, steps)
    raise _unknown(spec)


def check(spec: str) -> None:
    """Raise StudyError for an unknown schedule. Only `parse` can tell if a warm-up is too long."""
    if not spec.isprintable():  # float would accept "1\n"
        raise _unknown(spec)
    if not spec.startswith("polynomial:"):
        parse(spec, 1, 1)
    else:
        _number(spec.partition(":")[2], spec)


def _part(text: str, spec: str, whole: int) -> float:
    """A number of epochs or steps, which may be a percentage of the run's."""
    if text.endswith("%"):
        return _number(text[:-1], spec) / 100 * whole
    return _number(text, spec)


def _number(text: str, spec: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise _unknown(spec) from None
    if not 0 < value < math.inf:
        raise StudyError(f"schedule {spec!r}: {text} must be > 0 and finite; see docs/study.md")
    return value


def _unknown(spec: str) -> StudyError:
    return StudyError(
        f"unknown schedule {spec!r}; use flat, tenthing:150-225, tenthing:50%-75%, sqrt:100, "
        "inverse-sqrt:4000, polynomial:10000, cosine or warmup:5%"
    )
