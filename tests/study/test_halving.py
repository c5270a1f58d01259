"""Successive halving: which runs are stopped, what is kept of them, and that it resumes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import toy_problem
from small_runs import curve_text, settings_of

from cubegrad.study import Preset, Problem
from cubegrad.study.halving import decision_epochs, middle_first
from cubegrad.study.methods import Entry
from cubegrad.study.plan import Plan
from cubegrad.study.progress import Progress
from cubegrad.study.records import Record, Runs
from cubegrad.study.statistics import summarise
from cubegrad.study.sweep import Sweep
from cubegrad.study.train import Place, run
from cubegrad.study.workers import Job, Machine

pytest.importorskip("optuna")
ENTRY = Entry("sgd", "flat")
LRS = {"sgd": (1e-4, 1.0)}


class Made:
    """A machine whose runs have a given function of lr and epoch as their loss."""

    def __init__(self, loss: Any) -> None:
        self.loss, self.jobs = loss, list[Job]()

    def run(self, jobs: Sequence[Job], tick: Any) -> Iterator[Record]:
        for job in jobs:
            self.jobs.append(job)
            end = job.until or job.settings.epochs
            losses = [self.loss(job.settings.lr, epoch) for epoch in range(1, end + 1)]
            if None in losses:
                losses = losses[: losses.index(None) + 1]
            tick(job.epochs)
            status = "cut" if end < job.settings.epochs else "finished"
            status = "diverged" if losses[-1] is None else status
            job.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            job.checkpoint.touch()
            yield Record(job.settings, status, {"train_loss": losses, "loss": losses}, 0.0)


def sweep_of(folder: Path, loss: Any, **changes: Any) -> tuple[Sweep, Made]:
    preset = Preset(18, 16, lrs=LRS)
    problem = Problem("toy", "", toy_problem.build, {"cpu": preset})
    plan = Plan(problem, "cpu", preset, [ENTRY], search="halving")
    made = Made(loss)
    return Sweep(replace(plan, **changes), Runs(folder), made, Progress(StringIO())), made


def away_from(best: float) -> Any:
    return lambda lr, epoch: abs(lr - best) + 1 / epoch


@pytest.mark.parametrize(
    ("epochs", "when"), [(1, []), (2, [1]), (3, [1]), (4, [1, 3]), (18, [2, 6]), (300, [33, 99])]
)
def test_runs_are_judged_after_a_ninth_and_a_third(epochs: int, when: list[int]) -> None:
    assert decision_epochs(epochs) == when


def test_the_middle_of_a_grid_reports_first() -> None:
    assert middle_first([3, 1, 2, 5, 4]) == [3, 2, 4, 1, 5]
    assert middle_first([]) == []


def test_few_runs_reach_their_end_and_the_best_one_does(tmp_path: Path) -> None:
    sweep, made = sweep_of(tmp_path, away_from(0.05))
    assert sweep.search() == {ENTRY: (0.05, 0.0)}
    first = [job for job in made.jobs if job.until == 2]
    assert len(first) == 13
    assert {job.since for job in first} == {0}
    finished = {job.settings.lr: job.since for job in made.jobs if job.until is None}
    assert finished.pop(0.1) == 2, "the next larger rate had been stopped"
    assert set(finished.values()) == {6}
    epochs = sum(job.epochs for job in made.jobs)
    assert epochs <= 13 * 18 / 3
    assert sweep.progress.passed == sweep.progress.total == epochs


def test_what_was_cut_is_marked_and_is_no_result(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, away_from(0.05))
    sweep.search()
    runs = Runs(tmp_path)
    whole, broken = runs.load()
    cut = runs.cut()
    assert not broken
    assert len(whole) + len(cut) == 13
    assert {record.status for record in cut.values()} == {"cut"}
    assert {record.epochs for record in whole.values()} == {18}
    assert not list((tmp_path / "checkpoints").iterdir()), "a run that is given up leaves nothing"
    summary = summarise([*whole.values(), *cut.values()], sweep.plan.judge)
    assert summary.best == (0.05, 0.0)
    assert (summary.searched, summary.search_cut) == (13, len(cut))
    assert summary.at_edge == (), "runs that were cut count as neighbours"
    assert len(summary.lr_curve) == len(whole), "a cut run's metric is not beside a whole one's"


def test_fresh_seeds_of_a_lone_survivor_are_told_from_the_search(tmp_path: Path) -> None:
    def loss(lr: float, epoch: int) -> float | None:  # the middle reports first and stays best
        return None if lr > 0.01 else 0.01 - lr + 1 / epoch

    sweep, _ = sweep_of(tmp_path, loss)
    sweep.repeat(sweep.search(), 3)
    records = [*sweep.runs.load()[0].values(), *sweep.runs.cut().values()]
    finished = [record for record in records if record.status == "finished"]
    assert sum(record.settings.seed == 0 for record in finished) == 1
    assert summarise(records, sweep.plan.judge).seeds == (1, 2, 3)


@pytest.mark.parametrize("lines", [0, 1, 5, 13, 14, 15])
def test_a_search_that_was_stopped_goes_on_to_the_same_end(lines: int, tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path / "whole", away_from(0.05))
    found = sweep.search()
    written = (tmp_path / "whole" / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "records.jsonl").write_text("".join(written[:lines]))
    again, made = sweep_of(tmp_path / "stopped", away_from(0.05))
    assert again.search() == found
    assert len(made.jobs) == len(written) - lines, "nothing that is recorded is run again"
    assert Runs(tmp_path / "stopped").cut() == Runs(tmp_path / "whole").cut()


def test_a_grid_search_afterwards_finishes_the_cut_runs(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, away_from(0.05))
    sweep.search()
    whole = len(sweep.records)
    grid, made = sweep_of(tmp_path, away_from(0.05), search="grid")
    assert grid.search() == {ENTRY: (0.05, 0.0)}
    assert len(made.jobs) == 13 - whole
    assert not Runs(tmp_path).cut()
    reused, none = sweep_of(tmp_path, away_from(0.05))
    assert reused.search() == {ENTRY: (0.05, 0.0)}
    assert not none.jobs, "whole runs answer for their first epochs"


def test_the_grid_grows_and_diverged_runs_are_given_up(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, lambda lr, epoch: None if lr > 1e-4 else lr + 1 / epoch, widen=2)
    assert sweep.search() == {ENTRY: (2.5e-5, 0.0)}
    lost, made = sweep_of(tmp_path / "lost", lambda *_: None, widen=1)
    assert lost.search() == {ENTRY: None}
    assert len(made.jobs) == 14


def test_larger_rates_that_look_worse_early_are_finished(tmp_path: Path) -> None:
    def loss(lr: float, epoch: int) -> float:  # the larger, the worse until the last epoch
        return lr + 1 / epoch if epoch < 18 else abs(lr - 2.5)

    sweep, _ = sweep_of(tmp_path / "halving", loss)
    grid, _ = sweep_of(tmp_path / "grid", loss, search="grid")
    assert sweep.search() == grid.search() == {ENTRY: (2.5, 0.0)}


def test_lines_of_cut_runs_survive_a_repair(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, away_from(0.05))
    sweep.search()
    runs, before = Runs(tmp_path), Runs(tmp_path).cut()
    with runs.path.open("a") as file:
        file.write('{"torn":')
    assert len(runs.repair()) == 1
    assert runs.cut() == before


def test_a_run_in_three_parts_has_the_numbers_of_a_whole_one(tmp_path: Path) -> None:
    problem = toy_problem.problem()
    settings, path, ticks = settings_of(problem), tmp_path / "one.pt", [0, 0, 0]
    whole = run(problem, settings, Place())
    parts = []
    for index, (since, until) in enumerate([(0, 1), (1, 3), (3, None)]):

        def tick(index: int = index) -> None:
            ticks[index] += 1

        parts.append(run(problem, settings, Place(), path, tick, since, until))
    assert [part.status for part in parts] == ["cut", "cut", "finished"]
    assert ticks == [1, 2, 1]
    assert curve_text(parts[2]) == curve_text(whole)


@pytest.mark.processes
def test_the_choice_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    problem = toy_problem.problem()
    preset = replace(problem.presets["cpu"], epochs=6, lrs=LRS)
    plan = Plan(problem, "cpu", preset, [ENTRY], search="halving")
    found = []
    for workers in (1, 2):
        machine = Machine("toy_problem:problem", Place(), workers)
        runs = Runs(tmp_path / str(workers))
        try:
            found.append(Sweep(plan, runs, machine, Progress(StringIO())).search())
        finally:
            machine.close()
    assert found[0] == found[1]
    one, two = (Runs(tmp_path / name) for name in "12")
    assert one.cut().keys() == two.cut().keys()
    assert one.load()[0].keys() == two.load()[0].keys()
