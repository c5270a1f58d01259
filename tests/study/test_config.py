"""A sweep from a config.toml, the one it keeps, --dry-run, and a log per run."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import refused

from cubegrad.study import cli, config
from cubegrad.study.records import Runs

pytestmark = pytest.mark.usefixtures("_in_an_empty_folder")
WORDS = "toy_problem:problem --methods sgd,madgrad@cosine --lr 0.01,0.1 --widen 0 --workers 1"


def command(words: str) -> int:
    return cli.main(words.split())


@pytest.mark.plots
def test_a_sweep_keeps_its_config_and_can_be_started_from_it(tmp_path: Path) -> None:
    assert command(f"sweep {WORDS} --decay 0,1e-4 --epochs 2 --out first") == 0
    kept = tmp_path / "first" / "config.toml"
    values = tomllib.loads(kept.read_text())
    assert values["command"] == "sweep"
    assert values["methods"] == ["sgd@flat", "madgrad@cosine"]
    assert (values["epochs"], values["preset"], values["decay"]) == (2, "cpu", "0,1e-4")
    assert command(f"sweep --config {kept} --out second --workers 1") == 0
    first, second = (Runs(tmp_path / name).load()[0] for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert (tmp_path / "second" / "config.toml").read_text() == kept.read_text()


@pytest.mark.plots
def test_options_of_the_command_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'problem = "toy_problem:problem"\nlr = [0.1, 0.2]\nmethods = ["sgd"]\nepochs = 3\n'
        "widen = 0\ndownload = false\nworkers = 1\n"
    )
    assert command("sweep --config mine.toml --epochs 1 --out out") == 0
    records, _ = Runs(tmp_path / "out").load()
    assert sorted((r.settings.lr, r.settings.epochs) for r in records.values()) == [
        (0.1, 1), (0.2, 1),
    ]  # fmt: skip


def test_every_option_of_the_command_overrides_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that is cut short; the file's value of it is not one given twice."""
    text = 'problem = "digits"\nmethods = "adam"\nlr = 5\nepochs = 3\nsave-every = 1\nwiden = 2\n'
    (tmp_path / "mine.toml").write_text(text)
    words = "--methods sgd --lr=2 --epo 1 --save-every 3 --download --dry-run"
    assert command(f"sweep toy_problem:problem --config mine.toml {words}") == 0
    out = capsys.readouterr().out
    assert out.startswith("toy, preset cpu: 1 epochs")
    assert re.search(r"^sgd +flat +2 ", out, re.MULTILINE)
    assert "--widen 2 values" in out


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ('problem = "digits"\nlearning = 1', "unknown key 'learning'", "use preset, device"),
        ('problem = "digits"\nepochs = 0', "0 must be a whole number >= 1", "use 1"),
        ('problem = "digits"\nlr = 2020-01-01', "mine.toml has lr =", "use text, a number"),
        ("lr = true", "mine.toml has lr = true", "give it a value, or leave it out"),
        ('problem = "digits"\nlr = false', "mine.toml has lr = false", "give it a value"),
        ('problem = "digits"\nsave-every = true', "has save-every = true", "give it a value"),
        ('command = "compare"', "is of `cubegrad compare`", "use cubegrad compare --config"),
        ("problem = ", "mine.toml is not TOML", "see docs/study.md"),
        ("epochs = 1", "PROBLEM is missing", "name one of `cubegrad problems`"),
        (None, "mine.toml cannot be read", "give the config.toml of a sweep"),
    ],
)
def test_bad_files(
    text: str | None, what: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    line = refused("sweep --config mine.toml", capsys)
    assert what in line
    assert remedy in line


def test_a_second_sweep_in_a_folder_has_a_file_of_its_own(tmp_path: Path) -> None:
    for text in ("a = 1\n", "a = 2\n", "a = 1\n", "a = 2\n"):
        config.keep(tmp_path, text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config-2.toml", "config.toml"]


def test_any_text_survives_the_file() -> None:
    odd = {"problem": 'a "b" \\ \n\x00\x7f é 😀', "lr": None, "methods": ["x", "y@z"], "seeds": 3}
    assert tomllib.loads(config.text(odd)) == {k: v for k, v in odd.items() if v is not None}


def test_a_dry_run_lists_the_runs_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"compare {WORDS} --decay 0,1e-4 --dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"^sgd +flat +0\.01, 0\.1 +0, 0\.0001 +4 +0 +0\.0 +2$", out, re.MULTILINE)
    assert "To do: about 12 whole runs, 48 epochs in all; about 0:0" in out
    assert "1 run at a time, by a few steps of each method, without evaluation" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.plots
def test_a_dry_run_uses_what_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"sweep {WORDS}") == 0
    capsys.readouterr()
    assert command(f"sweep {WORDS} --decay 0,1e-4 --dry-run") == 0
    out = capsys.readouterr().out
    assert re.search(r"^sgd +flat +0\.01, 0\.1 +0, 0\.0001 +4 +2 +0\.0 +0$", out, re.MULTILINE)
    assert "about 4 whole runs, 16 epochs in all" in out
    assert "by the records" in out


def test_a_dry_run_needs_neither_gpu_nor_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compare cifar10 --preset paper --search halving --dry-run") == 0
    out = capsys.readouterr().out
    assert "the time is unknown" in out
    assert "stopped early" in out


def test_a_missing_optuna_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    line = refused("sweep digits --search halving", capsys)
    assert "optuna is missing; run pip install '.[search]' in your clone" in line
    assert not list(tmp_path.iterdir())


def test_each_run_has_a_log(tmp_path: Path) -> None:
    assert command("train toy_problem:problem --method sgd --lr 0.01 --seed 5") == 0
    (path,) = (tmp_path / "runs" / "toy-cpu" / "logs").iterdir()
    assert re.fullmatch(r"sgd-lr0\.01-decay0-seed5-[0-9a-f]{16}\.log", path.name)
    first, *epochs, last = path.read_text().splitlines()
    assert "method sgd, schedule flat, lr 0.01" in first
    assert [re.match(r"epoch (\d)/4: train_loss [\d.]+, loss [\d.]+; [\d.]+ s", one)[1]  # type: ignore[index]
            for one in epochs] == ["1", "2", "3", "4"]  # fmt: skip
    assert last == "finished"


def test_the_log_of_a_diverged_run_has_no_old_metrics(tmp_path: Path) -> None:
    assert command("train toy_problem:problem --method sgd --lr 1e30") == 0
    (path,) = (tmp_path / "runs" / "toy-cpu" / "logs").iterdir()
    assert re.search(r"epoch 1/4: train_loss not finite; ", path.read_text())
    assert path.read_text().endswith("diverged\n")
