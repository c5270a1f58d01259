"""A run's log, one line per epoch, for people who wait for a run or wonder about it.

It is written beside the run's checkpoint, and moved to RUNS_DIR/logs once the run is recorded. The
record has all of its numbers, so a log that cannot be written stops nothing.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cubegrad.study.records import Settings


def add(checkpoint: Path | None, text: str) -> None:
    """Add a line to the log of the run with this checkpoint, if it has one."""
    if checkpoint is None:
        return
    with contextlib.suppress(OSError):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with checkpoint.with_suffix(".log").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z} {text}\n")


def epoch_line(curve: Mapping[str, Sequence[float | None]], epochs: int, seconds: float) -> str:
    """The last epoch of a run."""
    last = {name: values[-1] for name, values in curve.items() if values}
    values = (f"{name} {'not finite' if v is None else f'{v:.6g}'}" for name, v in last.items())
    return f"epoch {len(curve['train_loss'])}/{epochs}: {', '.join(values)}; {seconds:.1f} s"


def keep(checkpoint: Path, settings: "Settings") -> None:
    """Move the log of a recorded run to where a person would look for it."""
    target = checkpoint.parent.parent / "logs" / f"{name(settings)}.log"
    with contextlib.suppress(OSError):
        source = checkpoint.with_suffix(".log")
        if source.exists():
            target.parent.mkdir(exist_ok=True)
            source.replace(target)


def name(settings: "Settings") -> str:
    """A file name for a run that a person can read; a record may name any method."""
    s = settings
    text = f"{s.method}-lr{s.lr:g}-decay{s.decay:g}-seed{s.seed}-{s.key}"
    return re.sub(r"[^\w.+-]", "_", text)
