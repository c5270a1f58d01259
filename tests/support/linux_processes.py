"""The processes of this machine, as Linux lists them in /proc."""

from pathlib import Path
from typing import NamedTuple

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")


class Process(NamedTuple):
    pid: int
    state: str
    parent: int
    session: int


def process_of(pid: int | str) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(int(pid), fields[0], int(fields[1]), int(fields[3]))


def running() -> list[Process]:
    """All processes that have not ended; a zombie has."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            one = process_of(folder.name)
        except OSError:
            continue
        if one.state != "Z":
            found.append(one)
    return found


def is_running(pid: int) -> bool:
    return any(one.pid == pid for one in running())
