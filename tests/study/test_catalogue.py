"""A problem that is given by the path of its file."""

import statistics  # noqa: F401  a module whose name one of the files below takes
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import refused

from cubegrad.study import cli
from cubegrad.study.records import Runs

pytestmark = pytest.mark.usefixtures("_in_an_empty_folder")


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    """Forget the modules that a command imports by their path."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.endswith("_of_a_path"):
            del sys.modules[name]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "./net_of_a_path.py",
        "{here}/a/net_of_a_path.py",
        pytest.param("deep/net_of_a_path.py", marks=pytest.mark.thorough),
    ],
)
def test_a_problem_by_the_path_of_its_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers import it too, with the modules beside it; a second sweep runs what is missing."""
    file = Path(name.format(here=tmp_path))
    file.parent.mkdir(exist_ok=True)
    file.write_text("from beside_of_a_path import problem\n")
    file.with_name("beside_of_a_path.py").write_text(
        "from dataclasses import replace\nimport toy_problem\n"
        "def problem():\n    return replace(toy_problem.problem(), name='by path')\n"
    )
    words = ["sweep", f"{file}:problem", "--lr", "0.01,0.1", "--widen", "0", "--workers", "2"]
    assert cli.main(words) == 0
    runs = Runs(tmp_path / "runs" / "by path-cpu")
    whole = {key: record.curve for key, record in runs.load()[0].items()}
    assert len(whole) == 4
    lines = runs.path.read_text().splitlines(keepends=True)
    runs.path.write_text("".join(lines[:2]))
    assert cli.main([*words[:-1], "1"]) == 0  # in this process, which starts in no time
    assert {key: record.curve for key, record in runs.load()[0].items()} == whole
    assert capsys.readouterr().out.count("MADGRAD") == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("statistics.py", "statistics.py has the name of a module that Python finds first"),
        ("my.net.py", "my.net.py has a dot in its name; use your_module:your_function or file.py"),
    ],
)
def test_a_file_that_cannot_be_imported_by_its_name_is_reported(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("from toy_problem import problem\n")
    assert message in refused(f"train {name}:problem --lr 1", capsys)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mine", "for the function of mine.py that returns a Problem, write mine:problem"),
        ("mine.py", "for the function of mine.py that returns a Problem, write mine.py:problem"),
        ("mine.other", "for the function of mine.py that returns a Problem, write mine:other"),
        ("in/deep", "the function of in/deep.py that returns a Problem, write in/deep.py:problem"),
        ("in/deep.py", "of in/deep.py that returns a Problem, write in/deep.py:problem"),
        ("pkg", "of pkg/__init__.py that returns a Problem, write pkg:problem"),
        ("pkg.net", "for the function of pkg/net.py that returns a Problem, write pkg.net:problem"),
        ("pkg.net.other", "of pkg/net.py that returns a Problem, write pkg.net:other"),
        ("yours", "use digits, cifar10, imagenet,"),
        ("yours.py", "or your_module:your_function"),
    ],
)
def test_a_file_without_its_function_is_recognised(
    name: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("in", "pkg"):
        (tmp_path / folder).mkdir()
    for file in ("mine.py", "in/deep.py", "pkg/__init__.py", "pkg/net.py"):
        (tmp_path / file).write_text("raise SystemExit('must not be imported')\n")
    line = refused(f"compare {name}", capsys)
    assert f"unknown problem {name!r}; " in line
    assert meant in line
