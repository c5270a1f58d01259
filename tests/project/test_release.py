"""A release as a user meets it: its files, an install without a compiler, what an import costs."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cubegrad

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
SOURCES = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
IMPORTED = """
import sys, torch
before = set(sys.modules)
from cubegrad import MADGRAD
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names), "torch._dynamo" in sys.modules)
"""

COMPILER = shutil.which(os.environ.get("CC", "cc"))

pytestmark = pytest.mark.processes


def wheel_of(folder: Path, **environment: str) -> Path:
    """A wheel of this code, built in a folder that git does not know."""
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        target.parent.mkdir(exist_ok=True)
        copy = shutil.copy if source.is_file() else shutil.copytree
        copy(source, target, **({} if source.is_file() else {"ignore": left_out}))
    subprocess.run(
        [sys.executable, "-c", BUILD, folder],
        cwd=folder / "source",
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def quick_start(wheel: Path, folder: Path) -> list[str]:
    """The version, the file and the state of the C backend, where there are no programs at all."""
    installed, empty = folder / "installed", folder / "empty"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", installed, wheel], capture_output=True, check=True)
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": str(empty)}
    script = ROOT / "tests" / "support" / "quick_start.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script, ROOT / "README.md"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.compilation
@pytest.mark.skipif(not COMPILER, reason="needs a C compiler")
def test_one_wheel_serves_every_python_and_needs_no_compiler(tmp_path):
    quick = tmp_path / "cc"  # 2 s instead of 8: the last -O counts
    quick.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    quick.chmod(0o755)
    wheel = wheel_of(tmp_path, CC=str(quick))
    assert wheel.name.startswith(f"cubegrad-{cubegrad.__version__}-cp311-abi3-")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    python = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert python <= set(names)
    assert {"cubegrad/py.typed", "cubegrad/study/page.css", "cubegrad/study/page.js"} <= set(names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"cubegrad"}
    version, file, backend = quick_start(wheel, tmp_path)
    assert version == cubegrad.__version__
    assert Path(file).is_relative_to(tmp_path)
    assert backend == "available"


def test_without_a_compiler_the_wheel_has_no_c_code_and_says_so(tmp_path):
    wheel = wheel_of(tmp_path, CC="no-such-compiler", PATH=str(tmp_path))
    *_, backend = quick_start(wheel, tmp_path)
    assert backend.startswith("not available: No module named")
    assert backend.endswith("reinstall where there is a C compiler")


def test_the_wheel_for_any_platform(tmp_path):
    wheel = wheel_of(tmp_path, CUBEGRAD_PURE="1")
    assert wheel.name == f"cubegrad-{cubegrad.__version__}-py3-none-any.whl"
    (found,) = importlib.metadata.distributions(name="cubegrad", path=[str(wheel)])
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert found.requires is not None
    assert [line for line in found.requires if "extra" not in line] == ["torch>=2.10"]


def test_an_import_adds_our_modules_to_those_of_torch_and_no_others():
    """They take 10 ms (median of 10). torch.compiler.disable at import time added 1.2 s."""
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cubegrad", "False"]


def test_the_citation_has_the_version():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {cubegrad.__version__}" in lines
