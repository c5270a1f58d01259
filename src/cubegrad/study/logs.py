"""A text file per run, RUNS_DIR/logs/METHOD-...-KEY.log: its settings, then a line per epoch.

The record has all of its numbers, so a log that cannot be written stops nothing.
"""

import contextlib
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cubegrad.study.records import Settings


class Log:
    """Follows one run; lines are written as the epochs end, so `tail -f` shows them."""

    def __init__(self, folder: Path | None, settings: Settings) -> None:
        """Without a folder nothing is written."""
        self.settings = settings
        self.path = None if folder is None else folder / f"{name(settings)}.log"

    def begin(self, epoch: int) -> None:
        if epoch:
            self._write(f"resumed after epoch {epoch}")
        else:
            values = (f"{name} {value}" for name, value in asdict(self.settings).items())
            self._write(", ".join(values), mode="w")

    def epoch(self, curve: Mapping[str, Sequence[float | None]], number: int, time: float) -> None:
        """The values of the last epoch; `number` is how many there have been."""
        values = (
            f"{name} {'not finite' if values[-1] is None else f'{values[-1]:.6g}'}"
            for name, values in curve.items()
            if len(values) == number  # after a loss that is not finite nothing is evaluated
        )
        self._write(f"epoch {number}/{self.settings.epochs}: {', '.join(values)}; {time:.1f} s")

    def end(self, status: str) -> None:
        self._write("stopped here by --search halving, may resume" if status == "cut" else status)

    def failed(self, error: Exception) -> Path | None:
        """Write the traceback; returns the file, unless it could not be written."""
        lines = "".join(traceback.format_exception(error))
        return self.path if self._write(f"failed\n{lines.rstrip()}") else None

    def _write(self, line: str, mode: str = "a") -> bool:
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
                    file.write(f"{line}\n")
                return True
        return False


def name(settings: Settings) -> str:
    """A file name for a run that a person can read; a record may name any method."""
    s = settings
    text = f"{s.method}-lr{s.lr:g}-decay{s.decay:g}-seed{s.seed}-{s.key}"
    return re.sub(r"[^\w.+-]", "_", text)
