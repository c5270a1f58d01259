"""The command: what it prints, what it refuses, and the problem of docs/own_problem.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import refused
from made_up_records import CIFAR10_RECORDS

from cubegrad.study import catalogue, cli
from cubegrad.study.records import Runs, to_line

pytestmark = pytest.mark.usefixtures("_in_an_empty_folder")

ROOT = Path(__file__).parents[2]


def command(words: str) -> int:
    return cli.main(words.split())


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (
            "train digit --lr 1",
            "unknown problem 'digit'",
            "use digits, cifar10, imagenet, fastmri, iwslt14, bookwiki, finetune, or your_module",
        ),
        ("train digits --method lion --lr 1", "unknown method 'lion'", "use one of madgrad,"),
        ("train digits --lr -1", "--lr -1 must be >= 0", "use 1e-3"),
        ("train digits --lr 0", "--lr 0 moves nothing", "use a value > 0"),
        ("train digits --lr fast", "--lr 'fast' is not a number", "use 1e-4"),
        ("train digits --lr 1e-3..1e-1", "train takes one value", "use cubegrad sweep"),
        ("train digits", "no lr is known for madgrad on digits", "give --lr"),
        ("train digits --lr 1 --seed x", "x must be a whole number >= 0", "use 0"),
        ("train digits --lr 1 --seed ²", "² must be a whole number >= 0 and < 2^63", "use 0"),
        ("train digits --lr 1 --epochs 0", "0 must be a whole number >= 1", "use 1"),
        ("train digits --lr 1 --save-every x", "x must be a number of seconds", "use 10"),
        ("train digits --lr 1 --schedule slow", "unknown schedule 'slow'", "use flat"),
        ("train digits --lr 1 --preset big", "no preset 'big'", "use cpu, gpu, paper"),
        ("sweep digits --grid 5,1", "--grid '5,1' must rise", "use 1,2.5,5 (times powers of ten)"),
        ("sweep digits --grid powers-of-3", "'powers-of-3' is not a list of", "or powers-of-2"),
        ("sweep digits --lr 0,1", "--lr 0 moves nothing", "use values > 0"),
        ("sweep digits --lr 3..4", "has no value of the grid", "use 1e-4..1e-1"),
        ("sweep digits --methods sgd,lion", "unknown method 'lion'", "use one of"),
        ("compare digits --figure 7", "unknown figure '7'", "use dual-averaging or sqrt-decay"),
        ("compare digits --figure sqrt-decay --methods sgd", "methods of its own", "leave out"),
        ("compare digits --workers 0", "0 must be a whole number >= 1", "use 1"),
        ("compare digits --select train", "invalid choice: 'train'", "see cubegrad compare --help"),
        ("compare no_such_module:f", "cannot import no_such_module", "run from its folder"),
        ("compare toy_problem:nothing", "no function 'nothing'", "define it"),
        ("compare toy_problem:not_a_problem", "returned 3", "return a cubegrad.study.Problem"),
        ("compare :problem", "'' of problem ':problem' is not a module", "use your_module:"),
        ("compare .mine:problem", "'.mine' of problem", "use your_module:your_function or file"),
        ("compare mine.py:problem", "mine.py is not a file", "use your_module:your_function or"),
        ("sweep digits --lr 1e-4...1e-1", "has three dots", "use two, as in 1e-4..1e-1"),
        ("train digits --lr 1 --seed 99999999999999", "must be at most", "use 0"),
        ("sweep digits --grid=", "--grid '' is not a list of numbers", "use 1,2.5,5"),
        ("train digits --lr 0.1 --lr 0.2", "--lr: given twice, 0.1 and 0.2", "takes one value"),
        ("sweep digits --lr 0.1 --lr=1..2", "--lr: given twice, 0.1 and 1..2", "--lr 0.1,1..2"),
        ("sweep digits --method a --methods b", "--methods: given twice", "--methods a,b"),
        ("compare digits --seeds 1 --seeds 2", "--seeds: given twice, 1 and 2", "give it once"),
        ("report .", "is not a directory of runs", "give the --out"),
        ("report nowhere", "is not a directory of runs", "give the --out"),
        ("fly", "invalid choice: 'fly'", "see cubegrad --help"),
        ("", "required: COMMAND", "see cubegrad --help"),
    ],
)
def test_bad_input_ends_with_one_line(
    words: str, what: str, remedy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = refused(words, capsys)
    assert what in line
    assert remedy in line
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(
    "words", ["digits --preset gpu", "digits --device cuda", "finetune --preset gpu-lora"]
)
def test_a_missing_gpu_is_reported(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(f"train {words} --lr 1", capsys)
    assert "needs a GPU and torch sees none; use --preset cpu" in line


def test_an_out_that_is_a_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "--out file cannot be written" in refused("train digits --lr 1 --out file", capsys)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_without_a_finished_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "records.jsonl").touch()
    assert "has no finished run yet; run the sweep" in refused(f"report {tmp_path}", capsys)


def test_a_missing_extra_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("cubegrad.study.")]:
        if name.endswith(("commands", "progress")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("cubegrad.study.commands", raising=False)
    monkeypatch.delattr("cubegrad.study.progress", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "tqdm is missing; run pip install '.[study]' in your clone" in refused(
        "problems", capsys
    )


def test_a_missing_package_of_a_problem_is_reported_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "cubegrad.study.problems.digits", raising=False)
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    line = refused("train digits --lr 1", capsys)
    assert "sklearn is missing; run pip install '.[study]' in your clone" in line


def test_problems_are_listed_with_sizes_data_and_presets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["problems"]) == 0
    out = capsys.readouterr().out
    for name in catalogue.NAMES:
        assert re.search(rf"^{name}: .+; data: .+$", out, re.MULTILINE)
        last = "own" if name == "finetune" else "paper"  # which has no size of the paper's
        assert {"cpu", "gpu", last} <= set(catalogue.find(name).presets)
    assert "digits: two convolutions" in out
    assert "6,090 parameters" in out


def test_train_prints_its_result_and_does_not_train_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train toy_problem:problem --method sgd --lr 0.01 --decay 1e-4 --seed 5"
    assert command(words) == 0
    first = capsys.readouterr().out
    start = re.escape("toy, sgd, lr 0.01, decay 0.0001, seed 5: test loss ")
    assert re.match(rf"{start}[\d.e-]+ after 4 epochs", first)
    assert "Record: runs/toy-cpu/records.jsonl" in first
    assert command(words) == 0
    assert "(run before)" in capsys.readouterr().out
    assert len(Runs(tmp_path / "runs" / "toy-cpu").load()[0]) == 1


def test_a_diverged_run_is_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train toy_problem:problem --method sgd --lr 1e30") == 0
    assert "seed 0: diverged after 1 epochs" in capsys.readouterr().out


@pytest.mark.plots
def test_compare_reruns_a_broken_line_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "compare toy_problem:problem --lr 0.01,0.1 --widen 0 --workers 1 --select valid"
    assert command(f"{words} --out out") == 0
    whole = capsys.readouterr().out
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 2 * 2 + 2 * 2  # two methods by two rates, then two seeds of each
    path.write_text("".join([*lines[:2], lines[2][:50] + "\n", *lines[3:]]))
    assert command(f"{words} --out out") == 0
    out, errors = capsys.readouterr()
    assert "line 3 is broken" in errors
    assert "its run is repeated" in errors
    assert out == whole
    table = whole.splitlines()
    assert table[0].split()[:3] == ["method", "lr", "decay"]
    assert [row.split()[0] for row in table[1:3]] == ["MADGRAD", "SGD"]
    assert "Page: out/report/index.html" in whole


@pytest.mark.processes
def test_the_problem_of_the_docs_runs_unchanged(tmp_path: Path) -> None:
    text = (ROOT / "docs/own_problem.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"here in `mine\.py`:\n\n```python\n(.*?)```", text, re.DOTALL)
    assert code.count("\n") <= 25
    assert "cubegrad compare mine:problem" in text
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    script = Path(sys.executable).with_name("cubegrad")
    assert script.exists(), "pip install -e . makes the console script"
    words = "mine:problem --epochs 2 --seeds 2 --widen 0 --workers 1"
    done = subprocess.run(
        [script, "compare", *words.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = r"^(\w+) +[\d.e-]+ +[\d.e-]+ +([\d.]+) ± [\d.]+ "
    rows = re.findall(row, done.stdout, re.MULTILINE)
    assert {name for name, _ in rows} == {"MADGRAD", "SGD", "Adam", "AdamW", "AdaGrad"}
    losses = [float(loss) for _, loss in rows]
    assert 0 < losses[0] <= losses[-1] < 2  # the best result is the first row
    assert (tmp_path / "runs" / "mine-cpu" / "report" / "index.html").stat().st_size > 10_000


@pytest.mark.processes
def test_a_terminal_without_plus_minus_gets_the_table(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "records.jsonl").write_text("".join(map(to_line, CIFAR10_RECORDS)))
    script = "import sys; from cubegrad.study.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "report", str(runs)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"91.0 ? 2.0" in done.stdout
