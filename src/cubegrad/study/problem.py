"""What a problem is: a `Problem` names it and builds a `Task`, which is one run's model and data.

A problem of your own is a function without arguments that returns a `Problem`:

    def build(setup: Setup) -> Task:
        inputs, targets = my_data(setup.data, hold_out=setup.hold_out)
        model = MyModel().to(setup.device)           # torch is seeded with setup.seed before

        def batches(epoch: int) -> Iterator[Any]:    # depends on (seed, epoch) only
            generator = torch.Generator().manual_seed(1000 * setup.seed + epoch)
            for index in torch.randperm(len(inputs), generator=generator).split(setup.preset.batch):
                yield inputs[index], targets[index]

        return Task(model, batches, loss, evaluate, steps_per_epoch=...)

    def my_problem() -> Problem:
        return Problem("mine", "my net on my data", build, {"cpu": Preset(epochs=5, batch=64)},
                       metric="accuracy", higher_is_better=True)

`cubegrad compare my_module:my_problem` then searches learning rates for it and reports.
"""

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Split = Literal["train", "valid", "test"]


PAPER_METHODS = ("madgrad", "sgd", "adam", "adagrad")
DEFAULT_METHODS = ("madgrad", "sgd", "adam", "adamw", "adagrad")
# AdamW multiplies its decay by the learning rate, so it takes larger ones; 0.01 is torch's default.
# Other methods with decoupled decay take AdamW's.
OWN_DECAYS: Mapping[str, tuple[float, ...]] = {"adamw": (0.0, 0.01)}


class StudyError(Exception):
    """An error that the user can fix. Its message is one line: what is wrong, and the remedy."""


def check_name(name: object, what: str) -> None:
    """Names of problems and presets become file names, which must work on any system."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name != name.strip()
        or name.startswith(".")
        or set(name) & set('/\\:*?"<>|')
        or not 0 < len(name.encode()) <= 100
    ):
        raise StudyError(
            f"the name {name!r} of a {what} must be 1 to 100 characters valid in a file name, "
            'not starting with "."; use letters, digits, "-" and "_"'
        )


def optional(module: str, extra: str = "problems") -> Any:
    """Import a library that only some problems or methods need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise StudyError(missing(error.name or module, extra)) from None


def missing(package: str, extra: str) -> str:
    """The message for a package that is not installed: cubegrad is installed from its clone."""
    return f"{package} is missing; run pip install '.[{extra}]' in your clone of cubegrad"


@dataclass(frozen=True)
class Preset:
    """One size of a problem: length, methods, options, and where the search starts."""

    epochs: int
    batch: int
    schedule: str = "flat"  # see cubegrad.study.schedules
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: int = 5  # for each method's best setting
    decays: tuple[float, ...] = (0.0,)
    # By method, instead of `decays`.
    own_decays: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: dict(OWN_DECAYS))
    # By method, the range of the first grid of learning rates, which the search widens as needed.
    lrs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    grid: str = "1,2.5,5"
    threads: int = 1  # per run on a CPU, however many run at once: sums then round alike
    size: str = ""  # model and parameters in a few words, for `cubegrad problems`
    options: Mapping[str, Any] = field(default_factory=dict)  # anything else `build` needs

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "seeds", "threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise StudyError(f"{name}={value!r} of a Preset must be an int >= 1; use 1")
        by_method = [*self.own_decays.values(), *self.lrs.values()]
        numbers = [*self.decays, *itertools.chain(*by_method)]
        wrong = [x for x in numbers if not isinstance(x, (int, float)) or not 0 <= x < math.inf]
        if wrong or not self.decays or not all(by_method):
            raise StudyError(
                f"decays={self.decays!r}, own_decays={dict(self.own_decays)!r} and "
                f"lrs={dict(self.lrs)!r} of a Preset must be finite floats >= 0, and at least one "
                "decay; use (0.0,)"
            )


@dataclass(frozen=True)
class Setup:
    """The arguments of `Problem.build`, for one run."""

    preset: Preset
    seed: int
    device: torch.device
    data: Path  # the folder of data sets
    hold_out: bool = False  # keep part of the training set as the split "valid"
    download: bool = False  # may fetch data


@dataclass
class Task:
    """One run's model and data.

    Torch's global generator is seeded from (seed, epoch) before each epoch, so a resumed run gives
    the same numbers if `batches` depends on the epoch alone.
    """

    model: nn.Module
    batches: Callable[[int], Iterable[Any]]  # of an epoch, counted from 0
    loss: Callable[[nn.Module, Any], Tensor]  # mean over the batch; autocast belongs in here
    evaluate: Callable[[nn.Module, Split], dict[str, float]]  # "test", and "valid" if held out
    steps_per_epoch: int  # between two evaluations
    # Replaces zero_grad, loss, backward, step, for loss scaling, clipping, graphs. Returns the
    # detached loss.
    step: Callable[[Optimizer, Any], Tensor] | None = None
    # Further state of `step`, such as a GradScaler, by name; saved in checkpoints.
    keeps: Mapping[str, Any] = field(default_factory=dict)
    # A checksum of the weights that a run begins with, if the seed does not make them. Runs that
    # began with others cannot be compared, and a report says so.
    start: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.start, str):
            raise StudyError(f"start={self.start!r:.60} of a Task must be text; use str(...) of it")


@dataclass(frozen=True)
class Problem:
    name: str
    description: str
    build: Callable[[Setup], Task]
    presets: Mapping[str, Preset]  # "cpu", "gpu" and "paper", or some of them
    metric: str = "loss"  # a key of what `Task.evaluate` returns; ties go to the lower "loss"
    higher_is_better: bool = False
    unit: str = ""  # of the metric: "%"
    beside: tuple[str, ...] = ()  # further metrics for the tables
    data: str = "none"  # where the data comes from, for `cubegrad problems`
    paper: str = ""  # its key in cubegrad.study.methods.PAPER
    check_data: Callable[[Setup], None] | None = None  # raises StudyError, before any run

    def __post_init__(self) -> None:
        check_name(self.name, "problem")
        for preset in self.presets:
            check_name(preset, "preset")
        for text in (self.metric, self.unit, self.paper, *self.beside):
            if not isinstance(text, str) or not text.isprintable():
                raise StudyError(
                    f"problem {self.name!r} has the metric or unit {text!r}; use plain text"
                )
        if not isinstance(self.description, str) or not isinstance(self.higher_is_better, bool):
            raise StudyError(
                f"problem {self.name!r} has description={self.description!r} and higher_is_better="
                f"{self.higher_is_better!r}; use a str and a bool"
            )
