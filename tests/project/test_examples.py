"""Each example runs unchanged, from any folder, and prints its results."""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


METHODS = {"MADGRAD", "MirrorMADGRAD", "Adam"}


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
def test_quick_sweep_prints_a_table_and_saves_the_plot(tmp_path: Path) -> None:
    plot = tmp_path / "new folder" / "plot.png"
    done = run("jax_sweep.py", "--quick", "--out", str(plot), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Plot: {plot}"
    found = accuracies(done.stdout)
    assert found.keys() == METHODS, done.stdout
    assert all(80.0 < accuracy <= 100.0 for accuracy in found.values()), done.stdout
    width, height = png_size(plot)
    assert 800 <= width <= 4000
    assert 400 <= height <= 3000
    assert plot.stat().st_size > 10_000


def test_every_example_has_a_case() -> None:
    covered = {"jax_sweep.py"}
    covered |= {"fsdp2.py", "one_gpu_7b.py"}  # test_restarts.py, test_one_gpu.py
    covered |= {"plain_pytorch.py", "lightning_module.py", "torchtitan_optimizer.py"}
    covered |= {"timm_train.py", "deepspeed_zero.py"}  # test_recipes.py
    covered |= {"flax_nnx.py", "equinox_mlp.py"}  # test_recipes_jax.py
    covered |= {"transformers_trainer.py", "trl_sft.py", "accelerate_loop.py", "peft_lora.py"}
    covered |= {"diffusers_ema.py"}  # test_recipes_huggingface.py
    assert {path.name for path in EXAMPLES.glob("*.py")} == covered
