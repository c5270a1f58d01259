"""Sweeps on a small Ray cluster on this machine, whose workers are killed."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import ray_problem
import torch
from command_line import start
from linux_processes import is_running, needs_proc, process_of, running
from ray_nodes import ray_node, started_epochs, wait_for, wait_for_line
from small_sweeps import curves, four_runs

from cubegrad.study import Setup, StudyError, nodes
from cubegrad.study.cluster import Cluster
from cubegrad.study.progress import Progress
from cubegrad.study.records import Runs
from cubegrad.study.sweep import Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

pytestmark = pytest.mark.ray

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs the extra ray", allow_module_level=True)

NAME = "ray_problem:problem"
TOY = four_runs(ray_problem.problem())
SETUP = Setup(TOY.preset, 0, torch.device("cpu"), Path())


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    """A folder for Ray's sockets; pytest's are too long for their names."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def address(home: str) -> Iterator[str]:
    """A head with room for two runs."""
    # Ray replaces 127.0.0.1 by the other address of this host.
    where = "--node-ip-address=127.0.0.2 --port=0 --num-cpus=2 --include-dashboard=false"
    with ray_node(f"--head {where}", home) as head:
        yield wait_for_line(head, "--address='").split("--address='")[1].split("'")[0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "sleep").write_text("0")
    return folder


def search(folder: Path, machine: Machine | Cluster) -> tuple[dict[str, Any], Progress]:
    """The curves of a whole sweep, each run recorded exactly once."""
    progress = Progress(StringIO())
    try:
        Sweep(TOY, Runs(folder), machine, progress).search()
    finally:
        machine.close()
    recorded = curves(folder)
    assert len((folder / "records.jsonl").read_text().splitlines()) == len(recorded) == 4
    return recorded, progress


def local(tmp_path: Path, data: Path) -> dict[str, Any]:
    (data / "sleep").write_text("0")
    (data / "together").unlink(missing_ok=True)
    return search(tmp_path / "local", Machine(NAME, Place(data)))[0]


def kill_one(data: Path, node: int | None, over: threading.Event) -> None:
    """Kill the first worker in its third epoch; with a node given, one on it, and the node."""
    while not over.wait(0.02):
        for one in started_epochs(data):
            if one.epoch == 2 and (node is None or node == os.getsid(one.pid)):
                if node is not None:
                    os.kill(process_of(one.pid).parent, signal.SIGKILL)
                os.kill(one.pid, signal.SIGKILL)
                return


def attempts(data: Path) -> list[int]:
    """The epoch with which each attempt at a run began."""
    first: dict[tuple[int, str], int] = {}
    for one in started_epochs(data):
        first.setdefault((one.pid, one.task), one.epoch)
        assert "working_dir_files" in one.module, "the module came with the job"
    return sorted(first.values())


@needs_proc
@pytest.mark.parametrize(
    "what",
    ["a worker", pytest.param("a node that shares no folder", marks=pytest.mark.thorough)],
)
def test_a_death_costs_no_run(
    what: str,
    address: str,
    home: str,
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (data / "sleep").write_text("0.3")
    shared, node, over = what == "a worker", None, threading.Event()
    (data / "together").write_text("2" if shared else "3")
    if not shared:  # as on a node that has another folder of this name
        monkeypatch.setattr(nodes, "marker", lambda _: contextlib.nullcontext("elsewhere"))
    with contextlib.ExitStack() as stack:
        if not shared:
            words = f"--address={address} --node-ip-address=127.0.0.3 --num-cpus=1"
            joined = stack.enter_context(ray_node(words, home))
            wait_for_line(joined, "Ray runtime started")
            node = joined.pid
        killer = threading.Thread(target=kill_one, args=(data, node, over))
        killer.start()
        stack.callback(killer.join)
        stack.callback(over.set)
        machine = Cluster(NAME, Place(data, save_every=0.0), address)
        recorded, progress = search(tmp_path / "cluster", machine)
    assert (progress.runs, progress.passed, progress.total) == (4, 16, 16)
    # Five attempts at four runs; the fifth resumed the checkpoint, if its node could see it.
    assert attempts(data) == [0, 0, 0, 0, 2 if shared else 0]
    assert not list((tmp_path / "cluster").glob("checkpoints/*"))
    out, errors = capfd.readouterr()
    assert out == ""
    assert "the worker or node of a run died; the run is restarted\n" in errors
    assert "state-dump" not in errors, "a node's log is not for the terminal"
    assert recorded == local(tmp_path, data)


def start_sweep(data: Path, out: Path, ray: str, home: str, sleep: float) -> subprocess.Popen[str]:
    (data / "sleep").write_text(str(sleep))
    words = f"sweep {NAME} --lr 0.01,0.1 --widen 0 --save-every 0 --data {data} --out {out}"
    return start(f"{words} --ray {ray}", RAY_TMPDIR=home)


@needs_proc
def test_ctrl_c_stops_a_cluster_of_its_own_and_resumes(
    home: str, tmp_path: Path, data: Path
) -> None:
    process = start_sweep(data, tmp_path / "out", "local", home, sleep=0.8)
    wait_for(lambda: Runs(tmp_path / "out").load()[0])
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the session
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.strip().endswith("stopped; run the same command again to resume")
    assert "Traceback" not in errors
    wait_for(lambda: not any(is_running(one.pid) for one in started_epochs(data)))
    wait_for(lambda: all(one.session != process.pid for one in running()))
    before = curves(tmp_path / "out")
    assert 1 <= len(before) < 4
    (data / "sleep").write_text("0")
    after, _ = search(tmp_path / "out", Machine(NAME, Place(data)))
    assert {key: after[key] for key in before} == before
    assert after == local(tmp_path, data)


@pytest.mark.thorough
@needs_proc
def test_a_killed_driver_leaves_no_worker_computing(
    address: str, home: str, tmp_path: Path, data: Path
) -> None:
    process = start_sweep(data, tmp_path / "out", address, home, sleep=0.4)
    wait_for(lambda: len({one.pid for one in started_epochs(data)}) == 2)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(is_running(one.pid) for one in started_epochs(data)))
    assert len(Runs(tmp_path / "out").load()[0]) < 4
    (data / "sleep").write_text("0")
    Runs(tmp_path / "out").repair()
    recorded, _ = search(tmp_path / "out", Cluster(NAME, Place(data), address))
    assert recorded == local(tmp_path, data)


def test_what_goes_wrong_on_a_node_is_one_line(address: str, tmp_path: Path, data: Path) -> None:
    machine = Cluster(NAME, Place(data), address, limit=1, retries=1)

    def sweep(fault: str) -> None:
        (data / fault).touch()
        try:
            machine.check(TOY.problem, replace(SETUP, data=data))
            Sweep(TOY, Runs(tmp_path), machine, Progress(StringIO())).search()
        finally:
            (data / fault).unlink()

    with contextlib.closing(machine):
        with pytest.raises(StudyError, match=r"^data is torn; fetch it again$"):
            sweep("torn")  # found before any run
        with pytest.raises(StudyError, match=r"^the data is odd; use other data$"):
            sweep("study-error")
        with pytest.raises(ZeroDivisionError, match=r"ray_problem\.py"):
            sweep("bug")  # a bug, so it is shown with its traceback
        with pytest.raises(StudyError, match=r"node died 2 times.*; run the same") as caught:
            sweep("die")
    assert "(WorkerCrashedError)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert started_epochs(data) == []
    assert not (tmp_path / "records.jsonl").exists()


def test_a_run_that_fits_no_node_is_reported(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    machine = Cluster("digits", Place(), "auto", gpus=0.5)
    with contextlib.closing(machine):
        machine.check(ray_problem.without_data(), SETUP)
    message = "no node of the cluster has 1 CPUs and 0.5 GPUs for a run; waiting for one to join\n"
    assert capsys.readouterr().err == message
