"""The progress of a sweep: a bar in a terminal, plain lines in a log."""

import os
import select
import struct
import time
from io import StringIO

import pytest
import toy_problem
from small_runs import settings_of

from cubegrad.study.progress import Progress, duration
from cubegrad.study.records import Record


def test_progress_in_a_log_is_plain_lines_with_the_time_left() -> None:
    stream = StringIO()
    progress = Progress(stream, every=0.0)
    progress.add(2, 20)
    progress.epochs(0)  # as a pool does while its workers start
    progress.epochs(0)
    progress.epochs(5)
    time.sleep(0.01)
    progress.epochs(5)
    lines = stream.getvalue().splitlines()
    start = "0/2 runs, 0/20 epochs, 0:00 gone, starting workers and their first epochs"
    assert lines[:2] == [start, start]
    assert lines[2] == "0/2 runs, 5/20 epochs, 0:00 gone, unknown time left"
    assert lines[3].startswith("0/2 runs, 10/20 epochs, 0:00 gone, about 0:00 left")
    assert "\r" not in stream.getvalue()


def test_progress_in_a_terminal_is_a_bar() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(stream)
    progress.add(1, 4)
    progress.epochs(2)
    curve: dict[str, list[float | None]] = {"train_loss": [0.5], "loss": [0.25]}
    progress.finished(Record(settings_of(toy_problem.problem()), "finished", curve, 0.0), "loss")
    progress.say("a word")
    progress.close()
    text = stream.getvalue()
    assert "starting: " in text.split("0/1 runs: ")[0]
    assert "2/4" in text
    assert "loss 0.25" in text
    assert "a word\n" in text


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (24, 0), (24, 100)])
def test_a_terminal_that_does_not_know_its_width_has_a_bar_too(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr("sys.stderr", stream)  # the only stream whose width tqdm asks for
        progress = Progress()
        progress.add(1, 4)
        progress.epochs(4)
        progress.close()
        text = b""
        while b"4/4" not in text and select.select([ours], [], [], 10)[0]:
            text += os.read(ours, 10_000)
    os.close(ours)
    assert b"4/4" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_runs_that_are_expected_count_until_there_are_as_many() -> None:
    progress = Progress(StringIO())
    progress.expect(6, 60)
    progress.add(2, 20)
    assert progress.ends_at == (6, 60)
    progress.add(5, 50)
    assert progress.ends_at == (7, 70)
    progress.expect(0, 0)
    assert progress.ends_at == (7, 70)
