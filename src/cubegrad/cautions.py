"""Warnings of what is allowed and hardly meant, at the line of the user's code."""

import sys
import warnings

# torch's default for AdamW. In docs/results and in the paper no best coupled decay of MADGRAD is
# above 1e-3. On photographs 2.5e-3 cost 6 points; in fine-tuning 0.01 ended at 8.9 bits instead of
# 3.1. MirrorMADGRAD is not warned: its best decay is 2.5e-3, and 5e-3 was nearly as good.
LARGE_DECAY = 0.01
LIBRARIES = ("cubegrad", "jax", "optax", "torch")
_has_warned_of_decay = False  # in this process


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


def warn(message: str) -> None:
    """At the line of the user's code that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_inside(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES
