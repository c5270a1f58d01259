"""The search of a sweep: which settings are run, how the grid grows, which seeds count."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import toy_problem
from small_runs import settings_of

from cubegrad.study import Preset, Problem, StudyError
from cubegrad.study.methods import Entry
from cubegrad.study.progress import Progress
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.statistics import summarise
from cubegrad.study.sweep import Plan, Sweep
from cubegrad.study.workers import Job

ENTRY = Entry("sgd", "flat")


class Oracle:
    """A machine whose runs have a given function of lr and decay as their loss; None diverges."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.asked: list[Settings] = []

    def run(self, jobs: Sequence[Job], tick: Any) -> Iterator[Record]:
        for settings, *_ in jobs:
            self.asked.append(settings)
            value = self.loss(settings.lr, settings.decay)
            tick(settings.epochs)
            status = "finished" if value is not None else "diverged"
            yield Record(settings, status, {"train_loss": [value], "loss": [value]}, 0.0)


def plan(**changes: Any) -> Plan:
    preset = Preset(1, 16, lrs={"sgd": (1e-3, 1e-2), "madgrad": (1e-3, 1e-2)})
    problem = Problem("toy", "", toy_problem.build, {"cpu": preset})
    return replace(Plan(problem, "cpu", preset, [ENTRY]), **changes)


def sweep_of(tmp_path: Path, loss: Any, **changes: Any) -> tuple[Sweep, Oracle]:
    oracle = Oracle(loss)
    sweep = Sweep(plan(**changes), Runs(tmp_path), oracle, Progress(StringIO()))  # type: ignore[arg-type]
    return sweep, oracle


def test_a_best_value_inside_the_grid_ends_the_search(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(tmp_path, lambda lr, _: abs(lr - 2.5e-3))
    assert sweep.search() == {ENTRY: (2.5e-3, 0.0)}
    assert [settings.lr for settings in oracle.asked] == [1e-3, 2.5e-3, 5e-3, 1e-2]


def test_any_option_of_a_preset_can_be_recorded(tmp_path: Path) -> None:
    text = "".join(map(chr, range(256)))
    preset = Preset(1, 16, options={"text": text})
    sweep, _ = sweep_of(tmp_path, lambda lr, _: lr, preset=preset)
    (record,) = sweep.do([sweep.plan.settings(ENTRY, (0.1, 0.0), 0, hold_out=False)])
    (found,) = sweep.runs.load()[0].values()
    assert found == record
    assert json.loads(found.settings.options) == {"text": text}


def test_the_grid_grows_while_its_edge_is_best(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(tmp_path, lambda lr, _: abs(lr - 0.05))
    assert sweep.search() == {ENTRY: (0.05, 0.0)}
    # One value at a time, until the best has a neighbour on both sides.
    assert [settings.lr for settings in oracle.asked][4:] == [2.5e-2, 5e-2, 1e-1]


def test_growth_has_a_limit(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(tmp_path, lambda lr, _: -lr, widen=2)
    assert sweep.search() == {ENTRY: (0.05, 0.0)}
    assert len(oracle.asked) == 4 + 2


def test_the_decay_grows_too_and_stops_at_0(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(
        tmp_path, lambda lr, decay: abs(lr - 5e-3) + abs(decay - 5e-4), decays=(0.0, 1e-4)
    )
    assert sweep.search() == {ENTRY: (5e-3, 5e-4)}
    assert sorted({s.decay for s in oracle.asked}) == [0.0, 1e-4, 2.5e-4, 5e-4, 1e-3]
    low, asked = sweep_of(tmp_path / "0", lambda lr, d: abs(lr - 5e-3) + d, decays=(0.0, 1e-4))
    assert low.search() == {ENTRY: (5e-3, 0.0)}
    assert {s.decay for s in asked.asked} == {0.0, 1e-4}


def test_where_all_diverge_smaller_rates_are_tried(tmp_path: Path) -> None:
    loss = lambda lr, _: abs(lr - 1e-4) if lr < 3e-4 else None  # noqa: E731
    sweep, _ = sweep_of(tmp_path, loss)
    assert sweep.search() == {ENTRY: (1e-4, 0.0)}
    lost, oracle = sweep_of(tmp_path / "lost", lambda *_: None, widen=1)
    assert lost.search() == {ENTRY: None}
    assert len(oracle.asked) == 5
    assert lost.repeat({ENTRY: None}, 3) == []


def test_a_users_values_take_the_place_of_the_methods_own(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(tmp_path, lambda lr, _: lr, lrs=(0.3,))
    assert sweep.search() == {ENTRY: (0.3, 0.0)}
    assert len(oracle.asked) == 1


def test_a_range_between_two_values_of_the_grid_is_reported(tmp_path: Path) -> None:
    preset = Preset(1, 16, lrs={"sgd": (0.3, 0.4)})
    sweep, _ = sweep_of(tmp_path, lambda lr, _: lr, preset=preset)
    with pytest.raises(StudyError, match=r"range 0\.3 to 0\.4 of sgd has no value of the grid"):
        sweep.search()


def test_the_best_is_repeated_with_seeds_that_did_not_choose_it(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(tmp_path, lambda lr, _: abs(lr - 5e-3), search_seeds=2, hold_out=True)
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
    sweep, oracle = sweep_of(
        tmp_path, lambda lr, _: lr, lrs=(0.3,), decays=(0.0, 0.0), search_seeds=search
    )
    sweep.repeat(sweep.search(), seeds)
    assert [settings.seed for settings in oracle.asked] == list(range(all_seeds))
    assert len(summarise(sweep.records.values(), sweep.plan.judge).seeds) == all_seeds


def test_a_lone_setting_on_a_held_out_split_is_run_again_on_all_of_it(tmp_path: Path) -> None:
    sweep, oracle = sweep_of(tmp_path, lambda lr, _: lr, lrs=(0.3,), hold_out=True)
    sweep.repeat(sweep.search(), 2)
    asked = [(settings.seed, settings.hold_out) for settings in oracle.asked]
    assert asked == [(0, True), (1, False), (2, False)]
    assert summarise(sweep.records.values(), sweep.plan.judge).seeds == (1, 2)


def test_recorded_runs_are_not_run_again(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, lambda lr, _: abs(lr - 0.05))
    found = sweep.search()
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    Runs(tmp_path).repair()
    again, oracle = sweep_of(tmp_path, lambda lr, _: abs(lr - 0.05))
    assert again.search() == found
    assert [s.lr for s in oracle.asked] == [1e-2, 2.5e-2, 5e-2, 1e-1]


def test_records_are_json_lines(tmp_path: Path) -> None:
    sweep, _ = sweep_of(tmp_path, lambda lr, _: lr)
    sweep.do([settings_of(toy_problem.problem(), lr=0.1)])
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["settings"]["lr"] == 0.1
