"""Runs on a Ray cluster: the same jobs as tasks there; records are written by the one who asked."""

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
from cubegrad.study.problem import Problem, Setup, StudyError
from cubegrad.study.processes import no_interrupts
from cubegrad.study.records import Record, Settings
from cubegrad.study.workers import Job

POLL = 0.5  # seconds between two looks at the tasks
REACH = 60  # seconds that a head may take to answer; Ray itself would try for many minutes
AGAIN = "the same command goes on where it was"


@dataclass
class Cluster:
    """Runs jobs of one problem as Ray tasks, each with `cpus` and a part of a GPU."""

    problem: str  # by name: a node has to find it again
    place: train.Place  # whose data folder is a path on every node
    address: str
    cpus: int = 1
    gpus: float = 0.0
    limit: int | None = None  # runs at a time; without, as many as the cluster has room for
    retries: int = 3  # of a run whose worker or node died
    _ray: Any = None
    _tally: Any = None
    _work: Any = None
    _asked: Any = None  # the answer of the tally that is under way

    def check(self, problem: Problem, setup: Setup) -> None:
        """Look at the data where the runs will: this machine need not have it."""
        self._connect()
        if problem.check_data is not None:
            setup = replace(setup, data=setup.data.absolute())
            name = nodes.name(self.problem)
            told = self._get(self._remote(nodes.check).remote(name, setup, cubegrad.__version__))
            if told is not None:
                raise StudyError(told)

    def run(self, jobs: Sequence[Job], tick: Callable[[int], None]) -> Iterator[Record]:
        """Records as they come; `tick` is told how many epochs have passed since the last call."""
        if jobs:
            self._connect()
            with nodes.marked(jobs[0][1].absolute().parent) as mark:
                yield from self._share(jobs, mark, tick)

    def _share(
        self, jobs: Sequence[Job], mark: str, tick: Callable[[int], None]
    ) -> Iterator[Record]:
        place = replace(self.place, data=self.place.data.absolute())
        todo, passed = deque(jobs), dict.fromkeys((job[0].key for job in jobs), 0)
        waiting: dict[Any, Settings] = {}
        name = nodes.name(self.problem)
        while todo or waiting:
            while todo and len(waiting) < (self.limit or len(jobs)):
                settings, checkpoint = todo.popleft()
                order = nodes.Order(name, settings, place, checkpoint.absolute(), mark)
                waiting[self._work.remote(order, self._tally)] = settings
            done, _ = self._ray.wait(list(waiting), timeout=POLL)
            self._look(passed, tick)
            for one in done:
                settings, record = waiting.pop(one), self._get(one)
                if isinstance(record, str):
                    raise StudyError(record)
                tick(settings.epochs - passed.pop(settings.key))
                yield record

    def close(self) -> None:
        """Stop at once: every node ends the workers of a driver that has left.

        Tasks are not cancelled first, as Ray 2.60 may abort this process where one ends meanwhile.
        """
        if self._ray is not None:
            with no_interrupts():
                self._ray.shutdown()
            self._ray = self._asked = None

    def _connect(self) -> None:
        if self._ray is not None:
            return
        ray = _import()
        address = _reach(self.address)
        with _interrupts_wait(), tempfile.TemporaryDirectory() as folder:
            luggage = nodes.pack(self.problem, Path(folder))
            self._ray = ray  # from here on there may be something to close
            try:
                ray.init(address, **_options(address, luggage))
            except ConnectionError as error:
                if address != "auto":
                    raise StudyError(f"--ray {self.address}: {_line(error)}") from None
                raise StudyError(
                    "--ray auto: no Ray cluster runs on this machine; "
                    "start one with `ray start --head`, or use --ray local"
                ) from None
            except Exception as error:  # Ray raises whatever its layers happen to
                raise StudyError(f"--ray {self.address}: {_line(error)}") from None
        self._room()
        self._tally = ray.remote(num_cpus=0, max_restarts=-1)(nodes.tally()).remote()
        self._work = self._remote(nodes.work)

    def _remote(self, function: Callable[..., Any]) -> Any:
        # Ray gives a GPU's worker one task only, and is right: its CUDA would keep to one GPU.
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": self.retries}
        return self._ray.remote(**options, retry_exceptions=False)(function)

    def _room(self) -> None:
        """A run that no node has room for would wait without a word."""
        needs = {"CPU": self.cpus, "GPU": self.gpus}
        for node in self._ray.nodes():
            has = node["Resources"]
            if node["Alive"] and all(has.get(kind, 0) >= least for kind, least in needs.items()):
                return
        lack = f"no node of the cluster has {self.cpus} CPUs and {self.gpus:g} GPUs for a run"
        if self.address == "local":
            raise StudyError(f"{lack}; use --device cpu, or the --ray of a larger cluster")
        tqdm.write(f"{lack}; waiting for one to join", file=sys.stderr)

    def _look(self, passed: dict[str, int], tick: Callable[[int], None]) -> None:
        """Ask how far the runs are, never waiting: the answer is for the next look, or lost."""
        if self._asked is None:
            self._asked = self._tally.all.remote()
        if not self._ray.wait([self._asked], timeout=0)[0]:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):  # its node died: it starts again
            for key, epochs in self._ray.get(self._asked).items():
                if epochs > passed.get(key, epochs):  # a run begun again may be behind
                    tick(epochs - passed[key])
                    passed[key] = epochs
        self._asked = None

    def _get(self, one: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(one)
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
                f"a run's worker or node died {self.retries + 1} times, perhaps for want of memory "
                f"({type(error).__name__}); {AGAIN}, with fewer --workers if it comes again"
            ) from None


def _hear(data: dict[str, Any], *_: object, **__: object) -> None:
    """In place of Ray's own report of a death: pages of a node's log, into the standard output."""
    if "retries remaining" in " ".join(data["lines"]):
        tqdm.write("the worker or node of a run died; the run begins again", file=sys.stderr)


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    try:
        import ray
    except ImportError as error:
        raise StudyError(f"{error.name} is missing; pip install 'cubegrad[ray]'") from None
    # No option has it; where a Ray calls it otherwise this changes nothing.
    ray._private.worker.print_to_stdstream = _hear
    return ray


def _options(address: str, luggage: Path | None) -> dict[str, Any]:
    """Quiet, as the progress has the terminal."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical"}
    if address == "local":
        options["include_dashboard"] = False
    if luggage is not None:
        options["runtime_env"] = {"working_dir": str(luggage)}
    return options


def _reach(address: str) -> str:
    """The address, once a head has answered there. Ray's own attempt is long and loud."""
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
    """What Ray says in place of the state of the cluster; nothing if it can tell that."""
    if address.startswith("ray://"):
        return ""  # Ray itself gives up in half a minute there, and says why
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REACH, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {REACH} s"
    if done.returncode == 0:
        return ""
    return "it asks for a token, see RAY_AUTH_MODE" if "AuthToken" in done.stderr else "not Ray's"


def _line(error: Exception) -> str:
    """What a library's error says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C comes afterwards: in the middle, Ray would lose sight of what it has started.

    So does a SIGTERM, for which Ray would set a handler of its own.
    """
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in numbers}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    for number in came[:1]:
        signal.raise_signal(number)
