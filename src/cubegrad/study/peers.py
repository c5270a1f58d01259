"""Other people's optimizers without a learning rate or schedule, with their authors' settings.

The packages are those of the extra `peers`, imported when a method is used. Where a README leaves
a choice, docs/study.md says what is used. `lr="auto"` is the factor 1, as for cubegrad's own.
"""

import contextlib
import importlib.util
import itertools
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from cubegrad.study.dog import DoG
from cubegrad.study.problem import StudyError, Task, missing, optional

NORM_BATCHES = 50  # as in schedulefree's README

Params = Iterable[Tensor]
Rate = float | Literal["auto"]


def from_package(package: str, name: str, params: Params, lr: Rate, **options: Any) -> Optimizer:
    make = getattr(optional(package, "peers"), name)
    # Prodigy prints a line about its weight decay.
    with contextlib.redirect_stdout(None):
        optimizer: Optimizer = make(params, lr=1.0 if lr == "auto" else lr, **options)
    return optimizer


def prodigy(params: Params, lr: Rate, weight_decay: float, warm_up: bool) -> Optimizer:
    options = {"weight_decay": weight_decay, "safeguard_warmup": warm_up}
    return from_package("prodigyopt", "Prodigy", params, lr, **options)


def dog(
    params: Params, lr: Rate, weight_decay: float, batch_norm: bool, layerwise: bool = False
) -> Optimizer:
    factor, first = 1.0 if lr == "auto" else lr, 1e-4 if batch_norm else 1e-6
    return DoG(params, factor, weight_decay, first, layerwise)


def check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise StudyError(missing(package, "peers"))


def estimated_lr(optimizer: Optimizer) -> float:
    """Before the factor. Prodigy and D-Adaptation keep theirs in their groups."""
    if hasattr(optimizer, "estimated_lr"):
        return float(optimizer.estimated_lr())
    return float(optimizer.param_groups[0]["d"])


def begin_training(optimizer: Optimizer, task: Task) -> None:
    """Also takes out the average, if the optimizer evaluates at one."""
    task.model.train()
    if hasattr(optimizer, "train"):
        optimizer.train()


def begin_evaluation(optimizer: Optimizer, task: Task, epoch: int) -> None:
    """Put in the average, if the optimizer evaluates at one.

    The running statistics of batch norm are those of the training weights, so they are computed
    anew from the first batches of the epoch.
    """
    if hasattr(optimizer, "eval"):
        optimizer.eval()
        if has_batch_norm(task.model):
            with torch.no_grad():
                for batch in itertools.islice(task.batches(epoch), NORM_BATCHES):
                    task.loss(task.model, batch)
    task.model.eval()


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())
