"""Runs that are killed and go on, and processes that must be gone."""

from pathlib import Path
from typing import NamedTuple

import pytest

from cubegrad.study.train import run


class KilledError(Exception):
    pass


def killed_and_resumed(problem, settings, place, checkpoint, after=1):
    """The record of a run that was stopped after so many epochs and went on from its checkpoint."""
    ticks = []

    def tick():
        ticks.append(1)
        if len(ticks) == after:
            raise KilledError

    with pytest.raises(KilledError):
        run(problem, settings, place, checkpoint, tick)
    assert checkpoint.exists()
    return run(problem, settings, place, checkpoint)


class Process(NamedTuple):
    """What Linux tells of a process."""

    pid: int
    state: str
    parent: int
    session: int


def look(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(int(pid), fields[0], int(fields[1]), int(fields[3]))


def processes():
    """Those that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            one = look(place.name)
        except OSError:
            continue
        if one.state != "Z":
            found.append(one)
    return found


def alive(pid):
    return any(one.pid == pid for one in processes())
