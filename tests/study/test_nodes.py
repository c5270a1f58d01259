"""What is sent to a node, what a node does, and what --ray refuses: all without a cluster."""

import contextlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ray_problem
import torch
from command_line import refused
from small_runs import settings_of

from cubegrad.study import StudyError, cli, cluster, commands, nodes, request
from cubegrad.study.cluster import Cluster
from cubegrad.study.train import Place
from cubegrad.study.workers import Job, Machine

NAME = "ray_problem:problem"
SETTINGS = settings_of(ray_problem.problem(), method="sgd")
with_ray = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs the extra ray")


@with_ray
@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (
            "--ray 127.0.0.1:9",
            "--ray 127.0.0.1:9: no Ray cluster is reached there",
            "use host:6379",
        ),
        ("--ray ray://127.0.0.1:9", "no Ray cluster is reached there", "ray://host:10001"),
        ("--ray here", "--ray here: no Ray cluster is reached there", "auto, or local"),
        ("--ray local --gpus-per-run 0", "0 must be a part of a GPU in (0, 1]", "use 0.25"),
        ("--ray local --gpus-per-run 2", "2 must be a part of a GPU in (0, 1]", "use 0.25"),
        ("--ray local --gpus-per-run 0.5", "is for runs on GPUs with --ray", "leave it out"),
        ("--gpus-per-run 0.5", "is for runs on GPUs with --ray", "leave it out"),
        ("--ray local --retries -1", "-1 must be a whole number >= 0", "use 0"),
    ],
)
def test_bad_input_ends_with_one_line(
    words: str,
    what: str,
    remedy: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(f"sweep digits {words}", capsys)
    assert what in line
    assert remedy in line
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


@with_ray
def test_a_server_that_is_not_ray_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_listens", lambda _: True)
    monkeypatch.setattr(cluster, "REACH", 1)
    assert "no Ray cluster is reached there" in refused("sweep digits --ray 127.0.0.2:9", capsys)


def test_a_missing_ray_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refused("sweep digits --ray local", capsys)
    assert "ray is missing; run pip install '.[ray]' in your clone" in line


@pytest.mark.parametrize(
    ("words", "cpus", "gpus", "limit"),
    [
        ("", 1, 0.0, None),
        ("--device cuda", 1, 1.0, None),
        ("--device cuda --gpus-per-run 0.25 --workers 8", 1, 0.25, 8),
    ],
)
def test_a_runs_share_of_a_node(words: str, cpus: int, gpus: float, limit: int | None) -> None:
    """Also: this machine needs no GPU of its own to ask for one."""
    options = cli.parser().parse_args(["sweep", "digits", "--ray", "auto", *words.split()])
    machine = commands._executor(options, request.make_plan(options))
    assert isinstance(machine, Cluster)
    assert (machine.cpus, machine.gpus, machine.limit) == (cpus, gpus, limit)
    assert machine.retries == 3


def test_only_python_files_are_sent_with_a_users_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, packed = tmp_path / "home", tmp_path / "packed"
    for name in ("mine_of_test/__init__.py", "mine_of_test/parts/net.py", "mine_of_test/words.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (home / "mine_of_test" / "deep.py").write_text("from ray_problem import problem\n")
    for name in ("beside.py", "data/big.bin", "runs/records.jsonl", ".venv/lib/other.py"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    packed.mkdir()
    monkeypatch.syspath_prepend(home)
    assert nodes.pack("mine_of_test.deep:problem", packed) == packed
    names = {str(path.relative_to(packed)) for path in packed.rglob("*") if path.is_file()}
    assert names == {
        "beside.py", "mine_of_test/__init__.py", "mine_of_test/deep.py",
        "mine_of_test/parts/net.py", "mine_of_test/words.txt",
    }  # fmt: skip
    assert nodes.pack("digits", packed) is None


def test_python_files_of_a_plain_folder_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, packed = tmp_path / "home", tmp_path / "packed"
    (home / "plain_of_test" / "runs").mkdir(parents=True)
    (home / "plain_of_test" / "deep.py").write_text("from ray_problem import problem\n")
    (home / "plain_of_test" / "runs" / "records.jsonl").touch()
    packed.mkdir()
    monkeypatch.syspath_prepend(home)
    assert nodes.pack("plain_of_test.deep:problem", packed) == packed
    names = [str(path.relative_to(packed)) for path in packed.rglob("*") if path.is_file()]
    assert names == ["plain_of_test/deep.py"]


def test_a_node_with_another_version_is_reported() -> None:
    order = nodes.Order(NAME, Job(SETTINGS, Path("one.pt")), Place(), "", version="9.9")
    message = nodes.work(order, None)
    assert isinstance(message, str)
    assert "and the sweep uses 9.9; install the same version on every node" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about nodes without a GPU")
def test_a_node_whose_torch_sees_no_gpu_is_reported() -> None:
    settings = replace(SETTINGS, device="cuda")
    message = nodes.work(nodes.Order(NAME, Job(settings, Path("one.pt")), Place(), ""), None)
    assert message == "torch sees no GPU on a node that has one; install a torch with CUDA there"


@pytest.mark.processes
def test_a_gpu_that_is_too_small_is_reported(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    message = nodes.work(
        nodes.Order(NAME, Job(SETTINGS, Path("one.pt")), Place(tmp_path), ""), None
    )
    assert isinstance(message, str)
    assert "too little memory" in message
    assert "larger --gpus-per-run" in message
    jobs = [Job(replace(SETTINGS, seed=seed), tmp_path / "one.pt") for seed in range(2)]
    with (
        contextlib.closing(Machine(NAME, Place(tmp_path), workers=2)) as machine,
        pytest.raises(StudyError, match=r"^2 runs at a time are too many for the GPU's memory; "),
    ):
        list(machine.run(jobs, lambda _: None))


def test_only_the_same_folder_counts_as_shared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with nodes.marker(one) as mark, nodes.marker(other):
        assert nodes.is_shared(one, mark)
        assert not nodes.is_shared(other, mark)
        assert not nodes.is_shared(tmp_path / "none", mark)
    assert not nodes.is_shared(one, mark)
    assert not list(one.iterdir())


def test_a_problem_by_its_file_has_a_name_that_a_node_can_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "here_of_test.py").write_text("from ray_problem import problem\n")
    packed = tmp_path / "packed"
    packed.mkdir()
    problem = f"{tmp_path / 'here_of_test.py'}:problem"
    assert nodes.name(problem) == "here_of_test:problem"
    assert nodes.name("digits") == "digits"
    assert nodes.pack(problem, packed) == packed
    assert [path.name for path in packed.iterdir()] == ["here_of_test.py"]
