"""Ray on this machine for the tests of the cluster, and what its processes leave to see."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cubegrad

# Before anything imports Ray, which reads them then: its ports are open to all who have the token.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# The head ends when its input does, and so also when the tests are killed.
GUARD = """
import subprocess, sys
head = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
head.terminate()
head.wait()
"""
SOURCE = str(Path(cubegrad.__file__).parents[1])


@contextlib.contextmanager
def ray_start(words: str, home: str) -> Iterator[subprocess.Popen[str]]:
    """A node on this machine, ended with the block."""
    size = "--object-store-memory=80000000"
    command = f"-m ray.scripts.scripts start --block --disable-usage-stats {size} {words}"
    node = subprocess.Popen(
        [sys.executable, "-c", GUARD, sys.executable, *command.split()],
        env={**os.environ, "RAY_TMPDIR": home, "RAY_worker_niceness": "0", "PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield node
    finally:
        node.communicate(timeout=60)  # closes its input


def said(node: subprocess.Popen[str], what: str) -> str:
    assert node.stdout is not None
    lines = []
    for line in node.stdout:
        lines.append(line)
        if what in line:
            return line
    raise AssertionError("".join(lines))


class Begun(NamedTuple):
    """A line of the problem's log."""

    pid: int
    task: str
    epoch: int
    module: str


def begun(data: Path) -> list[Begun]:
    try:
        lines = (data / "log").read_text().splitlines()
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return [Begun(int(pid), task, int(epoch), module) for pid, task, epoch, module in rows]


def wait_for(what: Any, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
