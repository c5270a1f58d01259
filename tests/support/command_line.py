"""The command `cubegrad`: called in this process to see its refusals, or started in its own."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import cubegrad
from cubegrad.study import cli

SUPPORT = Path(__file__).parent
SOURCE = Path(cubegrad.__file__).parents[1]
# A shell that runs the tests in the background has its children ignore Ctrl-C, and nohup SIGHUP.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "from cubegrad.study.cli import main; sys.exit(main())"
)


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error that a bad command ends with, having printed nothing else."""
    try:
        status: object = cli.main(words.split())
    except SystemExit as ended:
        status = ended.code
    out, errors = capsys.readouterr()
    assert (status, out, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("cubegrad")
    return errors


def start(words: str, **environment: str) -> subprocess.Popen[str]:
    """The command in a session of its own, with the problems of this folder to import."""
    path = os.pathsep.join([str(SUPPORT), str(SOURCE)])
    variables: Mapping[str, str] = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words.split()],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
