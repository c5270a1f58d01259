"""Warnings of what is allowed and hardly meant, at the line of the user's code."""

import sys
import warnings
from collections.abc import Iterable
from typing import Any

# torch's default for AdamW. In docs/results and in the paper no best coupled decay of MADGRAD is
# above 1e-3. On photographs 2.5e-3 cost 6 points; in fine-tuning 0.01 ended at 8.9 bits instead of
# 3.1. MirrorMADGRAD is not warned: its best decay is 2.5e-3, and 5e-3 was nearly as good.
LARGE_DECAY = 0.01
LIBRARIES = ("cubegrad", "jax", "optax", "torch")
WORTH_CODING = 2**20  # numbers, 8 MB of state; a small model needs no codes
_has_warned_of_decay = False  # in this process
_has_warned_of_betas = False


def warn_of_coupled_decay(decay: float) -> None:
    """Once per process, if a coupled decay of MADGRAD is as large as those of AdamW."""
    global _has_warned_of_decay
    if decay < LARGE_DECAY or _has_warned_of_decay:
        return
    warn(
        f"weight_decay={decay:g} is an L2 term in the gradient here, not AdamW's decay, and as "
        f"such should be below {LARGE_DECAY}: the best ones found for MADGRAD are 0 to 1e-3, and "
        "larger ones drive the weights of a transformer to 0. If it is AdamW's, pass "
        "decoupled_weight_decay=True and keep lr * weight_decay: with 4 times AdamW's lr, "
        f"weight_decay={decay / 4:g}. See docs/learning_rate.md"
    )
    _has_warned_of_decay = True


def warn_of_betas(first: Any, second: Any) -> None:
    """Once per process: AdamW's second beta is not needed."""
    global _has_warned_of_betas
    if _has_warned_of_betas:
        return
    warn(
        f"AdamW's beta2={second} has no counterpart in MADGRADW, whose mean of the squared "
        f"gradients is over the whole run; pass momentum={first} instead of both"
    )
    _has_warned_of_betas = True


def warn_of_evaluation() -> None:
    """A schedule-free optimizer's caller evaluates the weights that it trains at."""
    warn(
        "a module of a schedule-free optimizer evaluates at the weights that gradients are taken "
        "at, which are not its result; call optimizer.eval() before evaluating and "
        "optimizer.train() after it, or use `with optimizer.averaged():`"
    )


def warn_of_saving() -> None:
    """Or it saves them."""
    warn(
        "state_dict() of a schedule-free optimizer that is in training: weights saved with it are "
        "those that gradients are taken at, and good for going on only; call optimizer.eval() "
        "first to save the ones that it ends at, and optimizer.train() after it"
    )


def warn_of_uncoded(tensors: Iterable[tuple[str, int, str | None]]) -> None:
    """If compact=True leaves most numbers uncoded: of each tensor its name, its size and why."""
    coded = uncoded = 0
    largest: dict[str, tuple[int, str]] = {}  # tensor for each reason
    for name, size, reason in tensors:
        if reason is None:
            coded += size
        else:
            uncoded += size
            largest[reason] = max(largest.get(reason, (0, "")), (size, name))
    if uncoded < WORTH_CODING or uncoded <= coded:
        return
    reasons = sorted(largest.items(), key=lambda item: item[1], reverse=True)
    which = "; ".join(f"{why}, such as {name} of {size:,}" for why, (size, name) in reasons)
    warn(
        f"compact=True saves little here: {uncoded:,} of {coded + uncoded:,} numbers keep the "
        f"state that they have without it, because of {which}. Give it float32 or half-precision "
        "tensors with long rows, or leave it out. See docs/memory.md"
    )


def warn(message: str) -> None:
    """At the line of the user's code that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES
