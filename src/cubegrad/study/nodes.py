"""What a node of a cluster is told, and does: an order in, a record out."""

import contextlib
import os
import shutil
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cubegrad
from cubegrad.study import catalogue, train
from cubegrad.study.files import writing
from cubegrad.study.problem import Problem, Setup, StudyError
from cubegrad.study.records import Record, Settings

MARK = "mark.tmp"  # a name that `Runs.repair` clears away, after a kill


@dataclass(frozen=True)
class Order:
    """What a node is told of one run."""

    problem: str
    settings: Settings
    place: train.Place
    checkpoint: Path
    mark: str  # what the node finds beside the checkpoint, if it sees the same folder
    version: str = cubegrad.__version__


def tally() -> type:
    """How many epochs each run has passed: an actor, as nodes share no memory."""

    # A local class travels as code, and so its process has no need to import torch.
    class Tally:
        def __init__(self) -> None:
            self.epochs: dict[str, int] = {}

        def at(self, key: str, epochs: int) -> None:
            self.epochs[key] = epochs

        def all(self) -> dict[str, int]:
            return self.epochs

    return Tally


def work(order: Order, counts: Any) -> Record | str:
    """On a node: the record, or what a user has to mend. What is raised is a bug, or a death."""
    settings, passed, told = order.settings, 0, time.monotonic()

    def tick() -> None:
        nonlocal passed, told
        passed += 1
        if time.monotonic() - told >= 1:  # epochs of milliseconds would flood it
            told = time.monotonic()
            counts.at.remote(settings.key, passed)

    try:
        problem = find(order.problem, order.version, settings.device)
        # A run that begins again on another node finds its checkpoint in a shared folder alone.
        checkpoint = order.checkpoint if sees(order.checkpoint.parent, order.mark) else None
        return train.run(problem, settings, order.place, checkpoint, tick)
    except StudyError as error:
        return str(error)
    except torch.OutOfMemoryError:
        return (
            "a GPU has too little memory for its runs; "
            "the same command goes on where it was, with more --gpus-per-run"
        )


def check(problem: str, setup: Setup, version: str) -> str | None:
    try:
        check = find(problem, version, setup.device.type).check_data
        if check is not None:
            check(setup)
    except StudyError as error:
        return str(error)
    return None


def find(problem: str, version: str, device: str) -> Problem:
    if cubegrad.__version__ != version:
        raise StudyError(
            f"a node has cubegrad {cubegrad.__version__} and the sweep is of {version}; "
            "install the same on every node"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise StudyError(
            "torch sees no GPU on a node that has one; install a torch with CUDA there"
        )
    return catalogue.find(problem)


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Leave a word that only those can read who see this very folder, and not one of its name."""
    mark = uuid.uuid4().hex
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_text(mark)
    try:
        yield mark
    finally:
        (folder / MARK).unlink(missing_ok=True)


def sees(folder: Path, mark: str) -> bool:
    try:
        return (folder / MARK).read_text() == mark and os.access(folder, os.W_OK)
    except OSError:
        return False


def name(problem: str) -> str:
    """What a node calls the problem: a file's module travels, its path does not."""
    if ":" not in problem:
        return problem
    module, function, _ = catalogue.load(problem)
    return f"{module}:{function}"


def pack(problem: str, folder: Path) -> Path | None:
    """Copy a user's own module, with the Python files and packages beside it, for the nodes.

    Nothing else of its folder travels: data and runs may be gigabytes. What is installed here is
    to be installed there.
    """
    if ":" not in problem or "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # `ray job submit` packed
        return None
    module, _, _ = catalogue.load(problem)
    top = sys.modules[module.partition(".")[0]]
    within = getattr(top, "__path__", None)  # of a package
    home = Path(within[0] if within else str(top.__file__)).resolve().parent
    if any(home == Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")):
        return None
    for path in home.iterdir():
        if path.suffix == ".py" and path.is_file():
            shutil.copy(path, folder)
        elif (path / "__init__.py").is_file():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    if within and top.__file__ is None:  # a plain folder: who knows what else is in it
        for path in Path(within[0]).resolve().rglob("*.py"):
            (folder / path.relative_to(home)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / path.relative_to(home))
    return folder
