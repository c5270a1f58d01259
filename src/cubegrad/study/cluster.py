"""Runs on a Ray cluster: each job is a task; this process writes the records."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import cubegrad
from cubegrad.study import nodes, train
from cubegrad.study.problem import Problem, Setup, StudyError, missing
from cubegrad.study.processes import no_interrupts
from cubegrad.study.records import Record
from cubegrad.study.workers import Job

POLL = 0.5  # seconds between two checks of the tasks
REACH = 60  # seconds to wait for the head's answer; Ray itself would try for many minutes


@dataclass
class Cluster:
    """Runs jobs of one problem as Ray tasks, each with `cpus` CPUs and `gpus` GPUs."""

    problem: str  # by name: nodes import it
    place: train.Place  # its data folder is a path on every node
    address: str
    cpus: int = 1
    gpus: float = 0.0  # may be a fraction
    limit: int | None = None  # parallel runs; None: as many as the cluster has room for
    retries: int = 3  # of a run whose worker or node dies
    _ray: Any = None
    _counter: Any = None  # the actor that counts epochs
    _work: Any = None
    _counts: Any = None  # the future of the counter's next answer

    def check(self, problem: Problem, setup: Setup) -> None:
        """Check the data on a node: this machine need not have it."""
        self._connect()
        if problem.check_data is not None:
            setup = replace(setup, data=setup.data.absolute())
            name = nodes.name(self.problem)
            error = self._get(self._remote(nodes.check).remote(name, setup, cubegrad.__version__))
            if error is not None:
                raise StudyError(error)

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        """Yield records as runs finish; `tick` gets the number of epochs since its last call."""
        if jobs:
            self._connect()
            with nodes.marker(jobs[0][1].absolute().parent) as marker:
                yield from self._run_tasks(jobs, marker, tick)

    def _run_tasks(
        self, jobs: Sequence[Job], marker: str, tick: Callable[[int], None]
    ) -> Iterator[Record]:
        todo, passed = deque(jobs), dict.fromkeys((job[0].key for job in jobs), 0)
        waiting: dict[Any, Job] = {}
        while todo or waiting:
            while todo and len(waiting) < (self.limit or len(jobs)):
                job = todo.popleft()
                waiting[self._work.remote(self._order(job, marker), self._counter)] = job
            done, _ = self._ray.wait(list(waiting), timeout=POLL)
            self._update_progress(passed, tick)
            for task in done:
                job, record = waiting.pop(task), self._get(task)
                if isinstance(record, str):
                    raise StudyError(record)
                tick(job.epochs - passed.pop(job.settings.key))
                yield record

    def _order(self, job: Job, marker: str) -> nodes.Order:
        logs = self.place.logs and self.place.logs.absolute()
        place = replace(self.place, data=self.place.data.absolute(), logs=logs)
        job = job._replace(checkpoint=job.checkpoint.absolute())
        return nodes.Order(nodes.name(self.problem), job, place, marker)

    def close(self) -> None:
        """Stop at once: nodes end the workers of a driver that disconnects.

        Tasks are not cancelled first: Ray 2.60 may abort this process if one ends meanwhile.
        """
        if self._ray is not None:
            with no_interrupts():
                self._ray.shutdown()
            self._ray = self._counts = None

    def _connect(self) -> None:
        if self._ray is not None:
            return
        ray = _import()
        address = _check_address(self.address)
        with _delayed_interrupts(), tempfile.TemporaryDirectory() as folder:
            code = nodes.pack(self.problem, Path(folder))
            self._ray = ray  # before init: if that fails, `close` still shuts Ray down
            try:
                ray.init(address, **_options(address, code))
            except ConnectionError as error:
                if address != "auto":
                    raise StudyError(f"--ray {self.address}: {_line(error)}") from None
                raise StudyError(
                    "--ray auto: no Ray cluster runs on this machine; "
                    "start one with `ray start --head`, or use --ray local"
                ) from None
            except Exception as error:  # Ray does not document which errors it raises
                raise StudyError(f"--ray {self.address}: {_line(error)}") from None
        self._check_resources()
        self._counter = ray.remote(num_cpus=0, max_restarts=-1)(nodes.epoch_counter()).remote()
        self._work = self._remote(nodes.work)

    def _remote(self, function: Callable[..., Any]) -> Any:
        # Ray starts a new worker for each GPU task: a process's CUDA context stays on one GPU.
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": self.retries}
        return self._ray.remote(**options, retry_exceptions=False)(function)

    def _check_resources(self) -> None:
        """Warn if no node has room for a run: Ray would wait silently."""
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        for node in self._ray.nodes():
            has = node["Resources"]
            if node["Alive"] and all(has.get(kind, 0) >= least for kind, least in needs.items()):
                return
        lack = f"no node of the cluster has {self.cpus} CPUs and {self.gpus:g} GPUs for a run"
        if self.address == "local":
            raise StudyError(f"{lack}; use --device cpu, or the --ray of a larger cluster")
        tqdm.write(f"{lack}; waiting for one to join", file=sys.stderr)

    def _update_progress(self, passed: dict[str, int], tick: Callable[[int], None]) -> None:
        """Ask for the epoch counts without waiting; a late answer is read on the next call."""
        if self._counts is None:
            self._counts = self._counter.all.remote()
        if not self._ray.wait([self._counts], timeout=0)[0]:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):  # its node died: Ray restarts it
            for key, epochs in self._ray.get(self._counts).items():
                if epochs > passed.get(key, epochs):  # a restarted run may be behind
                    tick(epochs - passed[key])
                    passed[key] = epochs
        self._counts = None

    def _get(self, task: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(task)
        except errors.RayTaskError as error:
            if "No module named 'cubegrad" in str(error):
                raise StudyError(
                    f"a node has no cubegrad {cubegrad.__version__}; pip install it on every node"
                ) from None
            raise
        except errors.RuntimeEnvSetupError as error:
            raise StudyError(f"a node cannot unpack {self.problem}: {_line(error)}") from None
        except errors.RayError as error:
            raise StudyError(
                f"a run's worker or node died {self.retries + 1} times, perhaps out of memory "
                f"({type(error).__name__}); run the same command again to resume, with fewer "
                "--workers if it happens again"
            ) from None


def _report_retry(data: dict[str, Any], *_: object, **__: object) -> None:
    """Replaces Ray's own report, which prints pages of a node's log to stdout."""
    if "retries remaining" in " ".join(data["lines"]):
        tqdm.write("the worker or node of a run died; the run is restarted", file=sys.stderr)


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for --ray local
    try:
        import ray
    except ImportError as error:
        raise StudyError(missing(error.name or "ray", "ray")) from None
    # There is no option for it; if another version of Ray renames it, this has no effect.
    ray._private.worker.print_to_stdstream = _report_retry
    return ray


def _options(address: str, code: Path | None) -> dict[str, Any]:
    """Quiet: the terminal shows our progress."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical"}
    if address == "local":
        options["include_dashboard"] = False
    if code is not None:
        options["runtime_env"] = {"working_dir": str(code)}
    return options


def _check_address(address: str) -> str:
    """Return the address once a head has answered. Ray's own attempt is slow and noisy."""
    if address == "auto" and os.environ.get("RAY_ADDRESS"):
        address = os.environ["RAY_ADDRESS"]
    if address in ("local", "auto"):
        return address
    fault = _fault(address) if _listens(address.removeprefix("ray://")) else "no answer"
    if fault:
        raise StudyError(
            f"--ray {address}: no Ray cluster is reached there ({fault}); "
            "use host:6379 of `ray start --head`, ray://host:10001, auto, or local"
        )
    return address


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _fault(address: str) -> str:
    """Why `ray status` fails at this address; empty if it succeeds."""
    if address.startswith("ray://"):
        return ""  # there Ray itself gives up after half a minute, and says why
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REACH, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {REACH} s"
    if done.returncode == 0:
        return ""
    return "it requires a token, see RAY_AUTH_MODE" if "AuthToken" in done.stderr else "not Ray"


def _line(error: Exception) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Deliver Ctrl-C and SIGTERM afterwards.

    Ctrl-C during its start makes Ray lose track of the processes it has started, and Ray would
    install its own handler for SIGTERM.
    """
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _: received.append(number)) for n in numbers}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    for number in received[:1]:
        signal.raise_signal(number)
