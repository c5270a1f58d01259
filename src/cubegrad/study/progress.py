"""Progress of a sweep: a bar with the time left on a terminal, plain lines in a log."""

import sys
import time
from typing import TextIO

from tqdm import tqdm

from cubegrad.study.records import Record


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Progress:
    """Counts epochs: all runs of a sweep have the same number."""

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self.stream = stream or sys.stderr
        self.every = every
        self.runs = self.total_runs = self.passed = self.total = 0
        self.expected_runs = self.expected = 0
        self.start = self.last_line = time.monotonic()
        self.first: tuple[float, int] | None = None  # time and epochs of the first update
        terminal = self.stream.isatty()
        # Workers import torch before their first epoch, which takes 5 to 15 s on a busy machine.
        about = {"desc": "starting", "unit": "epoch"}
        self.bar = tqdm(total=0, file=self.stream, **about) if terminal else None
        if self.bar is not None and (self.bar.ncols or 80) < 1:
            # Some terminals (of containers, of `script`) have no size, and tqdm shows nothing.
            self.bar.ncols, self.bar.nrows = 80, 24

    def add(self, runs: int, epochs: int) -> None:
        self.total_runs += runs
        self.total += epochs
        self._show_total()

    def expect(self, runs: int, epochs: int) -> None:
        """How many there will be in the end, if no more than these are added."""
        self.expected_runs, self.expected = runs, epochs
        self._show_total()

    @property
    def ends_at(self) -> tuple[int, int]:
        """Runs and epochs in the end: those added, or those expected if they are more."""
        return max(self.total_runs, self.expected_runs), max(self.total, self.expected)

    def _show_total(self) -> None:
        if self.bar is not None:
            self.bar.total = self.ends_at[1]
            self.bar.refresh()

    def epochs(self, count: int) -> None:
        self.passed += count
        if count and self.first is None:
            self.first = time.monotonic(), self.passed
            if self.bar is not None:
                self.bar.set_description(f"0/{self.ends_at[0]} runs")
        if self.bar is not None:
            self.bar.update(count)
        elif time.monotonic() - self.last_line >= self.every:
            self.last_line = time.monotonic()
            self.stream.write(f"{self.line()}\n")
            self.stream.flush()

    def line(self) -> str:
        now = time.monotonic()
        runs, total = self.ends_at
        left = "starting workers and their first epochs"
        if self.first is not None:  # measured from the first epochs: workers start only once
            begun, done = self.first
            rate = (self.passed - done) / (now - begun) if now > begun else 0
            known = f"about {duration((total - self.passed) / rate)}" if rate else "unknown time"
            left = f"{known} left"
        return (
            f"{self.runs}/{runs} runs, {self.passed}/{total} epochs, "
            f"{duration(now - self.start)} gone, {left}"
        )

    def finished(self, record: Record, metric: str) -> None:
        self.runs += 1
        if self.bar is not None:
            value = record.last(metric)
            result = "diverged" if value is None else f"{metric} {value:.4g}"
            self.bar.set_description(
                f"{self.runs}/{self.ends_at[0]} runs, {record.settings.method}"
            )
            self.bar.set_postfix_str(result)

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            self.stream.write(f"{text}\n")
            self.stream.flush()

    def close(self) -> None:
        if self.bar is not None:
            if self.runs:  # fewer than expected, perhaps
                self.bar.set_description(f"{self.runs}/{self.total_runs} runs")
            self.bar.close()
