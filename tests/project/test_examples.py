"""Each example runs unchanged, from any folder, and prints its results."""

import os
import re
import runpy
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Example:
    script: str
    least: dict[str, float]  # the methods in its table, and the accuracy in % each must exceed
    refused: dict[tuple[str, ...], str]  # bad options, and the message they get


CASES = [
    Example(
        "jax_sweep.py",
        least={"MADGRAD": 80.0, "MirrorMADGRAD": 80.0, "Adam": 80.0},
        refused={
            ("--seeds", "1"): "--seeds 1 must be >= 2; use 5",
            ("--out", "sweep.txt"): "--out sweep.txt must end in .png, .pdf or .svg",
        },
    ),
]
REFUSALS = [
    pytest.param(case.script, options, message, id=f"{case.script} {' '.join(options)}")
    for case in CASES
    for options, message in case.refused.items()
]


def run(script: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # XLA needs 5 s for each of jax_sweep.py's programs, which then run for 0.1 s.
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-X", "utf8", "-W", "error", str(EXAMPLES / script), *options]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def accuracies(output: str) -> dict[str, float]:
    """Method and accuracy from rows such as `MADGRAD  0.01  98.7 ± 0.2  ...`."""
    rows = re.findall(r"^(\w+) +[\d.e-]+ +([\d.]+) ± [\d.]+ ", output, re.MULTILINE)
    return {method: float(accuracy) for method, accuracy in rows}


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    return width, height


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.script)
def test_quick_run_prints_a_table_and_saves_the_plot(case: Example, tmp_path: Path) -> None:
    plot = tmp_path / "new folder" / "plot.png"
    done = run(case.script, "--quick", "--out", str(plot), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Plot: {plot}"
    found = accuracies(done.stdout)
    assert found.keys() == case.least.keys(), done.stdout
    for method, least in case.least.items():
        assert least < found[method] <= 100.0, done.stdout
    width, height = png_size(plot)
    assert 800 <= width <= 4000
    assert 400 <= height <= 3000
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(("script", "options", "message"), REFUSALS)
def test_bad_option_is_refused_with_the_remedy(
    script: str,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: another one would spend seconds on importing JAX."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [script, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing behind"


def test_every_example_has_a_case() -> None:
    elsewhere = {"fsdp2.py", "one_gpu_7b.py"}  # test_restarts.py, test_one_gpu.py
    elsewhere |= {"plain_pytorch.py", "lightning_module.py", "torchtitan_optimizer.py"}
    elsewhere |= {"timm_train.py", "deepspeed_zero.py"}  # test_recipes.py
    elsewhere |= {"flax_nnx.py", "equinox_mlp.py"}  # test_recipes_jax.py
    elsewhere |= {"transformers_trainer.py", "trl_sft.py", "accelerate_loop.py", "peft_lora.py"}
    elsewhere |= {"diffusers_ema.py"}  # test_recipes_huggingface.py
    covered = {case.script for case in CASES} | elsewhere
    assert {path.name for path in EXAMPLES.glob("*.py")} == covered
