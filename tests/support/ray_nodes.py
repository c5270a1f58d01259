"""A Ray cluster on this machine, and the log of what its workers did."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from command_line import SOURCE

# Ray reads these when it is imported: without the token, its ports would be open to anyone.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# A node ends when its standard input is closed, so also when the tests are killed.
GUARD = """
import subprocess, sys
head = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
head.terminate()
head.wait()
"""


@contextlib.contextmanager
def ray_node(words: str, home: str) -> Iterator[subprocess.Popen[str]]:
    """A node of a cluster, stopped at the end of the block."""
    size = "--object-store-memory=80000000"
    command = f"-m ray.scripts.scripts start --block --disable-usage-stats {size} {words}"
    variables = {"RAY_TMPDIR": home, "RAY_worker_niceness": "0", "PYTHONPATH": str(SOURCE)}
    node = subprocess.Popen(
        [sys.executable, "-c", GUARD, sys.executable, *command.split()],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield node
    finally:
        node.communicate(timeout=60)  # closes its standard input


def wait_for_line(node: subprocess.Popen[str], text: str) -> str:
    """The first line of its output with this text in it."""
    assert node.stdout is not None
    lines = []
    for line in node.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError("".join(lines))


class StartedEpoch(NamedTuple):
    """A line of the log of ray_problem."""

    pid: int
    task: str
    epoch: int
    module: str


def started_epochs(data: Path) -> list[StartedEpoch]:
    try:
        lines = (data / "log").read_text().splitlines()
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return [StartedEpoch(int(pid), task, int(epoch), module) for pid, task, epoch, module in rows]


def wait_for(condition: Any, seconds: float = 120) -> Any:
    """The first value of `condition()` that is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")
