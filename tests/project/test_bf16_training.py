"""The benchmark of bfloat16 weights at its toy size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS = ["MADGRAD, float32 weights", "MADGRAD, stochastic_rounding"]


def run(out, *words):
    command = [sys.executable, str(ROOT / "benchmarks" / "bf16_training.py"), "--preset", "cpu"]
    command += ["--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.processes
def test_runs_are_recorded_once_and_tabulated(tmp_path):
    words = ["--text", str(ROOT / "README.md"), "--lr", "MADGRAD", "2e-3", "--methods", *METHODS]
    for _ in range(2):  # the second call finds all runs done
        done = run(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert sorted((r["method"], r["seed"]) for r in records) == [
        (method, seed) for method in METHODS for seed in (0, 1)
    ]
    assert all(r["validation"] < r["curve"][0][1] for r in records)  # it learns
    *_, exact, rounded = done.stdout.splitlines()
    assert exact.startswith("| float32 | MADGRAD, float32 weights | 0.002 | 2 | ")
    assert rounded.startswith("| bfloat16 | MADGRAD, stochastic_rounding | 0.002 | 2 | ")
    assert run(tmp_path, "--table").stdout.splitlines()[-1] == rounded


def test_a_text_is_needed(tmp_path):
    done = run(tmp_path, "--text", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "must be a file; give a plain text" in done.stderr
