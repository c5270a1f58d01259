"""Runs of several problems on one device: which one is next and what still fits."""

import importlib
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from cubegrad.study import catalogue, methods
from cubegrad.study.plan import Plan
from cubegrad.study.records import Runs


@pytest.fixture
def shared():
    return importlib.import_module("shared.shared_device")


@pytest.fixture
def schedule(shared, tmp_path, monkeypatch):
    """A function that makes a Schedule whose pool runs nothing, and whose clock stands still."""
    pool = SimpleNamespace(submit=lambda _: Future())
    monkeypatch.setattr(shared, "ProcessPoolExecutor", lambda *_: pool)

    def make(jobs, seconds=float("inf")):
        made = shared.Schedule(lambda: jobs, 8, seconds, Runs(tmp_path))
        made.gone = lambda: 0.0
        return made

    return make


def start(schedule):
    """Start the next job, if there is one."""
    job = schedule.next()
    if job is not None:
        schedule.begin(job)
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


def test_no_more_runs_of_a_problem_than_keep_the_device_busy(schedule, shared):
    jobs = [shared.Job(f"a{count}", print, 1.0, "a", at_once=2) for count in range(3)]
    made = schedule([*jobs, shared.Job("b0", print, 1.0, "b")])
    assert [start(made) for _ in range(4)] == ["a0", "a1", "b0", None]


def finish(schedule, name, at, seconds=0.0):
    """End a running job at this time; its record may have seconds of an earlier start."""
    (future,) = (future for future, one in schedule.running.items() if one.job.name == name)
    record = SimpleNamespace(about={"metric": "loss"}, last=lambda _: 1.0, seconds=seconds)
    future.set_result(record)
    schedule.runs = SimpleNamespace(append=lambda _: None)
    schedule.gone = lambda: at
    schedule.finish(future)


@pytest.mark.parametrize(("took", "fits"), [(47.0, True), (48.0, False)])
def test_what_fits_is_told_by_the_last_run_of_its_kind(schedule, shared, took, fits):
    made = schedule(
        [shared.Job("a0", print, 1.0, "a"), shared.Job("a1", print, 1000.0, "a")], seconds=100.0
    )
    assert start(made) == "a0"
    assert start(made) is None  # by the guess
    finish(made, "a0", took)  # and 1.1 times as long for the next one
    assert start(made) == ("a1" if fits else None)


def test_what_fits_depends_on_how_many_share_the_device(schedule, shared):
    jobs = [shared.Job(f"a{count}", print, 50.0, "a") for count in range(5)]
    made = schedule(jobs[:3], seconds=300.0)
    assert [start(made), start(made)] == ["a0", "a1"]
    made.gone = lambda: 40.0
    assert start(made) == "a2"
    made.plan = lambda: jobs
    finish(made, "a0", 100.0)  # half of 40 s and a third of 60
    assert made.took["a"] == pytest.approx(40)
    assert made.expected(jobs[3]) == pytest.approx(1.1 * 40 * 3)
    finish(made, "a2", 120.0)  # a third of 60 s and half of 20
    assert made.took["a"] == pytest.approx(30)
    assert made.expected(jobs[3]) == pytest.approx(1.1 * 30 * 2)
    made.gone = lambda: 233.0
    assert start(made) == "a3"
    assert start(made) is None  # it would take 99 s
    finish(made, "a3", 243.0, seconds=40.0)  # a quarter of it now, beside a1
    assert made.took["a"] == pytest.approx(5 * 4)


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
