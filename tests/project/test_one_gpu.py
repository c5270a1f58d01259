"""examples/one_gpu_7b.py with 100M parameters; the benchmark and the figure that build on it."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "one_gpu_7b.py"
TEXT = b"It is a truth un"  # short: without AVX-512 a token takes 0.4 s per step
PARAMETERS = 98_708_736


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """As long as a batch, so that each step has the same tokens."""
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    return path


@pytest.mark.processes
def test_100m_parameters_learn_and_their_memory_adds_up(text, tmp_path):
    numbers = tmp_path / "numbers.json"
    options = ("--size", "100m", "--steps", "3", "--tokens", str(len(TEXT)))
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, "--text", text, "--json", numbers, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text())
    assert found["parameters"] == PARAMETERS
    first, _, last = found["losses"]
    assert len(re.findall(r"^step ", done.stdout, re.MULTILINE)) == 3
    assert first == pytest.approx(math.log(32_000), abs=1)  # 3 seeds: 10.25 to 10.79
    assert last < first - 0.3  # 3 seeds, with and without AVX-512: lower by 0.94 to 1.03

    memory = found["memory"]
    peak = memory.pop("peak")
    assert sum(memory.values()) == peak
    assert memory["weights"] == 2 * PARAMETERS
    assert 4 < memory["state"] / PARAMETERS < 4.06
    assert memory["gradients"] < 0.01 * memory["weights"], "only small ones wait for step()"
    assert memory["activations and the rest"] > 0
    for name, size in {**memory, "peak": peak}.items():
        assert re.search(rf"^{name} +{size / 1e9:.2f} ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_released_gradients_change_no_bit_with_deterministic_kernels():
    script = ROOT / "tests" / "support" / "deterministic_release.py"
    done = subprocess.run(
        [sys.executable, script, ROOT / "README.md"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    ordinary, released = json.loads(done.stdout)
    assert ordinary == released
    assert ordinary[-1] < ordinary[0]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = importlib.import_module("one_gpu_7b")
    monkeypatch.setitem(module.SIZES, "tiny", (256, 512, 1, 4))
    return module


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "1"), "--steps 1 must be >= 2; use 30"),
        (("--tokens", "17"), "has 16 bytes, fewer than --tokens 17; give a longer file"),
    ],
)
def test_bad_option_is_refused_with_the_remedy(
    example, options, message, text, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--text", str(text), *options])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert message in capsys.readouterr().err


@pytest.fixture
def benchmark(example):
    del example  # which it imports
    return importlib.import_module("one_gpu")


def measured(benchmark, key, text):
    options = Namespace(size="tiny", text=text, tokens=len(TEXT), steps=3, seed=0, passes=2)
    vars(options).update(madgrad_lr=1e-3, adamw_lr=1e-4)
    return benchmark.measure(benchmark.CONTENDERS[key], options)


@pytest.mark.parametrize(
    ("key", "gradients", "state", "master"),
    [
        ("madgrad-compact-release", 0, 4.05, 0),
        ("madgrad-compact", 2, 4.05, 0),
        ("madgrad-float32", 2, 12, 0),
        ("adamw-bf16", 2, 4, 0),
        ("adamw-master", 4, 8, 4),
    ],
)
def test_bytes_that_each_optimizer_keeps(benchmark, key, gradients, state, master, text):
    row = measured(benchmark, key, text)
    count, memory = row["parameters"], row["memory"]
    assert memory["weights"] == 2 * count
    assert memory["state"] / count == pytest.approx(state, rel=0.01)
    assert memory["gradients"] / count == pytest.approx(gradients, abs=0.1)
    assert memory["master_weights"] == master * count
    assert sum(size for name, size in memory.items() if name != "peak") == memory["peak"]
    assert row["losses"][-1] < row["losses"][0]
    assert row["step_ms"] - row["forward_backward_ms"] == pytest.approx(row["optimizer_ms"])


def test_releasing_gradients_changes_no_loss(benchmark, text):
    ordinary, released = (
        measured(benchmark, key, text) for key in ("madgrad-compact", "madgrad-compact-release")
    )
    assert ordinary["losses"] == released["losses"]


def test_flashoptims_codes_and_extra_bits_are_counted_apart(benchmark):
    codes, other = nn.Module(), nn.Linear(3, 3).weight
    vars(codes).update(_quantized=other, _scales=other, _data=None, _signed=True)
    optimizer = Namespace(state={0: {"exp_avg": codes, "error_bits": other, "step": other[0, 0]}})
    assert benchmark.kept(optimizer) == (2 * other.nbytes + 4, other.nbytes)


def test_one_that_fails_or_hangs_leaves_the_others(benchmark, text, tmp_path, monkeypatch, capsys):
    row = measured(benchmark, "adamw-bf16", text)

    def start(command, stderr, timeout, check):
        del check
        *_, key, _, result = command
        if key == "madgrad-compact":
            raise subprocess.TimeoutExpired(command, timeout)
        if key == "flashadamw-release":
            stderr.write("Traceback\n\nRuntimeError: a|b\n")
        if key == "adamw-bf16":
            Path(result).write_text(json.dumps(row))

    # Not subprocess.run itself: matplotlib calls it to look for fonts where it has no cache.
    fake = SimpleNamespace(run=start, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(benchmark, "subprocess", fake)
    report, figure = tmp_path / "report.json", tmp_path / "memory.png"
    only = ("madgrad-compact", "flashadamw-release", "adamw-bf16", "adamw-master")
    benchmark.main(["--text", str(text), "--json", str(report), "--only", *only])
    rows = json.loads(report.read_text())["rows"]
    assert [row.get("unavailable") for row in rows] == [
        "it took more than --limit 90 seconds",
        "RuntimeError: a|b",
        None,
        "the process ended without a message",
    ]
    table = capsys.readouterr().out.rpartition("\n\n")[2].strip().splitlines()
    assert {line.replace("\\|", "").count("|") for line in table} == {12}

    importlib.import_module("plot_one_gpu").main([str(report), "--out", str(figure)])
    with Image.open(figure) as image:
        assert 800 <= image.width <= 4000
        assert 200 <= image.height <= 3000


def test_the_large_model_has_the_published_number_of_parameters(example):
    model = example.build("7b", torch.device("meta"), seed=0)
    assert sum(param.numel() for param in model.parameters()) == 6_738_415_616
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert model.is_gradient_checkpointing
