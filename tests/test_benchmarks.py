"""The benchmark runs at toy sizes, and counts the bytes each method must move."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    report = tmp_path_factory.mktemp("benchmark") / "small.json"
    command = [sys.executable, str(BENCHMARKS / "step_time.py"), "--small", "--budget", "0.01"]
    chosen = [
        "--device",
        "cpu",
        "--optimizers",
        "cubegrad",
        "torch Adam fused",
        "--json",
        str(report),
    ]
    done = subprocess.run(
        [*command, *chosen], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text()), done.stdout


def test_every_case_is_timed_against_its_floor(measured):
    report, table = measured
    rows = {(row["case"], row["optimizer"]): row for row in report["rows"] if row["median_ms"]}
    cases = {case for case, _ in rows}
    assert cases == {"one", "gpt2-large", "gpt2-large-bf16", "resnet50", "many", "growth"}
    for case in cases:
        assert f"### {case}" in table
        row = rows[case, "cubegrad MADGRAD"]
        assert row["median_ms"] > 0
        assert row["percent_of_floor"] > 0
        assert rows[case, "torch Adam fused"]["speed_vs_adam_fused"] == pytest.approx(1.0)
    expected = {
        ("one", "cubegrad MADGRAD"): 32,
        ("one", "cubegrad MADGRAD momentum=0"): 28,
        ("one", "cubegrad MirrorMADGRAD"): 28,
        ("one", "torch Adam fused"): 28,
        ("gpt2-large-bf16", "cubegrad MADGRAD"): 26,
    }
    assert {key: rows[key]["bytes_per_parameter"] for key in expected} == expected
    assert {"device", "torch", "date"} <= set(report["machine"])


def test_the_shapes_are_the_published_models(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import workloads

    def count(name):
        return [(len(case.shapes), case.parameters) for case in workloads.cases(name, True, False)]

    assert count("resnet50") == [(161, 25_557_032)]
    assert count("gpt2-large") == [(436, 774_030_080)]


def test_the_family_figure_is_drawn_at_toy_sizes(tmp_path):
    figure = tmp_path / "family.png"
    script = [sys.executable, "-X", "utf8", "-W", "error", str(BENCHMARKS / "plot_family.py")]
    command = [*script, "--quick", "--out", str(figure)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert figure.stat().st_size > 50_000
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()[1:]}
    assert {"DA", "AdaGradDA", "MADGRAD", "MADGRAD, p = 2", "InlineAveragedSGD"} <= rows.keys()
    for row in rows.values():
        assert float(row[-3]) > 0  # no method is below the minimum


def test_the_jax_benchmark_compares_with_its_peers(tmp_path):
    pytest.importorskip("optax")
    path = tmp_path / "jax.json"
    small = ["--size", "4096", "--model", "--budget", "0.02", "--sweep", "65536"]
    command = [sys.executable, str(BENCHMARKS / "jax_step_time.py"), *small, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    rows = {row["optimizer"]: row for row in report["rows"]}
    assert {name: row["bytes_per_parameter"] for name, row in rows.items()} == {
        "cubegrad madgrad": 32,
        "cubegrad madgrad momentum=0": 28,
        "cubegrad mirror_madgrad": 28,
        "optax.contrib.madgrad": 32,
        "optax.adamw": 28,
    }
    assert rows["optax.adamw"]["speed_per_byte_vs_adamw"] == pytest.approx(1.0)
    assert rows["optax.contrib.madgrad"]["speed_vs_contrib_madgrad"] == pytest.approx(1.0)
    for row in rows.values():
        assert row["percent_of_floor"] > 0
        assert f"| {row['optimizer']} | {row['median_ms']:.4g} (" in done.stdout
    assert {"device", "jax", "optax", "date"} <= set(report["machine"])
