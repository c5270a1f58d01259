"""A run's log: a line for each epoch, whatever happens to the run."""

import re
from dataclasses import replace
from pathlib import Path

import toy_problem
from killed import kill_after
from small_runs import settings_of

from cubegrad.study.logs import name
from cubegrad.study.train import Place, run

SETTINGS = settings_of(toy_problem.problem(), lr=0.05, seed=3)
EPOCH = r"epoch \d/4: train_loss [\d.e-]+, loss [\d.e-]+; \d+\.\d s"


def test_a_line_for_each_epoch_also_of_a_resumed_run(tmp_path: Path) -> None:
    place = Place(save_every=0.0, logs=tmp_path / "logs")  # a checkpoint after each epoch
    kill_after(2, toy_problem.problem(), SETTINGS, place, tmp_path / "one.pt")
    run(toy_problem.problem(), SETTINGS, place, tmp_path / "one.pt")
    (path,) = (tmp_path / "logs").iterdir()
    settings, *first, resumed, third, fourth, finished = path.read_text().splitlines()
    assert "lr 0.05" in settings
    assert [resumed, finished] == ["resumed after epoch 2", "finished"]
    assert all(re.fullmatch(EPOCH, line) for line in [*first, third, fourth])
    assert [line[:9] for line in (third, fourth)] == ["epoch 3/4", "epoch 4/4"]


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    place = Place(logs=tmp_path / "logs")
    assert run(toy_problem.problem(), SETTINGS, place).status == "finished"


def test_a_name_is_never_a_path() -> None:
    odd = replace(SETTINGS, method="../../a b")
    assert name(odd) == f".._.._a_b-lr0.05-decay0-seed3-{odd.key}"
