"""Records as CSV and as TensorBoard's events."""

import csv
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from made_up_records import CIFAR10_RECORDS, cifar10_record

from cubegrad.study import cli, export
from cubegrad.study.records import Record, Runs, to_line


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for record in CIFAR10_RECORDS:
        Runs(tmp_path / "runs").append(record)
    return tmp_path / "runs"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_epoch_of_each_run(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "all.csv"
    assert cli.main(["export", str(runs), "--csv", str(file)]) == 0
    rows = rows_of(file)
    finished = [record for record in CIFAR10_RECORDS if not record.diverged]
    assert len(rows) == 3 * len(finished) + 2  # the two diverged in their first epoch
    first = rows[0]
    assert (first["method"], first["lr"], first["epoch"], first["accuracy"]) == (
        "sgd", "0.1", "1", "45.0",
    )  # fmt: skip
    assert first["key"] == CIFAR10_RECORDS[0].settings.key
    lost = [row for row in rows if row["status"] == "diverged"]
    assert [(row["train_loss"], row["accuracy"]) for row in lost] == [("", ""), ("", "")]


def test_the_page_shows_how_to_log_the_rows_to_wandb(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a stand-in; wandb 0.31.0 itself took it offline."""
    page = Path(__file__).parents[2] / "docs" / "study.md"
    (shown,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    assert cli.main(["export", str(runs), "--csv", str(tmp_path / "runs.csv")]) == 0
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    exec(shown, {})
    started = [call.kwargs["id"] for call in wandb.init.call_args_list]
    assert started == [record.settings.key for record in CIFAR10_RECORDS]
    logged = [call.args[0] for call in wandb.init().__enter__().log.call_args_list]
    assert len(logged) == len(rows_of(tmp_path / "runs.csv"))
    first = CIFAR10_RECORDS[0].curve
    assert logged[0] == {name: first[name][0] for name in ("train_loss", "loss")}
    assert {} in logged  # of runs that diverged


def test_numbers_survive_to_the_last_bit(tmp_path: Path) -> None:
    record = cifar10_record("sgd", 0.1, 0, 100 / 3)
    export.write_csv([record], tmp_path / "a.csv")
    assert [float(row["accuracy"]) for row in rows_of(tmp_path / "a.csv")] == record.curve[
        "accuracy"
    ]


def changed(**curve: list[float | None]) -> Record:
    record = cifar10_record("sgd", 0.1, 0, 90.0)
    return replace(record, curve={**record.curve, **curve})


def test_a_metric_that_was_measured_at_the_end_is_in_the_last_row(tmp_path: Path) -> None:
    records = [changed(bleu=[30.0], seed=[1.0, 2.0, 3.0]), cifar10_record("sgd", 0.2, 0, 91.0)]
    export.write_csv(records, tmp_path / "a.csv")
    rows = rows_of(tmp_path / "a.csv")
    assert [row["bleu"] for row in rows] == ["", "", "30.0", "", "", ""]
    assert [row["metric seed"] for row in rows[:3]] == ["1.0", "2.0", "3.0"]
    assert {row["seed"] for row in rows} == {"0"}


@pytest.mark.parametrize(
    ("change", "file"),
    [
        ({"options": "a\r=cmd|'/C calc'!A0"}, "--csv"),  # a cell of its own to a reader of CSV
        ({"options": "\ud800"}, "--csv"),
        ({"epochs": 10**320}, "--tensorboard"),
        ({"batch": 10**320}, "--tensorboard"),
    ],
)
def test_a_record_that_cannot_be_exported_is_left_out(
    change: dict[str, object],
    file: str,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file == "--tensorboard":
        pytest.importorskip("tensorboard", reason="needs tensorboard")
    record = CIFAR10_RECORDS[0]
    odd = replace(record, settings=replace(record.settings, **change))
    with (runs / "records.jsonl").open("a") as records:
        records.write(to_line(odd))
    assert cli.main(["export", str(runs), file, str(tmp_path / "out")]) == 0
    out, errors = capsys.readouterr()
    assert out.startswith(f"{len(CIFAR10_RECORDS)} ")
    assert errors.count(": left out; rerun the command that wrote it\n") == 1


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "＝", "\t", "\r", "\n"])
def test_no_text_is_a_formula_and_numbers_stay_numbers(start: str, tmp_path: Path) -> None:
    record = cifar10_record("sgd", 0.1, 0, -90.0)
    text = f'{start}cmd|" /c calc"!A1'
    settings = replace(record.settings, problem=text, method=text, schedule=text, options=text)
    curve = {**record.curve, text: [-1.0, -2e-30, 3.0]}
    export.write_csv([replace(record, settings=settings, curve=curve)], tmp_path / "a.csv")
    row = rows_of(tmp_path / "a.csv")[1]
    for column in ("problem", "method", "schedule", "options"):
        assert row[column] == f"'{text}"
    assert (row[f"'{text}"], row["accuracy"], row["preset"]) == ("-2e-30", "-91.0", "gpu")


def test_events_for_tensorboard(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "events"
    assert cli.main(["export", str(runs), "--tensorboard", str(folder)]) == 0
    assert [path.name for path in folder.iterdir()] == ["cifar10-gpu"]
    found = sorted((folder / "cifar10-gpu").iterdir())
    assert len(found) == len(CIFAR10_RECORDS)
    key = CIFAR10_RECORDS[1].settings.key
    events = EventAccumulator(str(folder / "cifar10-gpu" / f"sgd-lr0.25-decay0.0001-seed0-{key}"))
    events.Reload()
    assert {"train/loss", "test/accuracy", "test/loss"} <= set(events.Tags()["scalars"])
    points = events.Scalars("test/accuracy")
    assert [(p.step, p.value) for p in points] == [(1, 46.0), (2, 91.0), (3, 92.0)]
    assert points[2].wall_time - points[0].wall_time == pytest.approx(40)  # of 60 s in 3 epochs
    assert events.Scalars("final/accuracy")[0].value == 92.0


def test_a_second_export_adds_only_new_runs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    folder = tmp_path / "events"
    words = ["export", str(runs), "--tensorboard", str(folder)]
    assert cli.main(words) == 0
    Runs(runs).append(cifar10_record("adam", 0.1, 0, 90.0))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.tfevents.*")}
    assert cli.main(words) == 0
    assert capsys.readouterr().out.endswith(f"1 new runs: tensorboard --logdir {folder}\n")
    assert before.items() <= {p: p.stat().st_mtime_ns for p in folder.rglob("*.tfevents.*")}.items()


def test_what_is_missing_is_named(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["export", str(runs)]) == 2
    assert "give --csv FILE or --tensorboard DIR" in capsys.readouterr().err
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert cli.main(["export", str(runs), "--tensorboard", str(tmp_path / "events")]) == 2
    assert "is missing; run pip install '.[tensorboard]' in your clone" in capsys.readouterr().err
    assert not (tmp_path / "events").exists()
    assert cli.main(["export", str(tmp_path), "--csv", "a.csv"]) == 2
    assert "is not a directory of runs" in capsys.readouterr().err


def test_a_report_in_another_folder(runs: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(runs), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "index.html").exists()
    assert not (runs / "report").exists()
