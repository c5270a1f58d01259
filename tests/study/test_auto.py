"""A method that estimates its learning rate: its runs, and its place in a search.

`growing` replaces MADGRAD where the estimates have to be known in advance.
"""

import math
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_problem
from growing import FIRST, Growing
from killed import killed_and_resumed
from small_runs import curve_text, settings_of

from cubegrad.study import Preset, cli
from cubegrad.study.grid import Grid
from cubegrad.study.methods import METHODS, Entry, make
from cubegrad.study.problems import digits
from cubegrad.study.progress import Progress
from cubegrad.study.records import Runs, from_line, to_line
from cubegrad.study.sweep import Plan, Sweep
from cubegrad.study.train import Place, run
from cubegrad.study.workers import Machine

PLACE = Place(save_every=0.0)
SETTINGS = settings_of(
    toy_problem.problem(), method="madgrad-auto", schedule="tenthing:50%-75%", lr=1.0, seed=3
)
STEPS = 4  # in an epoch of the toy problem
AUTO, MADGRAD = Entry("madgrad-auto", "flat"), Entry("madgrad", "flat")


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "madgrad-auto", METHODS["madgrad-auto"]._replace(make=Growing))


# One run.


@pytest.mark.usefixtures("growing")
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_estimate_is_kept_once_an_epoch_without_schedule_and_factor(factor: float) -> None:
    record = run(toy_problem.problem(), replace(SETTINGS, lr=factor), PLACE)
    wanted = [FIRST * 1.5 ** (STEPS * epoch) for epoch in (1, 2, 3, 4)]
    assert record.curve["estimated_lr"] == pytest.approx(wanted, rel=1e-12)
    assert [len(values) for values in record.curve.values()] == [4, 4, 4]
    assert from_line(to_line(record)) == record


@pytest.mark.usefixtures("growing")
def test_the_factor_and_the_schedule_are_on_top_of_the_estimate() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = make("madgrad-auto", [param], 0.5, 0.1)
    assert [optimizer.param_groups[0][name] for name in ("lr", "weight_decay")] == [0.5, 0.1]
    whole, tenth = (
        run(toy_problem.problem(), replace(SETTINGS, schedule=schedule), PLACE).curve["loss"]
        for schedule in ("flat", "tenthing:50%-75%")
    )
    assert whole[:2] == tenth[:2]
    assert whole[2] != tenth[2]


def test_a_given_learning_rate_is_no_estimate() -> None:
    for method in ("madgrad", "sgd"):
        record = run(toy_problem.problem(), replace(SETTINGS, method=method, lr=0.01), PLACE)
        assert list(record.curve) == ["train_loss", "loss"]


@pytest.mark.usefixtures("growing")
def test_an_estimate_that_is_no_number_is_a_diverged_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growing, "estimated_lr", lambda _: math.inf)
    record = run(toy_problem.problem(), SETTINGS, PLACE)
    assert (record.status, record.curve["estimated_lr"]) == ("diverged", [None])


@pytest.mark.parametrize("which", ["stand-in", "MADGRAD"])
def test_a_killed_run_continues_with_its_estimate(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if which == "stand-in":
        request.getfixturevalue("growing")
    whole = run(toy_problem.problem(), SETTINGS, PLACE)
    resumed = killed_and_resumed(
        toy_problem.problem(), SETTINGS, PLACE, tmp_path / "one.pt", after=3
    )
    assert curve_text(resumed) == curve_text(whole)
    assert len({*whole.curve["estimated_lr"]}) > 1, "a lost estimate would not show"


# The search.


def plan(**changes: Any) -> Plan:
    preset = Preset(1, 16, lrs={"madgrad": (1e-3, 1e-2)})
    problem = replace(toy_problem.problem(), presets={"cpu": preset})
    return replace(Plan(problem, "cpu", preset, [MADGRAD, AUTO]), **changes)


GRID = (1e-3, 2.5e-3, 5e-3, 1e-2)


@pytest.mark.parametrize(
    ("changes", "madgrad", "auto"),
    [
        ({}, GRID, (1.0,)),
        ({"grid": Grid((2.0, 5.0))}, (2e-3, 5e-3), (1.0,)),  # whatever the grid
        ({"lrs": (0.1, 0.2)}, (0.1, 0.2), (1.0,)),  # taken as rates, as one method takes no factor
        ({"lrs": (0.5, 2.0), "entries": [AUTO, replace(AUTO, schedule="sqrt:4")]}, None, (0.5, 2)),
    ],
    ids=["own", "another grid", "rates", "factors"],
)
def test_the_values_that_are_tried(
    changes: dict[str, Any], madgrad: tuple[float, ...] | None, auto: tuple[float, ...]
) -> None:
    made = plan(**changes)
    assert made.first_lrs(AUTO) == auto
    assert madgrad is None or made.first_lrs(MADGRAD) == madgrad


def test_a_sqrt_schedule_starts_with_the_estimate_itself() -> None:
    assert plan().first_lrs(Entry("madgrad-auto", "sqrt:100")) == (10.0,)  # 10/√(0 + 100) is 1


@pytest.mark.usefixtures("growing")
def test_the_factor_is_not_searched_and_the_decay_is(tmp_path: Path) -> None:
    machine = Machine("toy_problem:problem", PLACE)
    made = plan(entries=[AUTO], decays=(1e-3, 1e-2), widen=1)
    found = Sweep(made, Runs(tmp_path), machine, Progress(StringIO())).search()
    records = Runs(tmp_path).load()[0].values()
    assert {record.settings.lr for record in records} == {1.0}
    assert len({record.settings.decay for record in records}) > 2  # grown at the edge
    assert found[AUTO] is not None
    assert found[AUTO][0] == 1.0


# The command, with MADGRAD itself.


def printed(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(words.split()) == 0
    return capsys.readouterr().out


@pytest.mark.plots
def test_compare_needs_no_further_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "compare toy_problem:problem --methods madgrad,madgrad-auto --epochs 2 --workers 1"
    out = printed(words, capsys)
    assert re.search(r"^MADGRAD +[\d.]+ +0 ", out, re.MULTILINE)
    assert re.search(r"^MADGRAD, lr auto +auto \(→ [\d.e-]+\) +0 ", out, re.MULTILINE)
    records = Runs(tmp_path / "runs" / "toy-cpu").load()[0].values()
    factors = [r.settings.lr for r in records if r.settings.method == "madgrad-auto"]
    assert (
        factors == [1.0] * 2
    )  # two seeds: nothing is searched, so the seed of the search is one of them
    assert (tmp_path / "runs" / "toy-cpu" / "report" / "toy-cpu-estimated-lr.png").exists()


def test_train_needs_no_learning_rate_and_takes_a_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "train toy_problem:problem --method madgrad-auto"
    out = printed(words, capsys)
    assert re.match(r"toy, madgrad-auto, lr auto \(→ [\d.e-]+\), decay 0, seed 0: test loss", out)
    assert "lr 0.5 × auto (→ " in printed(f"{words} --lr 0.5", capsys)


@pytest.mark.training
def test_digits_are_learnt_without_a_learning_rate() -> None:
    settings = settings_of(
        digits.problem(), method="madgrad-auto", epochs=6, schedule="tenthing:60%-85%", lr=1.0
    )
    record = run(digits.problem(), settings, PLACE)
    accuracy, found = record.last("accuracy"), record.curve["estimated_lr"]
    assert accuracy is not None
    assert accuracy > 93
    assert all(value is not None and 1e-4 < value < 10 for value in found)
