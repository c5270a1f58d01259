"""Runs of several problems on one device: which one is next, what still fits, and CUDA MPS."""

import importlib
import os
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from cubegrad.study import catalogue, methods
from cubegrad.study.plan import Plan
from cubegrad.study.records import Runs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def shared(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("shared_device")


@pytest.fixture
def schedule(shared, tmp_path, monkeypatch):
    """A function that makes a Schedule whose pool runs nothing, and whose clock stands still."""
    monkeypatch.setattr(shared, "ProcessPoolExecutor", lambda *_: None)

    def make(jobs, seconds=float("inf")):
        made = shared.Schedule(lambda: jobs, 8, seconds, Runs(tmp_path))
        made.gone = lambda: 0.0
        return made

    return make


def start(schedule):
    """Start the next job, if there is one."""
    job = schedule.next()
    if job is not None:
        schedule.waiting.remove(job)
        schedule.running[Future()] = job, schedule.gone()
    return job and job.name


def test_a_later_problem_gets_what_an_earlier_one_leaves(schedule, shared, tmp_path):
    jobs = [
        shared.Job("a0", print, 1.0, "a"),
        shared.Job("a1", print, 1.0, "a", folders=(tmp_path, tmp_path / "missing")),
        shared.Job("a2", print, 1.0, "a", after="a0"),
        *(shared.Job(f"b{count}", print, 1.0, "b") for count in range(3)),
    ]
    made = schedule(jobs)
    assert [start(made), start(made)] == ["a0", "b0"]
    (tmp_path / "missing").mkdir()
    assert [start(made), start(made)] == ["a1", "b1"]
    made.running.clear()
    assert [start(made) for _ in range(3)] == ["a2", "b2", None]


def test_problems_come_in_the_order_in_which_they_are_named(shared):
    trials = [SimpleNamespace(problem=name, number=n) for n, name in enumerate("abac")]
    assert [one.number for one in shared.chosen(trials, "c,a,c")] == [3, 0, 2]
    assert shared.chosen(trials, None) == [trials[n] for n in (0, 2, 1, 3)]


def mps(folder, monkeypatch, exit_code=0):
    """Install a control program that notes what it is called with."""
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "what = ' '.join(sys.argv[1:]) or sys.stdin.read().strip()\n"
        f"with open({str(folder / 'calls')!r}, 'a') as calls:\n"
        "    print(what, os.environ['CUDA_MPS_PIPE_DIRECTORY'], file=calls)\n"
        f"sys.exit({exit_code})\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return lambda: [line.split() for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize(("exit_code", "use_gpu"), [(0, "pass"), (1, "pass"), (0, "raise OSError")])
def test_mps_runs_beside_the_runs_if_it_works(
    shared, tmp_path, monkeypatch, capfd, exit_code, use_gpu
):
    calls = mps(tmp_path, monkeypatch, exit_code)
    monkeypatch.setattr(shared, "USE_GPU", use_gpu)
    works = not exit_code and use_gpu == "pass"
    with shared.overlapping_kernels("cuda"):
        (start, pipes), *stopped = calls()
        assert start == "-d"
        assert stopped == ([] if works else [["quit", pipes]])
        assert os.environ.get("CUDA_MPS_PIPE_DIRECTORY") == (pipes if works else None)
        assert ("does not work here" in capfd.readouterr().err) is not works
    assert calls() == [["-d", pipes], ["quit", pipes]]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not Path(pipes).exists()


def test_mps_is_left_alone_if_it_runs_or_is_not_wanted(shared, tmp_path, monkeypatch):
    mps(tmp_path, monkeypatch)
    with shared.overlapping_kernels("cpu"):
        pass
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "mine")
    with shared.overlapping_kernels("cuda"):
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "mine"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "mine"
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("took", "fits"), [(80.0, True), (95.0, False)])
def test_what_fits_is_told_by_the_last_run_of_its_kind(schedule, shared, took, fits):
    made = schedule(
        [shared.Job("a0", print, 1.0, "a"), shared.Job("a1", print, 1000.0, "a")], seconds=100.0
    )
    assert start(made) == "a0"
    assert start(made) is None  # by the guess
    (future,) = made.running
    future.set_result(SimpleNamespace(about={"metric": "loss"}, last=lambda _: 1.0))
    made.runs = SimpleNamespace(append=lambda _: None)
    made.begun.add("a0")
    made.gone = lambda: took
    made.finish(future)
    made.gone = lambda: 0.0
    assert start(made) == ("a1" if fits else None)


def test_the_compiler_runs_once_before_the_runs_of_a_problem(shared, tmp_path):
    problem = catalogue.find("cifar10")
    for device, first in (("cuda", ["compiled code of cifar10"]), ("cpu", [])):
        plan = Plan(problem, "gpu", problem.presets["gpu"], (), device)
        entry = methods.entry("sgd", plan.preset)
        runs = [plan.settings(entry, (lr, 0.0), 0, hold_out=False) for lr in (0.1, 1.0)]
        wanted = [shared.Wanted("cifar10", one, 5.0) for one in runs]
        made = shared.jobs(wanted, tmp_path, Runs(tmp_path))
        assert [job.name for job in made[: len(first)]] == first
        assert [job.after for job in made[len(first) :]] == 2 * (first or [""])
