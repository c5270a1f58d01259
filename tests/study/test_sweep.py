"""Sweeps: the search and its growth, workers, and what is left after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import toy_problem
from killed import alive, processes

from cubegrad.study import Preset, Problem, StudyError
from cubegrad.study.methods import Entry
from cubegrad.study.progress import Progress, duration
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.statistics import summarise
from cubegrad.study.sweep import Plan, Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

TESTS = Path(__file__).parents[1] / "support"
ENTRY = Entry("sgd", "flat")


class Oracle:
    """In place of a machine: the loss is a given function of lr and decay; None diverges."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.asked: list[Settings] = []

    def run(self, jobs: Sequence[tuple[Settings, Path]], tick: Any) -> Iterator[Record]:
        for settings, _ in jobs:
            self.asked.append(settings)
            value = self.loss(settings.lr, settings.decay)
            tick(settings.epochs)
            status = "finished" if value is not None else "diverged"
            yield Record(settings, status, {"train_loss": [value], "loss": [value]}, 0.0)


def plan(**changes: Any) -> Plan:
    preset = Preset(1, 16, lrs={"sgd": (1e-3, 1e-2), "madgrad": (1e-3, 1e-2)})
    problem = Problem("toy", "", toy_problem.build, {"cpu": preset})
    return replace(Plan(problem, "cpu", preset, [ENTRY]), **changes)


def searching(tmp_path: Path, loss: Any, **changes: Any) -> tuple[Sweep, Oracle]:
    oracle = Oracle(loss)
    sweep = Sweep(plan(**changes), Runs(tmp_path), oracle, Progress(StringIO()))  # type: ignore[arg-type]
    return sweep, oracle


def test_a_best_value_inside_the_grid_ends_the_search(tmp_path: Path) -> None:
    sweep, oracle = searching(tmp_path, lambda lr, _: abs(lr - 2.5e-3))
    assert sweep.search() == {ENTRY: (2.5e-3, 0.0)}
    assert [settings.lr for settings in oracle.asked] == [1e-3, 2.5e-3, 5e-3, 1e-2]


def test_the_grid_grows_while_its_edge_is_best(tmp_path: Path) -> None:
    sweep, oracle = searching(tmp_path, lambda lr, _: abs(lr - 0.05))
    assert sweep.search() == {ENTRY: (0.05, 0.0)}
    # One value at a time, until the best has a neighbour on both sides.
    assert [settings.lr for settings in oracle.asked][4:] == [2.5e-2, 5e-2, 1e-1]


def test_growth_has_a_limit(tmp_path: Path) -> None:
    sweep, oracle = searching(tmp_path, lambda lr, _: -lr, widen=2)
    assert sweep.search() == {ENTRY: (0.05, 0.0)}
    assert len(oracle.asked) == 4 + 2


def test_the_decay_grows_too_and_stops_at_0(tmp_path: Path) -> None:
    sweep, oracle = searching(
        tmp_path, lambda lr, decay: abs(lr - 5e-3) + abs(decay - 5e-4), decays=(0.0, 1e-4)
    )
    assert sweep.search() == {ENTRY: (5e-3, 5e-4)}
    assert sorted({s.decay for s in oracle.asked}) == [0.0, 1e-4, 2.5e-4, 5e-4, 1e-3]
    low, asked = searching(tmp_path / "0", lambda lr, d: abs(lr - 5e-3) + d, decays=(0.0, 1e-4))
    assert low.search() == {ENTRY: (5e-3, 0.0)}
    assert {s.decay for s in asked.asked} == {0.0, 1e-4}


def test_where_all_diverge_smaller_rates_are_tried(tmp_path: Path) -> None:
    loss = lambda lr, _: abs(lr - 1e-4) if lr < 3e-4 else None  # noqa: E731
    sweep, _ = searching(tmp_path, loss)
    assert sweep.search() == {ENTRY: (1e-4, 0.0)}
    lost, oracle = searching(tmp_path / "lost", lambda *_: None, widen=1)
    assert lost.search() == {ENTRY: None}
    assert len(oracle.asked) == 5
    assert lost.repeat({ENTRY: None}, 3) == []


def test_a_users_values_take_the_place_of_the_methods_own(tmp_path: Path) -> None:
    sweep, oracle = searching(tmp_path, lambda lr, _: lr, lrs=(0.3,))
    assert sweep.search() == {ENTRY: (0.3, 0.0)}
    assert len(oracle.asked) == 1


def test_a_range_between_two_values_of_the_grid_is_told_of(tmp_path: Path) -> None:
    preset = Preset(1, 16, lrs={"sgd": (0.3, 0.4)})
    sweep, _ = searching(tmp_path, lambda lr, _: lr, preset=preset)
    with pytest.raises(StudyError, match=r"range 0\.3 to 0\.4 of sgd has no value of the grid"):
        sweep.search()


def test_the_best_is_repeated_with_seeds_that_did_not_choose_it(tmp_path: Path) -> None:
    sweep, oracle = searching(tmp_path, lambda lr, _: abs(lr - 5e-3), search_seeds=2, hold_out=True)
    found = sweep.search()
    assert {(s.seed, s.hold_out) for s in oracle.asked} == {(0, True), (1, True)}
    repeated = sweep.repeat(found, 3)
    assert [(r.settings.seed, r.settings.hold_out) for r in repeated] == [
        (2, False), (3, False), (4, False),
    ]  # fmt: skip
    assert {r.settings.lr for r in repeated} == {5e-3}


@pytest.mark.parametrize(
    ("search", "seeds", "all_seeds"), [(1, 1, 1), (1, 3, 3), (2, 3, 3), (3, 1, 3)]
)
def test_where_nothing_is_chosen_the_seeds_of_the_search_count(
    search: int, seeds: int, all_seeds: int, tmp_path: Path
) -> None:
    sweep, oracle = searching(
        tmp_path, lambda lr, _: lr, lrs=(0.3,), decays=(0.0, 0.0), search_seeds=search
    )
    sweep.repeat(sweep.search(), seeds)
    assert [settings.seed for settings in oracle.asked] == list(range(all_seeds))
    assert len(summarise(sweep.records.values(), sweep.plan.judge).seeds) == all_seeds


def test_a_lone_setting_on_a_held_out_split_is_run_again_on_all_of_it(tmp_path: Path) -> None:
    sweep, oracle = searching(tmp_path, lambda lr, _: lr, lrs=(0.3,), hold_out=True)
    sweep.repeat(sweep.search(), 2)
    asked = [(settings.seed, settings.hold_out) for settings in oracle.asked]
    assert asked == [(0, True), (1, False), (2, False)]
    assert summarise(sweep.records.values(), sweep.plan.judge).seeds == (1, 2)


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    sweep, _ = searching(tmp_path, lambda lr, _: abs(lr - 0.05))
    found = sweep.search()
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    Runs(tmp_path).repair()
    again, oracle = searching(tmp_path, lambda lr, _: abs(lr - 0.05))
    assert again.search() == found
    assert [s.lr for s in oracle.asked] == [1e-2, 2.5e-2, 5e-2, 1e-1]


def curves(folder: Path) -> dict[str, Any]:
    records, broken = Runs(folder).load()
    assert broken == []
    return {key: record.curve for key, record in sorted(records.items())}


TOY = Plan(
    toy_problem.problem(),
    "cpu",
    toy_problem.problem().presets["cpu"],
    [Entry("madgrad", "flat"), Entry("sgd", "flat")],
    lrs=(0.01, 0.1),
    widen=0,
)


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


def test_a_worker_that_is_killed_is_told_of(
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


SWEEP = ["sweep", "toy_problem:problem", "--lr", "0.01,0.1", "--widen", "0", "--epochs", "6"]


def start(folder: Path, workers: int, sleep: float) -> subprocess.Popen[str]:
    # A shell that runs the tests in the background has its children ignore Ctrl-C.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heed + "import sys; from cubegrad.study.cli import main; sys.exit(main())"
    options = ["--out", str(folder), "--workers", str(workers), "--save-every", "0"]
    command = [sys.executable, "-c", code, *SWEEP, *options]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TOY_SLEEP": str(sleep), "PYTHONPATH": path}
    return subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_records(folder: Path, stop: subprocess.Popen[str] | None = None) -> None:
    """Until a run is recorded; with a process to stop, it stands where another has a checkpoint.

    Stopped first and looked at then: runs that began together end together, and the checkpoint
    seen a moment ago may be that of a run which is being recorded.
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")
def test_a_sweep_killed_with_sigkill_goes_on_where_it_was(tmp_path: Path) -> None:
    process = start(tmp_path / "killed", 2, sleep=0.2)
    wait_for_records(tmp_path / "killed", stop=process)
    workers = [one.pid for one in processes() if one.parent == process.pid]
    assert len(workers) >= 2
    process.kill()
    process.communicate()
    before = curves(tmp_path / "killed")
    assert 1 <= len(before) < 4
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers)), "workers must not outlive the sweep"
    assert list((tmp_path / "killed" / "checkpoints").glob("*.pt")), "runs were under way"
    sweep_whole(tmp_path / "killed", tmp_path / "whole", before)


def sweep_whole(folder: Path, unbroken: Path, before: dict[str, Any]) -> None:
    """Finish the sweep of `folder` here, and compare with one that was never stopped."""
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


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_what_was_done(workers: int, tmp_path: Path) -> None:
    process = start(tmp_path / "stopped", workers, sleep=0.1)
    wait_for_records(tmp_path / "stopped")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "stopped; run the same command again to resume" in errors
    before = curves(tmp_path / "stopped")
    assert 1 <= len(before) < 4
    sweep_whole(tmp_path / "stopped", tmp_path / "whole", before)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_to_end_keeps_what_was_done_and_leaks_nothing(
    name: str, workers: int, tmp_path: Path
) -> None:
    number = getattr(signal, name)
    process = start(tmp_path / "stopped", workers, sleep=0.1)
    wait_for_records(tmp_path / "stopped")
    process.send_signal(number)  # to the command alone, as `kill` does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped; run the same command again to resume" in errors
    assert "Traceback" not in errors
    assert "leaked" not in errors
    before = curves(tmp_path / "stopped")
    assert 1 <= len(before) < 4
    assert not list((tmp_path / "stopped").rglob("*.tmp*"))
    sweep_whole(tmp_path / "stopped", tmp_path / "whole", before)


def test_progress_in_a_log_is_plain_lines_with_the_time_left() -> None:
    stream = StringIO()
    progress = Progress(stream, every=0.0)
    progress.add(2, 20)
    progress.epochs(5)
    time.sleep(0.01)
    progress.epochs(5)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "0/2 runs, 5/20 epochs, 0:00 gone, unknown time left"
    assert lines[1].startswith("0/2 runs, 10/20 epochs, 0:00 gone, about 0:00 left")
    assert "\r" not in stream.getvalue()


def test_progress_in_a_terminal_is_a_bar() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    progress = Progress(stream)
    progress.add(1, 4)
    progress.epochs(2)
    progress.finished(
        next(Oracle(lambda *_: 0.25).run([(SETTINGS, Path())], lambda _: None)), "loss"
    )
    progress.say("a word")
    progress.close()
    text = stream.getvalue()
    assert "2/4" in text
    assert "loss 0.25" in text
    assert "a word\n" in text


SETTINGS = Settings("toy", "cpu", 4, 16, "sgd", "flat", 0.1, 0.0, 0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_records_are_json_lines(tmp_path: Path) -> None:
    sweep, _ = searching(tmp_path, lambda lr, _: lr)
    sweep.do([SETTINGS])
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["settings"]["lr"] == 0.1
