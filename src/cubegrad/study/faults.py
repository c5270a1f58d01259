"""An error in a problem's code: what and where on one line, and its traceback in the run's log."""

import contextlib
import itertools
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import cubegrad
from cubegrad.study.logs import Log
from cubegrad.study.problem import StudyError

OURS = Path(cubegrad.__file__).resolve().parent
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
NOT_THEIRS = {OURS, *(Path(sysconfig.get_path(name)).resolve() for name in LIBRARIES)}

# What torch raises for an error in a worker of a DataLoader: the last traceback there, as text.
FROM_WORKER = re.compile(
    r"Caught .+\nOriginal Traceback [\s\S]*recent call last\):\n"
    r'((?:  File ".+\n(?:    .*\n)*)+)(\w[^:\n]*):?([\s\S]*)'
)
FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@contextlib.contextmanager
def reported(log: Log | None = None) -> Iterator[None]:
    """Turn an error into a StudyError; if a log is given, the traceback goes there.

    If it cannot be written, the error stays as it is.
    """
    try:
        yield
    except (StudyError, torch.OutOfMemoryError):  # callers know what helps with memory
        raise
    except Exception as error:
        remedy = "mend it and run the same command again"
        if log is not None:
            path = log.failed(error)
            if path is None:
                raise
            remedy = f"{remedy}; its traceback is in {path}"
        raise StudyError(f"{line(error)}; {remedy}") from None


def line(error: Exception) -> str:
    """`NameError: name 'x' is not defined (mine.py line 12, in loss)`"""
    name, text, frames = (
        type(error).__name__,
        _text(error),
        traceback.extract_tb(error.__traceback__),
    )
    if worker := FROM_WORKER.fullmatch(text):
        calls, name, text = worker.groups()
        found = [(file, int(number), where, "") for file, number, where in FRAME.findall(calls)]
        frames = traceback.StackSummary.from_list(found)
    text = " ".join(text.split())
    return f"{': '.join(filter(None, [name, text[:300]]))} ({_place(error, frames)})"


def _text(error: Exception) -> str:
    return str(error.msg if isinstance(error, SyntaxError) else error)


def _place(error: Exception, frames: Iterable[traceback.FrameSummary]) -> str:
    """The last line of the user's code; of an installed problem, the one that we called."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)} line {error.lineno}"
    frames = [one for one in frames if one.filename[0] != "<"]
    theirs = [frame for frame in frames if not _is_in(frame, NOT_THEIRS)]
    called = list(itertools.takewhile(lambda frame: not _is_in(frame, {OURS}), reversed(frames)))
    frame = (theirs or called[::-1][:1] or frames)[-1]
    return f"{_short(frame.filename)} line {frame.lineno}, in {frame.name}"


def _is_in(frame: traceback.FrameSummary, folders: set[Path]) -> bool:
    path = Path(frame.filename).resolve()
    return any(path.is_relative_to(folder) for folder in folders)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
