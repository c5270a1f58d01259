"""Runs that are killed between two epochs and resumed from their checkpoint."""

from pathlib import Path

import pytest

from cubegrad.study import Problem
from cubegrad.study.records import Record, Settings
from cubegrad.study.train import Place, run


class KilledError(Exception):
    pass


def kill_after(
    epochs: int, problem: Problem, settings: Settings, place: Place, checkpoint: Path
) -> None:
    """Run so many epochs and no further."""
    left = epochs

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KilledError

    with pytest.raises(KilledError):
        run(problem, settings, place, checkpoint, tick)


def killed_and_resumed(
    problem: Problem, settings: Settings, place: Place, checkpoint: Path, after: int = 1
) -> Record:
    """The record of a run that was killed after so many epochs, and resumed."""
    kill_after(after, problem, settings, place, checkpoint)
    assert checkpoint.exists()
    return run(problem, settings, place, checkpoint)
