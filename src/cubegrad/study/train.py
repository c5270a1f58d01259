"""(problem, method, lr, decay, seed) -> Record. A killed run resumes from its checkpoint."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cubegrad.study import checkpoints, methods, peers, record_checks, schedules
from cubegrad.study.logs import Log
from cubegrad.study.problem import Preset, Problem, Setup, StudyError, Task
from cubegrad.study.records import ESTIMATED_LR, Record, Settings, finite, machine

RESERVED = ("train_loss", ESTIMATED_LR)  # keys of a curve that are no metrics


@dataclass(frozen=True)
class Place:
    """Where and how runs are executed: nothing here affects their results."""

    data: Path = Path("data")
    download: bool = False
    # Seconds between checkpoints, longer if saving would take more than 5 % of the time; 0 saves
    # after each epoch, however long it takes.
    save_every: float = 10.0
    logs: Path | None = None  # the folder for a text file per run


@dataclass
class _Run:
    """The state of a run that a checkpoint holds."""

    task: Task
    optimizer: Optimizer
    curve: dict[str, list[float | None]]
    seconds: float = 0.0
    epoch: int = 0
    start: str = ""  # that of the task which began the run

    def save(self, path: Path, settings: Settings) -> None:
        state = {
            "key": settings.key,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "curve": self.curve,
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "keeps": {name: kept.state_dict() for name, kept in self.task.keeps.items()},
            "start": self.start,
        }
        checkpoints.save(path, state)

    def load(self, path: Path, settings: Settings) -> None:
        """Resume from a checkpoint, if there is an intact one of these settings."""
        state = checkpoints.load(path)
        if state is None or state["key"] != settings.key:
            return
        try:
            record_checks.check_progress(state, settings.epochs)
        except ValueError as error:
            raise StudyError(
                f"{path} cannot be of this run: {error}; delete it to restart the run, "
                "or use another --out"
            ) from None
        try:
            self.task.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for name, kept in self.task.keeps.items():
                kept.load_state_dict(state["keeps"][name])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise StudyError(
                f"{path} is of another model of this name; delete it, or use another --out"
            ) from error
        self.curve, self.seconds, self.epoch = state["curve"], state["seconds"], state["epoch"]
        self.start = state.get("start", "")


def run(
    problem: Problem,
    settings: Settings,
    place: Place,
    checkpoint: Path | None = None,
    tick: Callable[[], None] = lambda: None,
    since: int = 0,
    until: int | None = None,
) -> Record:
    """Train once. `tick` is called after each epoch, those of the checkpoint included.

    A run that is cut at epoch `until` leaves its checkpoint, from which a later call goes on. That
    call gives as `since` the epochs that have been counted before.
    """
    task, optimizer = _prepare(problem, settings, place)
    schedule = schedules.parse(settings.schedule, settings.epochs, task.steps_per_epoch)
    state = _Run(task, optimizer, {"train_loss": []}, start=task.start)
    if checkpoint is not None:
        state.load(checkpoint, settings)
    end = min(until or settings.epochs, settings.epochs)
    for _ in range(since, state.epoch):
        tick()
    start = saved = time.monotonic()
    begun, pause = state.seconds, place.save_every
    log = Log(place.logs, settings)
    log.begin(state.epoch)
    while state.epoch < end and not diverged(state.curve):
        _epoch(problem, settings, state, schedule)
        now = time.monotonic()
        state.seconds = begun + now - start
        log.epoch(state.curve, state.epoch, state.seconds)
        if checkpoint is not None and now - saved >= pause:
            state.save(checkpoint, settings)
            saved = time.monotonic()
            if place.save_every:  # saving a gigabyte takes seconds
                pause = max(place.save_every, 20 * (saved - now))
        if state.epoch > since:
            tick()
    for _ in range(max(state.epoch, since), end):
        tick()
    status = "diverged" if diverged(state.curve) else "finished"
    if status == "finished" and state.epoch < settings.epochs:
        status = "cut"
        if checkpoint is not None:
            state.save(checkpoint, settings)
    log.end(status)
    seconds = round(state.seconds, 3)
    where = machine(torch.device(settings.device))
    if state.start:
        where["start"] = state.start
    return Record(settings, status, state.curve, seconds, about(problem), where)


def _prepare(problem: Problem, settings: Settings, place: Place) -> tuple[Task, Optimizer]:
    preset = preset_of(problem, settings)
    device = torch.device(settings.device)
    torch.set_num_threads(preset.threads)
    torch.manual_seed(settings.seed)
    setup = Setup(preset, settings.seed, device, place.data, settings.hold_out, place.download)
    task = problem.build(setup)
    optimizer = methods.make(
        settings.method,
        [param for param in task.model.parameters() if param.requires_grad],
        settings.lr,
        settings.decay,
        schedules.warms_up(settings.schedule),
        peers.has_batch_norm(task.model),
    )
    return task, optimizer


def seconds_per_epoch(problem: Problem, settings: Settings, place: Place) -> float:
    """Estimated from the steps of a second after the first one; without evaluation."""
    task, optimizer = _prepare(problem, settings, place)
    peers.begin_training(optimizer, task)
    start, after_first = time.monotonic(), 0
    for after_first, batch in enumerate(task.batches(0)):
        _step(task, optimizer, batch).item()  # waits for the device
        if not after_first and task.steps_per_epoch > 1:
            start = time.monotonic()  # the first step allocates and compiles
        elif time.monotonic() - start > 1:
            break
    return (time.monotonic() - start) / max(after_first, 1) * task.steps_per_epoch


def about(problem: Problem) -> dict[str, Any]:
    """What a report needs to know about the problem."""
    names = ("description", "metric", "higher_is_better", "unit", "paper")
    return {name: getattr(problem, name) for name in names} | {"beside": list(problem.beside)}


def preset_of(problem: Problem, settings: Settings) -> Preset:
    """The preset with the settings' epochs and batch, which command-line options may override."""
    preset = problem.presets[settings.preset]
    return replace(preset, epochs=settings.epochs, batch=settings.batch)


def diverged(curve: dict[str, list[float | None]]) -> bool:
    """Whether the last epoch has a value that is not finite."""
    return any(bool(values) and values[-1] is None for values in curve.values())


def _epoch(problem: Problem, settings: Settings, run: _Run, schedule: schedules.Schedule) -> None:
    """Train for one epoch, evaluate, and add both to the curve."""
    task, optimizer = run.task, run.optimizer
    # Dropout and augmentation then depend on (seed, epoch) alone, also in a resumed run.
    torch.manual_seed(settings.seed * 1_000_003 + run.epoch + 1)
    peers.begin_training(optimizer, task)
    total: Tensor | None = None
    first, count = run.epoch * task.steps_per_epoch, 0
    for batch in task.batches(run.epoch):
        set_lr(optimizer, settings.lr * schedule(first + count))
        loss = _step(task, optimizer, batch)
        # Summed on the device: reading each loss would make the host wait for every step.
        total = loss.double() if total is None else total + loss
        count += 1
    if total is None or count != task.steps_per_epoch:
        raise StudyError(
            f"problem {problem.name!r} has {count} batches in epoch {run.epoch} and "
            f"steps_per_epoch={task.steps_per_epoch}; the two must be equal and >= 1"
        )
    train_loss = total.item() / count
    run.curve["train_loss"].append(finite(train_loss))
    if methods.estimates(settings.method):  # read once an epoch, as it makes the host wait
        run.curve.setdefault(ESTIMATED_LR, []).append(finite(peers.estimated_lr(optimizer)))
    run.epoch += 1
    if not math.isfinite(train_loss):
        return
    peers.begin_evaluation(optimizer, task, run.epoch - 1)
    for name, value in _evaluate(problem, settings, task).items():
        run.curve.setdefault(name, []).append(finite(value))


def _evaluate(problem: Problem, settings: Settings, task: Task) -> dict[str, float]:
    with torch.no_grad():
        metrics = task.evaluate(task.model, "valid" if settings.hold_out else "test")
    who = f"evaluate of problem {problem.name!r} returns"
    if not isinstance(metrics, Mapping):
        raise StudyError(f'{who} {metrics!r:.60}; return a dict such as {{"loss": 0.5}}')
    if problem.metric not in metrics:
        raise StudyError(
            f"problem {problem.name!r} is judged by {problem.metric!r} and its evaluate returns "
            f"{', '.join(map(str, metrics)) or 'nothing'}; return it too, or name another metric"
        )
    for name in metrics:
        if not isinstance(name, str) or not name.isprintable() or name in RESERVED:
            raise StudyError(
                f"{who} a metric named {name!r}; use plain text other than {' and '.join(RESERVED)}"
            )
    return {name: _number(value, f"{who} {name}") for name, value in metrics.items()}


def _number(value: Any, what: str) -> float:
    """Accepts any real number, also numpy's, and a tensor or array with one element."""
    try:
        one = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):  # several elements
        one = None
    if not isinstance(one, Real):
        raise StudyError(f"{what} = {value!r:.60}; return a real number")
    try:
        return float(one)
    except OverflowError:  # an int of 400 digits
        return math.inf


def _step(task: Task, optimizer: Optimizer, batch: Any) -> Tensor:
    """One update; returns the detached loss."""
    if task.step:
        return _scalar(task.step(optimizer, batch), "step")
    optimizer.zero_grad()
    loss = _scalar(task.loss(task.model, batch), "loss")
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def _scalar(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    is_tensor = isinstance(value, Tensor)
    found = f"a tensor of shape {tuple(value.shape)}" if is_tensor else f"{value!r:.60}"
    raise StudyError(f"Task.{name} returns {found}; return the mean loss, a tensor of one element")


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)  # in place: a captured graph reads this tensor
        else:
            group["lr"] = lr
