"""How long an update of the study's problems takes, alone and shared by processes."""

import importlib
import time

import pytest

from cubegrad.study import StudyError


@pytest.fixture
def study_step():
    return importlib.import_module("study_step")


def test_the_time_of_an_update(study_step, capsys):
    study_step.main(["digits", "--updates", "2", "--warm-up", "1"])
    *_, row = capsys.readouterr().out.splitlines()
    name, runs, plain = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "digits"
    assert 0 < float(runs) < 10_000
    assert 0 < float(plain) < 10_000
    with pytest.raises(StudyError, match="digits has no preset other: use cpu, gpu, paper"):
        study_step.main(["digits", "--preset", "other"])


@pytest.mark.processes
@pytest.mark.thorough
def test_the_time_of_an_update_of_processes_that_share_a_device(study_step, capsys):
    began = time.monotonic()
    study_step.main(["digits", "--updates", "20", "--warm-up", "1", "--processes", "2"])
    took = time.monotonic() - began
    *_, header, _, row = capsys.readouterr().out.splitlines()
    assert "2 processes, ms" in header
    name, together = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == "digits"
    assert 0 < float(together) < 1000 * took / 120  # 3 rounds of 20 updates in each
