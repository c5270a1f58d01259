"""The benchmark of bfloat16 weights at its toy size."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS = ["MADGRAD, float32 weights", "MADGRAD, stochastic_rounding"]


@pytest.fixture
def run(tmp_path):
    """The command in this process; its runs are in a process of their own."""
    module = importlib.import_module("bf16_training")
    return lambda *words: module.main(["--preset", "cpu", "--out", str(tmp_path), *words])


@pytest.mark.processes
def test_runs_are_recorded_once_and_tabulated(run, tmp_path, capsys):
    words = ["--text", str(ROOT / "README.md"), "--lr", "MADGRAD", "2e-3", "--methods", *METHODS]
    for _ in range(2):  # the second call finds all runs done
        run(*words)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert sorted((r["method"], r["seed"]) for r in records) == [
        (method, seed) for method in METHODS for seed in (0, 1)
    ]
    assert all(r["validation"] < r["curve"][0][1] for r in records)  # it learns
    *_, exact, rounded = capsys.readouterr().out.splitlines()
    assert exact.startswith("| float32 | MADGRAD, float32 weights | 0.002 | 2 | ")
    assert rounded.startswith("| bfloat16 | MADGRAD, stochastic_rounding | 0.002 | 2 | ")
    run("--table")
    assert capsys.readouterr().out.splitlines()[-1] == rounded
