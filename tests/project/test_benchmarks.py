"""The benchmarks at toy sizes: they run, and count the bytes each method must move."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cubegrad.study.data import cifar10 as data

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_readme_has_a_command_for_every_script():
    commands = re.findall(r"python benchmarks/(\S+\.py)", (BENCHMARKS / "README.md").read_text())
    scripts = {path for path in BENCHMARKS.glob("*/*.py") if "__main__" in path.read_text()}
    assert sorted(commands) == sorted(str(path.relative_to(BENCHMARKS)) for path in scripts)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    report = tmp_path_factory.mktemp("benchmark") / "small.json"
    script = BENCHMARKS / "speed" / "step_time.py"
    command = [sys.executable, str(script), "--small", "--budget", "0.01"]
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


@pytest.mark.processes
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
    assert rows["one", "cubegrad MADGRAD fused, lr auto"]["other_beside_ms"] > 0
    assert rows["one", "cubegrad MADGRAD fused"]["other_beside_ms"] is None
    expected = {
        ("one", "cubegrad MADGRAD"): 32,
        ("one", "cubegrad MADGRAD fused, lr auto"): 32,
        ("one", "cubegrad MADGRAD momentum=0"): 28,
        ("one", "cubegrad MirrorMADGRAD"): 28,
        ("one", "torch Adam fused"): 28,
        ("gpt2-large-bf16", "cubegrad MADGRAD"): 26,
    }
    assert {key: rows[key]["bytes_per_parameter"] for key in expected} == expected
    assert {"device", "torch", "date"} <= set(report["machine"])


def test_a_level_of_instructions_is_chosen_by_its_name(monkeypatch):
    import step_time

    from cubegrad.backends.native import launch

    monkeypatch.setattr(launch, "LEVEL", launch.LEVEL)
    assert step_time.level(None) == {}
    assert step_time.level("baseline") == {"level": "baseline"}
    assert launch.LEVEL == 0
    with pytest.raises(SystemExit, match="--level avx9: this machine has baseline"):
        step_time.level("avx9")


def test_steps_during_backward_are_timed_beside_adam(tmp_path, capsys):
    import release_time

    path = tmp_path / "release.json"
    release_time.main(["--small", "--turns", "2", "--device", "cpu", "--json", str(path)])
    report, table = json.loads(path.read_text()), capsys.readouterr().out
    assert [case["elements"] for case in report["cases"]] == [4 * 256 * 256, 4 * 1024]
    for case in report["cases"]:
        assert f"### {case['case']}, " in table
        assert [row["optimizer"] for row in case["rows"]] == list(release_time.CONTENDERS)[1:]
        assert case["rows"][0]["times_adam"] == 1
        for row in case["rows"]:
            assert f"| {row['optimizer']} | {row['backward_and_step_ms']:.3g} | " in table


def test_the_shapes_are_the_published_models():
    import workloads

    def count(name):
        return [(len(case.shapes), case.parameters) for case in workloads.cases(name, True, False)]

    assert count("resnet50") == [(161, 25_557_032)]
    assert count("gpt2-large") == [(436, 774_030_080)]


def test_the_family_figure_is_drawn_at_toy_sizes(tmp_path):
    import plot_family

    figure = tmp_path / "family.png"
    plot_family.main(["--steps", "60", "--out", str(figure)])
    assert figure.stat().st_size > 50_000


@pytest.mark.processes
def test_the_jax_benchmark_compares_with_its_peers(tmp_path):
    pytest.importorskip("optax")
    path = tmp_path / "jax.json"
    expected = {
        "cubegrad madgrad": 32,
        "cubegrad madgrad auto": 32,
        "cubegrad madgrad auto decay": 32,
        "cubegrad madgrad momentum=0": 28,
        "cubegrad mirror_madgrad": 28,
        # 18, 16 and 16, with 4 bytes for every 256 codes, read or read and written
        "cubegrad madgrad compact": 18 + 5 / 64,
        "cubegrad madgrad auto compact": 18 + 5 / 64,
        "cubegrad madgrad momentum=0 compact": 16 + 3 / 64,
        "cubegrad mirror_madgrad compact": 16 + 4 / 64,
        "cubegrad madgradw": 28,
        "cubegrad madgradw compact": 16 + 4 / 64,
        "cubegrad madgradw compact kernel": 16 + 4 / 64,
        "optax.contrib.madgrad": 32,
        "optax.adamw": 28,
    }
    small = ["--size", "4096", "--model", "--budget", "0.02", "--sweep", "65536"]
    script = BENCHMARKS / "speed" / "jax_step_time.py"
    command = [sys.executable, str(script), *small, "--json", str(path)]
    command += ["--optimizers", *expected]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    rows = {row["optimizer"]: row for row in report["rows"]}
    assert {name: row["bytes_per_parameter"] for name, row in rows.items()} == expected
    assert rows["optax.adamw"]["speed_per_byte_vs_adamw"] == pytest.approx(1.0)
    assert rows["optax.contrib.madgrad"]["speed_vs_contrib_madgrad"] == pytest.approx(1.0)
    for row in rows.values():
        assert row["percent_of_floor"] > 0
        assert f"| {row['optimizer']} | {row['median_ms']:.4g} (" in done.stdout
    assert {"device", "jax", "optax", "date"} <= set(report["machine"])


def test_cifar10_as_folders(tmp_path, monkeypatch, capsys):
    """The folders hold the same pixels, class by class."""
    script = runpy.run_path(str(BENCHMARKS / "evidence" / "cifar10_as_folders.py"))
    generator = np.random.default_rng(0)
    pixels = torch.from_numpy(generator.integers(256, size=(40, 3, 32, 32), dtype=np.uint8))
    labels = torch.arange(40) % 10
    jobs = list(script["jobs"](data.Images(pixels, labels), tmp_path / "train", 3))
    assert [script["write"](job) for job in jobs] == [3] * 10
    paths = sorted((tmp_path / "train").rglob("*.png"))
    assert len(paths) == 30
    assert [path.parent.name for path in paths[::3]] == list(script["CLASSES"])
    with Image.open(tmp_path / "train" / "frog" / "00002.png") as image:
        assert np.array_equal(np.asarray(image), pixels[26].permute(1, 2, 0))
    monkeypatch.setattr("sys.argv", ["x", "--data", str(tmp_path / "no"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        script["main"]()
    assert "is not empty; give a new folder" in capsys.readouterr().err


@pytest.mark.processes
def test_checkpoints_are_timed_and_weighed(tmp_path):
    path = tmp_path / "checkpoints.json"
    options = ["--scale", "0.1", "--repeats", "1", "--folder", str(tmp_path), "--json", str(path)]
    command = [sys.executable, str(BENCHMARKS / "memory" / "checkpoint_time.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = {(row["weights"], row["optimizer"]): row for row in json.loads(path.read_text())["rows"]}
    expected = {
        ("float32", "MADGRAD compact"): 4.2,
        ("float32", "MADGRAD, float32 state"): 12,
        ("float32", "torch AdamW"): 8,
        ("bfloat16", "MADGRAD compact"): 4.2,
        ("bfloat16", "MADGRAD, float32 state"): 12,
        ("bfloat16", "torch AdamW"): 4,
    }
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        assert row["file_bytes"] / row["parameters"] == pytest.approx(expected[key], rel=0.02)
        assert row["folder_bytes"] < 1.1 * row["file_bytes"]
        assert all(row[name] > 0 for name in row if name.endswith("_s"))
        assert f"| {key[0]} | {key[1]} | " in done.stdout
    assert list(tmp_path.iterdir()) == [path]  # and no checkpoint
