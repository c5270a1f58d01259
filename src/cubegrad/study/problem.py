"""What a problem is: a `Problem` names it and builds a `Task`, which is one run's model and data.

A problem of your own is a function without arguments that returns a `Problem`:

    def build(setup: Setup) -> Task:
        inputs, targets = my_data(setup.data, hold_out=setup.hold_out)
        model = MyModel().to(setup.device)           # torch is seeded with setup.seed before

        def batches(epoch: int) -> Iterator[Any]:    # the same batches whenever it is asked
            generator = torch.Generator().manual_seed(1000 * setup.seed + epoch)
            for index in torch.randperm(len(inputs), generator=generator).split(setup.preset.batch):
                yield inputs[index], targets[index]

        return Task(model, batches, loss, evaluate, steps_per_epoch=...)

    def my_problem() -> Problem:
        return Problem("mine", "my net on my data", build, {"cpu": Preset(epochs=5, batch=64)},
                       metric="accuracy", higher_is_better=True)

`cubegrad compare my_module:my_problem` then finds learning rates for it and reports.
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


class StudyError(Exception):
    """What a user can mend. Its message is one line: what is wrong, and the remedy."""


def check_name(name: object, what: str) -> None:
    """Names of problems and presets become names of files and folders, on any system."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or name != name.strip()
        or name.startswith(".")
        or set(name) & set('/\\:*?"<>|')
        or not 0 < len(name.encode()) <= 100
    ):
        raise StudyError(
            f"the name {name!r} of a {what} must be 1 to 100 characters that a file may be called, "
            'not starting with "."; use letters, digits, "-" and "_"'
        )


def optional(module: str) -> Any:
    """A library that one problem needs and `cubegrad problems` does not."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise StudyError(f"{error.name} is missing; pip install 'cubegrad[problems]'") from None


@dataclass(frozen=True)
class Preset:
    """How long and with what a problem is run at one size, and where its search starts."""

    epochs: int
    batch: int
    schedule: str = "flat"  # see cubegrad.study.schedules
    methods: tuple[str, ...] = ("madgrad", "sgd", "adam", "adagrad")
    seeds: int = 5  # of each method's best setting
    decays: tuple[float, ...] = (0.0,)
    # By method, the ends of the first grid of learning rates; the search widens it by itself.
    lrs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    grid: str = "1,2.5,5"
    threads: int = 1  # of one run on a CPU, however many run at once: sums round alike
    size: str = ""  # for `cubegrad problems`: model and parameters, in a few words
    options: Mapping[str, Any] = field(default_factory=dict)  # whatever `build` needs beside

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "seeds", "threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise StudyError(f"{name}={value!r} of a Preset must be an int >= 1; use 1")
        numbers = [*self.decays, *itertools.chain(*self.lrs.values())]
        wrong = [x for x in numbers if not isinstance(x, (int, float)) or not 0 <= x < math.inf]
        if wrong or not self.decays:
            raise StudyError(
                f"decays={self.decays!r} and lrs={dict(self.lrs)!r} of a Preset must be "
                "finite floats >= 0, and at least one decay; use (0.0,)"
            )


@dataclass(frozen=True)
class Setup:
    """What one run is built from."""

    preset: Preset
    seed: int
    device: torch.device
    data: Path  # where data sets lie
    hold_out: bool = False  # train without a part of the training set, which is split "valid"
    download: bool = False  # data may be fetched


@dataclass
class Task:
    """One run's model and data.

    The global random state of torch is seeded from (seed, epoch) before each epoch, so a run that
    was killed goes on with the same numbers as long as `batches` depends on the epoch alone.
    """

    model: nn.Module
    batches: Callable[[int], Iterable[Any]]  # of an epoch, counted from 0
    loss: Callable[[nn.Module, Any], Tensor]  # mean over the batch; autocast belongs in here
    evaluate: Callable[[nn.Module, Split], dict[str, float]]  # "test", and "valid" if held out
    steps_per_epoch: int  # an epoch is what lies between two evaluations
    # In place of zero_grad, loss, backward, step: for loss scaling, clipping, graphs. Returns the
    # loss, detached.
    step: Callable[[Optimizer, Any], Tensor] | None = None
    # What `step` keeps beside model and optimizer, such as a GradScaler: saved in checkpoints.
    keeps: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    name: str
    description: str
    build: Callable[[Setup], Task]
    presets: Mapping[str, Preset]  # "cpu", "gpu" and "paper", or some of them
    metric: str = "loss"  # a key of what `Task.evaluate` returns; ties go to the lower "loss"
    higher_is_better: bool = False
    unit: str = ""  # of the metric: "%"
    beside: tuple[str, ...] = ()  # what else `evaluate` returns that belongs into the tables
    data: str = "none"  # where the data comes from, for `cubegrad problems`
    paper: str = ""  # its name among the paper's problems, see cubegrad.study.methods
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
