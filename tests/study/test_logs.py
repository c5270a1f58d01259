"""A run's log: live beside its checkpoint, then in the folder of logs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import toy_problem
from killed import kill_after
from made_up_records import toy_record
from small_runs import settings_of

from cubegrad.study import cli
from cubegrad.study.logs import name
from cubegrad.study.records import Runs
from cubegrad.study.train import Place, run

PLACE = Place(save_every=0.0)  # a checkpoint after each epoch
SETTINGS = settings_of(toy_problem.problem(), lr=0.05, seed=3)
EPOCH = r"epoch \d/4: train_loss [\d.e-]+, loss [\d.e-]+; \d+\.\d s"


def lines_of(path: Path) -> list[str]:
    """Without the times."""
    stamped = path.read_text(encoding="utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} ", line) for line in stamped)
    return [line.split(" ", 2)[2] for line in stamped]


def test_a_line_for_each_epoch_also_of_a_resumed_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "one.pt"
    kill_after(2, toy_problem.problem(), SETTINGS, PLACE, checkpoint)
    run(toy_problem.problem(), SETTINGS, PLACE, checkpoint)
    started, *first, resumed, third, fourth, finished = lines_of(checkpoint.with_suffix(".log"))
    assert [started, resumed, finished] == ["started", "resumed after epoch 2", "finished"]
    assert all(re.fullmatch(EPOCH, line) for line in [*first, third, fourth])
    assert [line[:9] for line in (third, fourth)] == ["epoch 3/4", "epoch 4/4"]


def test_the_log_of_a_recorded_run_is_moved(tmp_path: Path) -> None:
    runs, record = Runs(tmp_path), toy_record(0)
    live = runs.checkpoint(record.settings).with_suffix(".log")
    live.parent.mkdir()
    live.write_text("diverged\n")
    runs.append(record)
    kept = tmp_path / "logs" / f"sgd-lr0.00025-decay0-seed0-{record.settings.key}.log"
    assert kept.read_text() == "diverged\n"
    live.write_text("killed before it was moved\n")
    runs.repair()
    assert kept.read_text() == "killed before it was moved\n"
    assert not live.exists()


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    checkpoint = tmp_path / "one.pt"
    checkpoint.with_suffix(".log").mkdir()
    assert run(toy_problem.problem(), SETTINGS, PLACE, checkpoint).status == "finished"


def test_a_sweep_leaves_one_log_per_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "train toy_problem:problem --method sgd --lr 0.1 --out out"
    assert cli.main(words.split()) == 0
    (log,) = (tmp_path / "out" / "logs").iterdir()
    assert lines_of(log)[-1] == "finished"


def test_a_name_is_never_a_path() -> None:
    odd = replace(SETTINGS, method="../../a b")
    assert name(odd) == f".._.._a_b-lr0.05-decay0-seed3-{odd.key}"
