"""What runs on a node of a cluster: an `Order` in, a `Record` out."""

import contextlib
import os
import shutil
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import cubegrad
from cubegrad.study import catalogue, faults, train
from cubegrad.study.files import writing
from cubegrad.study.logs import Log
from cubegrad.study.problem import Problem, Setup, StudyError
from cubegrad.study.records import Record
from cubegrad.study.workers import Job

MARKER = "mark.tmp"  # `Runs.repair` deletes *.tmp after a kill


@dataclass(frozen=True)
class Order:
    """One run for a node."""

    problem: str
    job: Job
    place: train.Place
    marker: str  # content of the file MARKER beside the checkpoint, if the folder is shared
    version: str = cubegrad.__version__


def epoch_counter() -> type:
    """An actor class that counts each run's epochs: nodes share no memory."""

    # Ray pickles a local class by value, so the actor's process need not import torch.
    class EpochCounter:
        def __init__(self) -> None:
            self.epochs: dict[str, int] = {}

        def at(self, key: str, epochs: int) -> None:
            self.epochs[key] = epochs

        def all(self) -> dict[str, int]:
            return self.epochs

    return EpochCounter


def work(order: Order, counter: Any) -> Record | str:
    """Train on this node. Returns the record, or the message of an error that the user can fix."""
    job, passed, last_report = order.job, 0, time.monotonic()

    def tick() -> None:
        nonlocal passed, last_report
        passed += 1
        if time.monotonic() - last_report >= 1:  # epochs of milliseconds would flood the actor
            last_report = time.monotonic()
            counter.at.remote(job.settings.key, passed)

    try:
        problem = find(order.problem, order.version, job.settings.device)
        # A run restarted on another node can resume only if the folder is shared.
        shared = is_shared(job.checkpoint.parent, order.marker)
        checkpoint = job.checkpoint if shared else None
        place = order.place if shared else replace(order.place, logs=None)
        with faults.reported(Log(place.logs, job.settings) if shared else None):
            return train.run(problem, job.settings, place, checkpoint, tick, job.since, job.until)
    except StudyError as error:
        return str(error)
    except torch.OutOfMemoryError:
        return (
            "a GPU has too little memory for its runs; "
            "run the same command again to resume, with a larger --gpus-per-run"
        )


def check(problem: str, setup: Setup, version: str) -> str | None:
    """Check the data on this node. Returns the error message, if any."""
    try:
        check = find(problem, version, setup.device.type).check_data
        if check is not None:
            with faults.reported():
                check(setup)
    except StudyError as error:
        return str(error)
    return None


def find(problem: str, version: str, device: str) -> Problem:
    if cubegrad.__version__ != version:
        raise StudyError(
            f"a node has cubegrad {cubegrad.__version__} and the sweep uses {version}; "
            "install the same version on every node"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise StudyError(
            "torch sees no GPU on a node that has one; install a torch with CUDA there"
        )
    return catalogue.find(problem)


@contextlib.contextmanager
def marker(folder: Path) -> Iterator[str]:
    """Write a marker file, by which nodes detect whether they share this folder."""
    text = uuid.uuid4().hex
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(text)
    try:
        yield text
    finally:
        (folder / MARKER).unlink(missing_ok=True)


def is_shared(folder: Path, text: str) -> bool:
    try:
        return (folder / MARKER).read_text() == text and os.access(folder, os.W_OK)
    except OSError:
        return False


def name(problem: str) -> str:
    """The problem's name on a node: a file becomes a module, as nodes lack the path."""
    if ":" not in problem:
        return problem
    module, function, _ = catalogue.load(problem)
    return f"{module}:{function}"


def pack(problem: str, folder: Path) -> Path | None:
    """Copy a user's own module, and the Python files and packages beside it, for the nodes.

    Nothing else in its folder is copied: data and runs may be gigabytes. Installed packages must
    be installed on the nodes too.
    """
    if ":" not in problem or "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # by `ray job submit`
        return None
    module, _, _ = catalogue.load(problem)
    top = sys.modules[module.partition(".")[0]]
    within = getattr(top, "__path__", None)  # only packages have one
    home = Path(within[0] if within else str(top.__file__)).resolve().parent
    if any(home == Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")):
        return None
    for path in home.iterdir():
        if path.suffix == ".py" and path.is_file():
            shutil.copy(path, folder)
        elif (path / "__init__.py").is_file():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    if within and top.__file__ is None:  # no __init__.py, so it may hold anything: copy *.py only
        for path in Path(within[0]).resolve().rglob("*.py"):
            (folder / path.relative_to(home)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(home))
    return folder
