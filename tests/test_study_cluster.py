"""Sweeps on a Ray cluster: a small one on this machine, whose workers are killed."""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray_problem
import torch

import cubegrad
from cubegrad.study import Setup, StudyError, cli, cluster, commands, nodes
from cubegrad.study.cluster import Cluster
from cubegrad.study.methods import Entry
from cubegrad.study.progress import Progress
from cubegrad.study.records import Runs, Settings
from cubegrad.study.sweep import Plan, Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs the extra ray", allow_module_level=True)
# Before anything imports Ray, which reads them then: its ports are open to all who have the token.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# The head ends when its input does, and so also when the tests are killed.
GUARD = """
import subprocess, sys
head = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
sys.stdin.read()
head.terminate()
head.wait()
"""
SOURCE = str(Path(cubegrad.__file__).parents[1])
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux's /proc")

NAME = "ray_problem:problem"
TOY = Plan(
    ray_problem.problem(),
    "cpu",
    ray_problem.problem().presets["cpu"],
    [Entry("madgrad", "flat"), Entry("sgd", "flat")],
    lrs=(0.01, 0.1),
    widen=0,
)
SETUP = Setup(TOY.preset, 0, torch.device("cpu"), Path())


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    """Where Ray keeps its sockets, whose names have to be shorter than pytest's folders."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_start(words: str, home: str) -> Iterator[subprocess.Popen[str]]:
    """A node on this machine, ended with the block."""
    size = "--object-store-memory=80000000"
    command = f"-m ray.scripts.scripts start --block --disable-usage-stats {size} {words}"
    node = subprocess.Popen(
        [sys.executable, "-c", GUARD, sys.executable, *command.split()],
        env={**os.environ, "RAY_TMPDIR": home, "RAY_worker_niceness": "0", "PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield node
    finally:
        node.communicate(timeout=60)  # closes its input


def said(node: subprocess.Popen[str], what: str) -> str:
    assert node.stdout is not None
    lines = []
    for line in node.stdout:
        lines.append(line)
        if what in line:
            return line
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def address(home: str) -> Iterator[str]:
    """A head with room for two runs."""
    # 127.0.0.1 would be taken for "this host", and looked for at its other address.
    where = "--node-ip-address=127.0.0.2 --port=0 --num-cpus=2 --include-dashboard=false"
    with ray_start(f"--head {where}", home) as head:
        yield said(head, "--address='").split("--address='")[1].split("'")[0]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "sleep").write_text("0")
    return folder


class Begun(NamedTuple):
    """A line of the problem's log."""

    pid: int
    task: int
    epoch: int
    module: str


def begun(data: Path) -> list[Begun]:
    try:
        lines = (data / "log").read_text().splitlines()
    except OSError:
        return []
    rows = (line.split() for line in lines)
    return [Begun(int(pid), int(task), int(epoch), module) for pid, task, epoch, module in rows]


def wait_for(what: Any, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def search(folder: Path, machine: Machine | Cluster) -> tuple[dict[str, Any], Progress]:
    """The curves of a whole sweep, each run recorded exactly once."""
    progress = Progress(StringIO())
    try:
        Sweep(TOY, Runs(folder), machine, progress).search()
    finally:
        machine.close()
    records, broken = Runs(folder).load()
    assert broken == []
    assert len((folder / "records.jsonl").read_text().splitlines()) == len(records) == 4
    return {key: record.curve for key, record in sorted(records.items())}, progress


def local(tmp_path: Path, data: Path) -> dict[str, Any]:
    (data / "sleep").write_text("0")
    (data / "together").unlink(missing_ok=True)
    return search(tmp_path / "local", Machine(NAME, Place(data)))[0]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_one(data: Path, node: int | None, over: threading.Event) -> None:
    """The first worker in its third epoch; on a given node, and then with its node."""
    while not over.wait(0.02):
        for one in begun(data):
            if one.epoch == 2 and (node is None or node == os.getsid(one.pid)):
                if node is not None:
                    os.kill(parent(one.pid), signal.SIGKILL)
                os.kill(one.pid, signal.SIGKILL)
                return


def attempts(data: Path) -> list[int]:
    """The epochs that each attempt at a run began with."""
    first: dict[tuple[int, int], int] = {}
    for one in begun(data):
        first.setdefault((one.pid, one.task), one.epoch)
        assert "working_dir_files" in one.module, "the module came with the job"
    return sorted(first.values())


@linux
@pytest.mark.parametrize("what", ["a worker", "a worker of an unshared folder", "a node"])
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
    (data / "together").write_text("3" if what == "a node" else "2")
    shared, node, over = "unshared" not in what, None, threading.Event()
    if not shared:  # as on nodes that see a folder of this name, but not this one
        monkeypatch.setattr(nodes, "marked", lambda _: contextlib.nullcontext("elsewhere"))
    with contextlib.ExitStack() as stack:
        if what == "a node":
            words = f"--address={address} --node-ip-address=127.0.0.3 --num-cpus=1"
            joined = stack.enter_context(ray_start(words, home))
            said(joined, "Ray runtime started")
            node = joined.pid
        killer = threading.Thread(target=kill_one, args=(data, node, over))
        killer.start()
        stack.callback(killer.join)
        stack.callback(over.set)
        machine = Cluster(NAME, Place(data, save_every=0.0), address)
        curves, progress = search(tmp_path / "cluster", machine)
    assert (progress.runs, progress.passed, progress.total) == (4, 16, 16)
    # Five attempts at four runs; the fifth went on from the checkpoint, if its node could see it.
    assert attempts(data) == [0, 0, 0, 0, 2 if shared else 0]
    assert not list((tmp_path / "cluster").glob("checkpoints/*"))
    out, errors = capfd.readouterr()
    assert out == ""
    assert errors == "the worker or node of a run died; the run begins again\n"
    assert curves == local(tmp_path, data)


def start(data: Path, out: Path, ray: str, home: str, sleep: float) -> subprocess.Popen[str]:
    (data / "sleep").write_text(str(sleep))
    # A shell that runs the tests in the background has its children ignore Ctrl-C.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heed + "import sys; from cubegrad.study.cli import main; sys.exit(main())"
    words = f"sweep {NAME} --lr 0.01,0.1 --widen 0 --save-every 0 --data {data} --out {out}"
    path = os.pathsep.join([str(Path(__file__).parent), SOURCE])
    return subprocess.Popen(
        [sys.executable, "-c", code, *words.split(), "--ray", ray],
        env={**os.environ, "PYTHONPATH": path, "RAY_TMPDIR": home},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def group(leader: int) -> list[int]:
    """Processes of a session that are still there."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@linux
def test_ctrl_c_stops_a_cluster_of_its_own_and_resumes(
    home: str, tmp_path: Path, data: Path
) -> None:
    process = start(data, tmp_path / "out", "local", home, sleep=0.8)
    wait_for(lambda: Runs(tmp_path / "out").load()[0])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that it started
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.strip().endswith("stopped; the same command goes on where it was")
    assert "Traceback" not in errors
    wait_for(lambda: not any(alive(one.pid) for one in begun(data)))  # none goes on computing
    wait_for(lambda: not group(process.pid))
    records, broken = Runs(tmp_path / "out").load()
    assert 1 <= len(records) < 4
    assert broken == []
    before = {key: record.curve for key, record in records.items()}
    (data / "sleep").write_text("0")
    after, _ = search(tmp_path / "out", Machine(NAME, Place(data)))
    assert {key: after[key] for key in before} == before
    assert after == local(tmp_path, data)


@linux
def test_a_killed_driver_leaves_no_worker_computing(
    address: str, home: str, tmp_path: Path, data: Path
) -> None:
    process = start(data, tmp_path / "out", address, home, sleep=0.4)
    wait_for(lambda: len({one.pid for one in begun(data)}) == 2)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(one.pid) for one in begun(data)))
    assert len(Runs(tmp_path / "out").load()[0]) < 4
    (data / "sleep").write_text("0")
    Runs(tmp_path / "out").repair()
    curves, _ = search(tmp_path / "out", Cluster(NAME, Place(data), address))
    assert curves == local(tmp_path, data)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("study-error", r"^the data is odd; use other data$"),
        (
            "die",
            r"worker or node died 2 times, perhaps for .* \(WorkerCrashedError\); ",
        ),
        ("", r"^no sleep in data; put it there$"),
    ],
)
def test_what_goes_wrong_on_a_node_is_one_line(
    fault: str, line: str, address: str, tmp_path: Path, data: Path
) -> None:
    if fault:
        (data / fault).touch()
    else:
        (data / "sleep").unlink()
    machine = Cluster(NAME, Place(data), address, limit=1, retries=1)

    def doing() -> None:
        with contextlib.closing(machine):
            machine.check(TOY.problem, replace(SETUP, data=data))
            Sweep(TOY, Runs(tmp_path), machine, Progress(StringIO())).search()

    with pytest.raises(StudyError, match=line) as caught:
        doing()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "records.jsonl").exists()


def test_a_bug_shows_where_it_is(address: str, tmp_path: Path, data: Path) -> None:
    (data / "bug").touch()
    machine = Cluster(NAME, Place(data), address, limit=1)
    with pytest.raises(ZeroDivisionError, match=r"ray_problem\.py"):
        search(tmp_path, machine)


def test_a_run_that_fits_no_node_is_told_of(
    address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    machine = Cluster("digits", Place(), "auto", gpus=0.5)
    with contextlib.closing(machine):
        machine.check(ray_problem.without_data(), SETUP)
    told = "no node of the cluster has 1 CPUs and 0.5 GPUs for a run; waiting for one to join\n"
    assert capsys.readouterr().err == told


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status: object = cli.main(words.split())
    except SystemExit as ended:
        status = ended.code
    out, errors = capsys.readouterr()
    assert (status, out, errors.count("\n")) == (2, "", 1)
    return errors


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


def test_a_server_that_is_not_ray_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_listens", lambda _: True)
    monkeypatch.setattr(cluster, "REACH", 1)
    assert "no Ray cluster is reached there" in refused("sweep digits --ray 127.0.0.2:9", capsys)


def test_a_missing_ray_is_told_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refused("sweep digits --ray local", capsys)
    assert line == "cubegrad: error: ray is missing; pip install 'cubegrad[ray]'\n"


@pytest.mark.parametrize(
    ("words", "cpus", "gpus", "limit"),
    [
        ("", 1, 0.0, None),
        ("--device cuda", 1, 1.0, None),
        ("--device cuda --gpus-per-run 0.25 --workers 8", 1, 0.25, 8),
    ],
)
def test_a_runs_share_of_a_node(words: str, cpus: int, gpus: float, limit: int | None) -> None:
    """Also that this machine needs no GPU of its own to ask for some."""
    options = cli.parser().parse_args(["sweep", "digits", "--ray", "auto", *words.split()])
    machine = commands._executor(options, commands._plan(options))
    assert isinstance(machine, Cluster)
    assert (machine.cpus, machine.gpus, machine.limit) == (cpus, gpus, limit)
    assert machine.retries == 3


def test_only_python_travels_with_a_problem_of_ones_own(
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


def test_of_a_plain_folder_python_files_travel(
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


def test_a_node_with_another_version_is_told_of() -> None:
    settings = Settings("toy", "cpu", 4, 16, "sgd", "flat", 0.1, 0.0, 0)
    order = nodes.Order(NAME, settings, Place(), Path("one.pt"), "", version="9.9")
    told = nodes.work(order, None)
    assert isinstance(told, str)
    assert "and the sweep is of 9.9; install the same on every node" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about nodes without a GPU")
def test_a_node_whose_torch_sees_no_gpu_is_told_of() -> None:
    settings = Settings("toy", "cpu", 4, 16, "sgd", "flat", 0.1, 0.0, 0, device="cuda")
    told = nodes.work(nodes.Order(NAME, settings, Place(), Path("one.pt"), ""), None)
    assert told == "torch sees no GPU on a node that has one; install a torch with CUDA there"


def test_a_gpu_that_is_too_small_is_told_of(data: Path, tmp_path: Path) -> None:
    (data / "full").touch()
    settings = Settings("toy", "cpu", 4, 16, "sgd", "flat", 0.1, 0.0, 0)
    told = nodes.work(nodes.Order(NAME, settings, Place(data), Path("one.pt"), ""), None)
    assert isinstance(told, str)
    assert "too little memory" in told
    assert "more --gpus-per-run" in told
    with pytest.raises(StudyError, match=r"^2 runs at a time are too many for the GPU's memory; "):
        search(tmp_path / "out", Machine(NAME, Place(data), workers=2))


def test_only_the_very_folder_counts_as_shared(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with nodes.marked(one) as mark, nodes.marked(other):
        assert nodes.sees(one, mark)
        assert not nodes.sees(other, mark)
        assert not nodes.sees(tmp_path / "none", mark)
    assert not nodes.sees(one, mark)
    assert not list(one.iterdir())
