"""One JSON line per run in RUNS_DIR/records.jsonl: settings, curve, versions, commit, machine.

A line is written in one piece, synced, and carries a checksum. Reading the file detects torn or
altered lines; they are reported and set aside, and their runs are repeated.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import cubegrad
from cubegrad.study import checkpoints, record_checks
from cubegrad.study.files import append, replacing, writing
from cubegrad.study.problem import StudyError

try:
    import fcntl
except ImportError:  # Windows: nothing then stops two sweeps from sharing a directory
    fcntl = None  # type: ignore[assignment]

# A key of a run's curve: as a field of Record it would invalidate the checksums of old records.
ESTIMATED_LR = "estimated_lr"  # before schedule and factor


@dataclass(frozen=True)
class Settings:
    """Everything that determines the results of a run; `key` is a hash of it."""

    problem: str
    preset: str
    epochs: int
    batch: int
    method: str
    schedule: str
    lr: float
    decay: float
    seed: int
    hold_out: bool = False
    device: str = "cpu"
    options: str = "{}"  # the preset's, as JSON

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def entry(self) -> str:
        return f"{self.method}@{self.schedule}"


@dataclass(frozen=True)
class Record:
    settings: Settings
    # "finished", "diverged", or "cut": stopped early by a search, so no result to report.
    status: str
    # By epoch: "train_loss", the metrics and ESTIMATED_LR; None: not finite.
    curve: dict[str, list[float | None]]
    seconds: float
    about: dict[str, Any] = field(default_factory=dict)  # the problem's metric, unit, description
    # Kind, versions, commit, date; "start": the task's, if it has one.
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"

    @property
    def cut(self) -> bool:
        return self.status == "cut"

    @property
    def epochs(self) -> int:
        """How many were trained."""
        return len(self.curve["train_loss"])

    def last(self, metric: str) -> float | None:
        """The metric after the last epoch; None for a run that diverged."""
        values = self.curve.get(metric)
        return None if self.diverged or not values else values[-1]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def to_line(record: Record) -> str:
    body = {"key": record.settings.key, **asdict(record)}
    return json.dumps({**body, "check": _checksum(body)}, allow_nan=False) + "\n"


def from_line(line: str) -> Record:
    """Raises ValueError for a line that `to_line` did not write."""
    try:
        body = json.loads(line)
        check, key = body.pop("check"), body["key"]
        _refuse_unknown(body["settings"], Settings)
        _refuse_unknown(body, Record, "key")
        settings = Settings(**body.pop("settings"))
        record = Record(settings=settings, **{k: v for k, v in body.items() if k != "key"})
        intact = check == _checksum({"key": key, **asdict(record)}) and key == settings.key
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a record: {error}") from None
    if not intact:
        raise ValueError("altered: its checksum does not match")
    record_checks.check(record)
    return record


def _refuse_unknown(values: dict[str, Any], kind: type[Record | Settings], *more: str) -> None:
    unknown = values.keys() - {field.name for field in fields(kind)} - {*more}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}; another version of cubegrad wrote it")


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


class Runs:
    """A directory of runs: records, and the checkpoints of unfinished runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "records.jsonl"

    def checkpoint(self, settings: Settings) -> Path:
        return self.folder / "checkpoints" / f"{settings.key}.pt"

    def load(self) -> tuple[dict[str, Record], list[str]]:
        """Records of whole runs by key, and what is wrong with each broken line."""
        records, broken = self._parse()
        return {record.settings.key: record for record in records if not record.cut}, broken

    def cut(self) -> dict[str, Record]:
        """By key, runs that a search has stopped early; those that went on later are not here."""
        records, _ = self._parse()
        whole = {record.settings.key for record in records if not record.cut}
        longest: dict[str, Record] = {}
        for record in sorted(records, key=lambda record: record.epochs):
            if record.settings.key not in whole:
                longest[record.settings.key] = record
        return longest

    def _parse(self) -> tuple[list[Record], list[str]]:
        records, broken = [], []
        for number, line in enumerate(self._lines(), 1):
            try:
                records.append(from_line(line))
            except ValueError as error:
                broken.append(f"{self.path} line {number} is broken ({error})")
        return records, broken

    def repair(self) -> list[str]:
        """Move broken lines to records.broken and complete the last line; returns messages.

        Also deletes temporary files that a killed process left and the checkpoints of finished
        runs, and reports damaged checkpoints.
        """
        lines, (records, broken) = self._lines(), self._parse()
        if broken:
            moved = "".join(f"{line}\n" for line in lines if not _is_valid(line))
            append(self.folder / "records.broken", moved.encode())
            with replacing(self.path) as file:
                file.writelines(to_line(record).encode() for record in records)
        elif lines and not self.path.read_bytes().endswith(b"\n"):  # only the newline is missing
            append(self.path, b"\n")
        messages = [f"{line}: set aside, and its run is repeated" for line in broken]
        return messages + self._repair_checkpoints()

    def _repair_checkpoints(self) -> list[str]:
        messages = []
        records, _ = self.load()
        folder = self.folder / "checkpoints"
        with writing(folder):
            self.remove_drafts()
            for path in folder.glob("*.pt"):
                if path.stem in records:
                    path.unlink()
                elif damage := checkpoints.damage(path):
                    messages.append(f"{path} is damaged ({damage}): its run starts again")
        return messages

    def remove_drafts(self) -> None:
        """Delete the temporary files that killed processes left."""
        drafts = [*self.folder.glob("records.tmp*"), *self.folder.glob("checkpoints/*.tmp*")]
        with writing(self.folder):
            for path in drafts:
                path.unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        record_checks.check(record)  # else each reading would reject it and repeat the run
        append(self.path, to_line(record).encode())
        if not record.cut:  # a cut run may go on
            self.drop_checkpoint(record.settings)

    def drop_checkpoint(self, settings: Settings) -> None:
        with writing(self.folder):
            self.checkpoint(settings).unlink(missing_ok=True)

    def log(self, command: str) -> None:
        """Add the command to the list in the report, unless it is there."""
        if command not in self.commands():
            append(self.folder / "commands.txt", f"{command}\n".encode())

    def commands(self) -> list[str]:
        return _text(self.folder / "commands.txt").splitlines()

    def _lines(self) -> list[str]:
        # Not splitlines: a torn line may hold any bytes, other line ends included.
        return [line for line in _text(self.path).split("\n") if line.strip()]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second sweep out. The system releases the lock if the process dies."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("a")
        except OSError as error:
            raise StudyError(
                f"--out {self.folder} cannot be written ({error}); use another"
            ) from None
        with lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise StudyError(
                        f"{self.folder} is in use by another run; wait for it or use another --out"
                    ) from None
            yield


def existing(folder: Path) -> Runs:
    runs = Runs(folder)
    if not runs.path.is_file():
        raise StudyError(
            f"{folder} is not a directory of runs (no records.jsonl); "
            "give the --out of a sweep or compare"
        )
    return runs


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error.strerror}); use another --out") from None


def _is_valid(line: str) -> bool:
    try:
        from_line(line)
    except ValueError:
        return False
    return True


@cache
def commit() -> str | None:
    """The commit of the git clone that cubegrad runs from; None outside a clone."""
    where = Path(__file__).parent
    command = ["git", "-C", str(where), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        tracked = ["git", "-C", str(where), "ls-files", "--error-unmatch", __file__]
        subprocess.run(tracked, capture_output=True, timeout=10, check=True)
        done = subprocess.run(command, capture_output=True, timeout=10, check=True, text=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions of this run; never names of hosts or people."""
    kind = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if device.type == "cuda":
        kind = f"{torch.cuda.get_device_name(device)}, {kind}"
    return {
        "kind": kind,
        "threads": torch.get_num_threads(),
        "cubegrad": cubegrad.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
