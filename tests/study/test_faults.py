"""An error in a problem's code: one line in the terminal, the traceback in the run's log."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy_problem
from command_line import refused
from faulty_items import Items
from small_runs import settings_of
from torch.utils.data import DataLoader

from cubegrad.study import cli, faults, nodes
from cubegrad.study.records import Runs
from cubegrad.study.train import Place
from cubegrad.study.workers import Job, Machine

pytestmark = pytest.mark.usefixtures("_in_an_empty_folder")

MODULE = "net_of_a_fault"
CODE = """
from dataclasses import replace
import toy_problem
# in <module>
def build(setup):
    # in build
    task = toy_problem.build(setup)
    def batches(epoch):
        # in batches
        return task.batches(epoch)
    def loss(model, batch):
        # in loss
        return task.loss(model, batch)
    def evaluate(model, split):
        # in evaluate
        return task.evaluate(model, split)
    return replace(task, batches=batches, loss=loss, evaluate=evaluate)
def check_data(setup):
    # in check_data
    pass
def problem():
    # in problem
    return replace(toy_problem.problem(), build=build, check_data=check_data)
"""
OF_A_RUN = ("build", "batches", "loss", "evaluate")


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    """Forget the module that a command imports from the current folder."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop(MODULE, None)


def broken(where: str, statement: str = "missing_name") -> str:
    """Write the problem with an error in this function; returns what a message says of it."""
    code = CODE.replace(f"# in {where}\n", f"{statement}\n")
    Path(f"{MODULE}.py").write_text(code)
    place = code[: code.index(statement)].count("\n") + 1
    return f"NameError: name 'missing_name' is not defined ({MODULE}.py line {place}, in {where})"


@pytest.mark.parametrize("where", [*OF_A_RUN, "check_data", "problem", "<module>"])
def test_an_error_of_the_problem_is_one_line_with_its_place(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = broken(where)
    line = refused(f"train {MODULE}:problem --lr 0.1", capsys)
    start = f"cubegrad: error: {fault}; mend it and run the same command again"
    logs = list((tmp_path / "runs" / "toy-cpu" / "logs").glob("*.log"))
    if where not in OF_A_RUN:
        assert line == f"{start}\n"
        assert not logs
        return
    (log,) = logs
    assert line == f"{start}; its traceback is in {log.relative_to(tmp_path)}\n"
    text = log.read_text()
    assert "failed\nTraceback (most recent call last):\n" in text
    assert f", in {where}\n    missing_name\n" in text
    assert text.endswith("NameError: name 'missing_name' is not defined\n")
    broken(where, "pass")
    sys.modules.pop(MODULE)
    assert cli.main(["train", f"{MODULE}:problem", "--lr", "0.1"]) == 0
    assert log.read_text().endswith("finished\n")


@pytest.mark.processes
def test_an_error_in_a_pool_is_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = broken("loss")
    words = f"sweep {MODULE}:problem --lr 0.01,0.1 --workers 2"
    assert cli.main(words.split()) == 2
    out, errors = capsys.readouterr()
    shown = [line for line in errors.splitlines() if " gone, " not in line]  # a slow start
    assert (out, len(shown)) == ("", 1)
    assert shown[0].startswith(f"cubegrad: error: {fault}; mend it and run the same command again;")
    assert "Traceback" in Path(shown[0].rpartition(" is in ")[2]).read_text()
    assert Runs(tmp_path / "runs" / "toy-cpu").load() == ({}, [])


def test_an_error_of_a_dry_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    fault = broken("loss")
    assert fault in refused(f"sweep {MODULE}:problem --dry-run", capsys)


def test_code_that_is_not_python_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    broken("loss", "return (")
    line = refused(f"train {MODULE}:problem --lr 1", capsys)
    assert f"SyntaxError: '(' was never closed ({MODULE}.py line 12)" in line


def test_an_error_of_many_lines_is_cut_and_one_outside_the_problem_has_a_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken("loss", "raise ValueError('many\\n' * 200)")
    assert len(refused(f"train {MODULE}:problem --lr 1", capsys)) < 600
    sys.modules.pop(MODULE)
    broken("batches", "return None")
    line = refused(f"train {MODULE}:problem --lr 1", capsys)
    assert "TypeError: 'NoneType' object is not iterable (" in line
    assert "in _epoch)" in line


@pytest.mark.processes
def test_an_error_in_a_worker_of_a_loader_has_its_own_place() -> None:
    with pytest.raises(NameError, match="Caught NameError in DataLoader worker") as caught:
        # Not forked: JAX has threads here.
        next(iter(DataLoader(Items(), num_workers=1, multiprocessing_context="spawn")))
    lines = Items.__getitem__.__code__
    place = f"{Path(lines.co_filename)} line {lines.co_firstlineno + 4}"
    fault = f"NameError: name 'missing_name' is not defined ({place}, in __getitem__)"
    assert faults.line(caught.value) == fault


def test_a_traceback_without_a_log_is_not_lost(tmp_path: Path) -> None:
    broken("loss")
    (tmp_path / "logs").write_text("a file")
    job = Job(settings_of(toy_problem.problem()), tmp_path / "one.pt")
    for place in (Place(), Place(logs=tmp_path / "logs")):
        with pytest.raises(NameError, match="missing_name"):
            list(Machine(f"{MODULE}:problem", place).run([job], lambda _: None))


def test_an_error_on_a_node_is_one_line(tmp_path: Path) -> None:
    fault = broken("loss")
    sys.path.insert(0, str(tmp_path))
    job = Job(settings_of(toy_problem.problem()), tmp_path / "one.pt")
    order = nodes.Order(f"{MODULE}:problem", job, Place(logs=tmp_path / "logs"), "not shared")
    assert nodes.work(order, None) == f"{fault}; mend it and run the same command again"
    with nodes.marker(tmp_path) as mark:
        message = nodes.work(replace(order, marker=mark), None)
    (log,) = (tmp_path / "logs").iterdir()
    assert message == f"{fault}; mend it and run the same command again; its traceback is in {log}"


def test_a_single_run_that_is_too_large_for_the_gpu_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    problem = replace(toy_problem.problem(), build=build)
    monkeypatch.setattr(toy_problem, "problem", lambda: problem)
    line = refused("train toy_problem:problem --lr 1", capsys)
    assert "a run needs more memory than the GPU has; use a smaller --batch" in line
