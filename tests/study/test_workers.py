"""Worker processes: the same numbers from any number of them, killed or stopped."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import command_line
import pytest
import toy_problem
from command_line import start
from linux_processes import is_running, needs_proc, running
from small_sweeps import curves, four_runs

from cubegrad.study import StudyError
from cubegrad.study.progress import Progress
from cubegrad.study.records import Runs
from cubegrad.study.sweep import Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

pytestmark = pytest.mark.processes

TOY = four_runs(toy_problem.problem())


def test_results_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    for workers in (1, 2):
        machine = Machine("toy_problem:problem", Place(), workers)
        progress = Progress(StringIO())
        try:
            Sweep(TOY, Runs(tmp_path / str(workers)), machine, progress).search()
        finally:
            machine.close()
        assert (progress.runs, progress.passed, progress.total) == (4, 16, 16)
    assert len(curves(tmp_path / "1")) == 4
    assert curves(tmp_path / "1") == curves(tmp_path / "2")


def test_a_worker_that_is_killed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_DIE", "1")
    machine = Machine("toy_problem:problem", Place(), 2)
    try:
        with pytest.raises(StudyError, match=r"a worker was killed.*run the same command again"):
            Sweep(TOY, Runs(tmp_path), machine, Progress(StringIO())).search()
    finally:
        machine.close()
    assert curves(tmp_path) == {}


def start_sweep(folder: Path, workers: int, sleep: float) -> subprocess.Popen[str]:
    words = "sweep toy_problem:problem --lr 0.01,0.1 --widen 0 --epochs 6 --save-every 0"
    return start(f"{words} --out {folder} --workers {workers}", TOY_SLEEP=str(sleep))


def wait_for_records(folder: Path, stop: subprocess.Popen[str] | None = None) -> None:
    """Wait for the first record; `stop` is suspended where another run has a checkpoint.

    It is suspended before that is checked: runs that started together end together, so a checkpoint
    seen a moment ago may belong to a run that is being recorded.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if Runs(folder).load()[0]:
            if stop is None:
                return
            stop.send_signal(signal.SIGSTOP)
            records = Runs(folder).load()[0]
            saved = {path.stem for path in (folder / "checkpoints").glob("*.pt")}
            if saved - records.keys():
                return
            stop.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    pytest.fail("no record after a minute")


@needs_proc
def test_a_sweep_killed_with_sigkill_goes_on_where_it_was(tmp_path: Path) -> None:
    process = start_sweep(tmp_path / "killed", 2, sleep=0.2)
    wait_for_records(tmp_path / "killed", stop=process)
    workers = [one.pid for one in running() if one.parent == process.pid]
    assert len(workers) >= 2
    process.kill()
    process.communicate()
    before = curves(tmp_path / "killed")
    assert 1 <= len(before) < 4
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers)), "workers must not outlive the sweep"
    assert list((tmp_path / "killed" / "checkpoints").glob("*.pt")), "runs were under way"
    finish_and_compare(tmp_path / "killed", tmp_path / "whole", before)


def finish_and_compare(folder: Path, unbroken: Path, before: dict[str, Any]) -> None:
    """Finish the sweep of `folder` here; it must equal one that was never stopped."""
    preset = replace(TOY.preset, epochs=6)
    for one in (folder, unbroken):
        runs = Runs(one)
        assert runs.repair() == []
        machine = Machine("toy_problem:problem", Place())
        sweep = Sweep(replace(TOY, preset=preset), runs, machine, Progress(StringIO()))
        assert len(sweep.records) == (len(before) if one == folder else 0)
        sweep.search()
    after = curves(folder)
    assert after == curves(unbroken)
    assert {key: after[key] for key in before} == before
    assert len(after) == 4
    assert not list((folder / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_ctrl_c_keeps_the_finished_runs(workers: int, tmp_path: Path) -> None:
    process = start_sweep(tmp_path / "stopped", workers, sleep=0.1)
    wait_for_records(tmp_path / "stopped")
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "stopped; run the same command again to resume" in errors
    before = curves(tmp_path / "stopped")
    assert 1 <= len(before) < 4
    finish_and_compare(tmp_path / "stopped", tmp_path / "whole", before)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("SIGTERM", 2),
        ("SIGHUP", 1),
        pytest.param("SIGTERM", 1, marks=pytest.mark.thorough),
        pytest.param("SIGHUP", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_to_end_keeps_the_finished_runs_and_leaks_nothing(
    name: str, workers: int, tmp_path: Path
) -> None:
    number = getattr(signal, name)
    process = start_sweep(tmp_path / "stopped", workers, sleep=0.1)
    wait_for_records(tmp_path / "stopped")
    process.send_signal(number)  # `kill` sends it to the command alone
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped; run the same command again to resume" in errors
    assert "Traceback" not in errors
    assert "leaked" not in errors
    before = curves(tmp_path / "stopped")
    assert 1 <= len(before) < 4
    assert not list((tmp_path / "stopped").rglob("*.tmp*"))
    finish_and_compare(tmp_path / "stopped", tmp_path / "whole", before)


@pytest.mark.thorough
def test_a_sweep_under_nohup_outlives_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "PROGRAM", command_line.PROGRAM.replace("SIG_DFL", "SIG_IGN"))
    process = start_sweep(tmp_path, 1, sleep=0.1)
    wait_for_records(tmp_path)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert len(curves(tmp_path)) == 4
