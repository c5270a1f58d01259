"""The toy problem for the tests of the cluster, controlled by files in its data folder.

`sleep` holds the seconds that an epoch takes, `together` the number of workers that must have
started before one continues; `torn`, `study-error`, `full`, `bug` and `die` make it fail. Each
epoch adds a line to `log`.
"""

import os
import time
import uuid
from dataclasses import replace
from pathlib import Path

import torch
import toy_problem

from cubegrad.study import StudyError


def build(setup):
    task, name = toy_problem.build(setup), uuid.uuid4().hex

    def batches(epoch):
        if (setup.data / "study-error").exists():
            raise StudyError("the data is odd; use other data")
        if (setup.data / "full").exists():
            raise torch.OutOfMemoryError("CUDA out of memory")
        if (setup.data / "bug").exists():
            raise ZeroDivisionError("a bug of the problem")
        if (setup.data / "die").exists():
            os._exit(9)  # as when the system runs out of memory
        with (setup.data / "log").open("a") as log:  # one write of a short line is atomic
            log.write(f"{os.getpid()} {name} {epoch} {Path(__file__).resolve()}\n")
        wait_for_others(setup.data)
        time.sleep(float((setup.data / "sleep").read_text()))
        return task.batches(epoch)

    return replace(task, batches=batches)


def wait_for_others(data):
    """On a slow machine one worker could otherwise do all the runs before another starts."""
    path, deadline = data / "together", time.monotonic() + 120
    wanted = int(path.read_text()) if path.exists() else 1
    while len({line.split()[0] for line in (data / "log").read_text().splitlines()}) < wanted:
        assert time.monotonic() < deadline, "fewer workers than expected"
        time.sleep(0.02)


def check_data(setup):
    if (setup.data / "torn").exists():
        raise StudyError(f"{setup.data.name} is torn; fetch it again")


def problem():
    return replace(toy_problem.problem(), build=build, check_data=check_data)


def without_data():
    return toy_problem.problem()
