"""The toy problem for the tests of the cluster: files in its data folder say how it is to behave.

`sleep` holds the seconds of an epoch; `study-error`, `bug` and `die` make it fail; `log` gets a
line for each epoch that begins.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import toy_problem

from cubegrad.study import StudyError


def build(setup):
    task = toy_problem.build(setup)

    def batches(epoch):
        if (setup.data / "study-error").exists():
            raise StudyError("the data is odd; use other data")
        if (setup.data / "bug").exists():
            raise ZeroDivisionError("a bug of the problem")
        if (setup.data / "die").exists():
            os._exit(9)  # as when the system wants its memory back
        with (setup.data / "log").open("a") as log:  # short lines of one write are whole
            log.write(f"{os.getpid()} {id(task)} {epoch} {Path(__file__).resolve()}\n")
        time.sleep(float((setup.data / "sleep").read_text()))
        return task.batches(epoch)

    return replace(task, batches=batches)


def check_data(setup):
    if not (setup.data / "sleep").exists():
        raise StudyError(f"no sleep in {setup.data.name}; put it there")


def problem():
    return replace(toy_problem.problem(), build=build, check_data=check_data)


def without_data():
    return toy_problem.problem()
