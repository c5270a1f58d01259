"""Run a quick part of the tests on other versions of Python and torch.

    python tests/versions.py                     the rows of docs/versions.md
    python tests/versions.py 3.12:2.11.0 3.14:newest

Each row gets a new environment under --folder, which is deleted before the next one is made. pip
installs torch with CUDA unless told otherwise: 4 to 8 GB and some minutes a row. Without a GPU,
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu in the environment saves most of that.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "docs", "src", "tests")  # what is copied: the tests read the first two
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in")
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "scipy", "expecttest")
SLOW = "browser or compilation or exhaustive or plots or processes or ray or training"
RUNS = {  # what depends on torch most: its optimizers' contract, its compiler, its sharding
    "quick tests": [
        *("tests/optim", "tests/backends", "tests/state", "tests/family"),
        *("--cases=1", f"-m=not ({SLOW})"),
    ],
    "compiled steps": ["tests/optim/test_compile.py", "--cases=2"],
    "Triton's interpreter": ["tests/backends/test_triton.py", "--cases=2", "-m=compilation"],
    "sharded steps": ["tests/optim/test_distributed.py"],
}
VERSIONS = """
import importlib.metadata, platform
names = "torch", "triton", "numpy"
found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
import cubegrad.backends.native.tensors as tensors
built = "C" if tensors.native else "Python"
print(platform.python_version(), *(found.get(name, "none") for name in names), built)
"""


class Outcome(NamedTuple):
    python: str
    torch: str
    triton: str = ""
    numpy: str = ""
    steps: str = ""
    result: str = ""
    passed: bool | None = None  # None: not tested


def oldest() -> str:
    """The first release that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (version,) = (re.fullmatch(r"torch>=([\d.]+)", line) for line in project["dependencies"])
    assert version
    return version[1] if version[1].count(".") == 2 else f"{version[1]}.0"


def plan() -> list[str]:
    return ["3.11:oldest", "3.11:newest", "3.12:newest", "3.13:oldest", "3.14:newest"]


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def counts(report: Path) -> dict[str, int]:
    (suite,) = ElementTree.parse(report).getroot()
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}


def install(executable: str, torch: str, folder: Path) -> Path:
    """A new environment with this torch, and with cubegrad built as pip builds it for a user."""
    subprocess.run([executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    wanted = {"oldest": f"torch=={oldest()}", "newest": "torch"}.get(torch, f"torch=={torch}")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    # The interpreters of older Tritons (3.6 at least) fail with numpy 2.4.
    numpy = "numpy" if torch == "newest" else "numpy<2.4"
    subprocess.run([*pip, "--no-cache-dir", wanted, numpy, *TOOLS], env=environment, check=True)
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", ".hypothesis")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, folder / "source")
    subprocess.run([*pip, "--no-deps", folder / "source"], env=environment, check=True)
    return python


def test(python: Path, folder: Path, strict: bool) -> tuple[str, bool]:
    """Run the tests; a sentence about them, and whether all of them passed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TMPDIR": str(folder)}
    passed, skipped, broken = 0, 0, []
    for name, arguments in RUNS.items():
        say(f"  {name}")
        report = folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [python, "-m", "pytest", "-n2", "-q", "-p", "no:cacheprovider", "-rfE"]
        command += [] if strict else ["-W", "default"]
        command += [f"--junitxml={report}", f"--basetemp={folder / 'pytest'}", *arguments]
        done = subprocess.run(command, cwd=folder / "source", env=environment, check=False)
        found = counts(report) if report.exists() else {"tests": 0, "errors": 1}
        wrong = found.get("failures", 0) + found["errors"]
        passed += found["tests"] - wrong - found.get("skipped", 0)
        skipped += found.get("skipped", 0)
        if done.returncode:
            broken.append(f"{wrong} of {found['tests']} {name} failed")
    return "; ".join([f"{passed} passed, {skipped} skipped", *broken]), not broken


def try_row(row: str, parent: Path) -> Outcome:
    version, _, torch = row.partition(":")
    executable = shutil.which(f"python{version}")
    if executable is None:
        return Outcome(version, torch, result=f"not tested: no python{version} on PATH")
    folder = Path(tempfile.mkdtemp(prefix=f"cubegrad-{version}-{torch}-", dir=parent))
    try:
        say(f"Python {version}, torch {torch}: installing")
        python = install(executable, torch, folder)
        line = subprocess.run(
            [python, "-c", VERSIONS], cwd=folder, capture_output=True, text=True, check=True
        )
        versions = line.stdout.split()
        say(f"  Python {versions[0]}, torch {versions[1]}: testing")
        # An old torch or Triton may use what a newer numpy or Python warns of.
        result, passed = test(python, folder, strict=torch == "newest")
        return Outcome(*versions, result, passed)
    except subprocess.CalledProcessError as error:
        return Outcome(version, torch, result=f"failed: {error}"[:200], passed=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", default=plan(), metavar="PYTHON:TORCH")
    parser.add_argument("--folder", type=Path, help="for the environments; a temporary one")
    arguments = parser.parse_args()
    outcomes = [try_row(row, arguments.folder) for row in arguments.rows]
    table = ["| Python | torch | Triton | numpy | checks in | tests |", "|---|---|---|---|---|---|"]
    table += [f"| {' | '.join(outcome[:-1])} |" for outcome in outcomes]
    sys.stdout.write("\n".join(["", *table, ""]))
    tested = [outcome.passed for outcome in outcomes if outcome.passed is not None]
    return 0 if tested and all(tested) else 1


if __name__ == "__main__":
    sys.exit(main())
