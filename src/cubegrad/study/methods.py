"""The compared optimizers, and the paper's settings and results, as data."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import cubegrad
from cubegrad import family
from cubegrad.study import peers, schedules
from cubegrad.study.problem import Preset, StudyError

Make = Callable[..., Optimizer]


class Method(NamedTuple):
    label: str
    make: Make  # (params, lr=, weight_decay=)
    lrs: tuple[float, float]  # range of the first grid, unless the preset has its own
    estimates: bool = False  # estimates its learning rate; `lr` is a factor of the estimate
    schedule: str = ""  # the one its authors recommend, instead of the preset's
    wants: tuple[str, ...] = ()  # further arguments of `make`, of those that `make` below has
    package: str = ""  # of the extra `peers`
    like: str = ""  # takes this method's learning rates from presets that have none for it
    decoupled: bool = False  # decay is multiplied by the learning rate, so AdamW's decays apply


METHODS: dict[str, Method] = {
    "madgrad": Method("MADGRAD", cubegrad.MADGRAD, (1e-4, 1e-2)),
    "madgrad-auto": Method("MADGRAD, lr auto", cubegrad.MADGRAD, (1.0, 1.0), estimates=True),
    "madgrad-decoupled": Method(
        "MADGRAD, decoupled decay",
        partial(cubegrad.MADGRAD, decoupled_weight_decay=True),
        (1e-4, 1e-2),
        like="madgrad",
        decoupled=True,
    ),
    "mirror-madgrad": Method("MirrorMADGRAD", cubegrad.MirrorMADGRAD, (1e-4, 1e-2), like="madgrad"),
    "madgrad-compact": Method(
        "MADGRAD, compact", partial(cubegrad.MADGRAD, compact=True), (1e-4, 1e-2), like="madgrad"
    ),
    "madgrad-auto-compact": Method(
        "MADGRAD, lr auto, compact",
        partial(cubegrad.MADGRAD, compact=True),
        (1.0, 1.0),
        estimates=True,
    ),
    # At AdamW's own settings where a search of its own is not wanted.
    "madgradw": Method("MADGRADW", cubegrad.MADGRADW, (1e-4, 1e-2), like="adamw", decoupled=True),
    "madgradw-compact": Method(
        "MADGRADW, compact",
        partial(cubegrad.MADGRADW, compact=True),
        (1e-4, 1e-2),
        like="madgradw",
        decoupled=True,
    ),
    "madgradw-schedule-free": Method(
        "MADGRADW, schedule-free",
        partial(cubegrad.MADGRADW, schedule_free=True),
        (1e-4, 1e-2),
        like="madgradw",
        schedule="warmup:5%",
        decoupled=True,
    ),
    "madgradw-auto": Method(
        "MADGRADW, lr auto", cubegrad.MADGRADW, (1.0, 1.0), estimates=True, decoupled=True
    ),
    "madgradw-auto-compact": Method(
        "MADGRADW, lr auto, compact",
        partial(cubegrad.MADGRADW, compact=True),
        (1.0, 1.0),
        estimates=True,
        decoupled=True,
    ),
    # Nothing to set at all.
    "madgradw-auto-schedule-free": Method(
        "MADGRADW, lr auto, schedule-free",
        partial(cubegrad.MADGRADW, schedule_free=True),
        (1.0, 1.0),
        estimates=True,
        schedule="warmup:5%",
        decoupled=True,
    ),
    "mirror-madgrad-compact": Method(
        "MirrorMADGRAD, compact",
        partial(cubegrad.MirrorMADGRAD, compact=True),
        (1e-4, 1e-2),
        like="mirror-madgrad",
    ),
    "sgd": Method("SGD", partial(SGD, momentum=0.9), (1e-2, 1.0)),
    "sgd-plain": Method("SGD, no momentum", SGD, (1e-2, 1.0)),
    "adam": Method("Adam", Adam, (1e-4, 1e-2)),
    "adamw": Method("AdamW", AdamW, (1e-4, 1e-2), like="adam", decoupled=True),
    "adagrad": Method("AdaGrad", Adagrad, (1e-2, 1.0)),
    "da": Method("DA", family.DA, (1e-1, 1e1)),
    "weighted-da": Method("weighted DA", family.WeightedDA, (1e-2, 1.0)),
    "adagrad-da": Method("AdaGrad-DA", family.AdaGradDA, (1e-4, 1e-2)),
    "unweighted-denominator": Method(
        "unweighted denominator", family.UnweightedDenominator, (1e-5, 1e-3)
    ),
    "weighted-denominator": Method(
        "weighted denominator", family.WeightedDenominator, (1e-5, 1e-3)
    ),
    "weighted-numerator": Method("weighted numerator", family.WeightedNumerator, (1e-4, 1e-2)),
    "family-madgrad": Method("MADGRAD (family)", family.MADGRAD, (1e-4, 1e-2)),
    # The bound G of the theorems is unknown for a network; 1 is the size of a large gradient.
    "theoretical-madgrad": Method(
        "theoretical MADGRAD", partial(family.TheoreticalMADGRAD, grad_bound=1.0), (1e-2, 1.0)
    ),
    "family-madgradw": Method(
        "MADGRADW (family)",
        partial(family.MADGRADW, decoupled_weight_decay=True),
        (1e-4, 1e-2),
        decoupled=True,
    ),
    "inline-sgd": Method("SGD by averaging", family.InlineAveragedSGD, (1e-1, 1e1)),
    "prodigy": Method(
        "Prodigy",
        peers.prodigy,
        (1.0, 1.0),
        estimates=True,
        schedule="cosine",
        wants=("warm_up",),
        package="prodigyopt",
    ),
    "dadapt-adam": Method(
        "D-Adapt Adam",
        partial(peers.from_package, "dadaptation", "DAdaptAdam"),
        (1.0, 1.0),
        estimates=True,
        package="dadaptation",
    ),
    "dog": Method(
        "DoG", peers.dog, (1.0, 1.0), estimates=True, schedule="flat", wants=("batch_norm",)
    ),
    "ldog": Method(
        "L-DoG",
        partial(peers.dog, layerwise=True),
        (1.0, 1.0),
        estimates=True,
        schedule="flat",
        wants=("batch_norm",),
    ),
    "schedulefree-adamw": Method(
        "schedule-free AdamW",
        partial(peers.from_package, "schedulefree", "AdamWScheduleFree"),
        (1e-3, 5e-3),  # its default is 2.5e-3
        schedule="warmup:5%",
        package="schedulefree",
    ),
}


def make(
    name: str,
    params: Iterable[Tensor],
    lr: float,
    decay: float,
    warm_up: bool = False,
    batch_norm: bool = False,
) -> Optimizer:
    """The optimizer of a run; the last two are what its schedule and its model have."""
    method = METHODS[name]
    facts = {"warm_up": warm_up, "batch_norm": batch_norm}
    options: dict[str, Any] = {"weight_decay": decay} | {fact: facts[fact] for fact in method.wants}
    with warnings.catch_warnings():  # a search tries large decays on purpose
        warnings.filterwarnings("ignore", "weight_decay=.* is an L2 term")
        optimizer = method.make(params, lr="auto" if method.estimates else lr, **options)
    for group in optimizer.param_groups if method.estimates else ():
        group["lr"] = lr
    return optimizer


def estimates(name: str) -> bool:
    """Whether it estimates its learning rate. A record may name a method of another version."""
    return name in METHODS and METHODS[name].estimates


def lr_text(name: str, lr: float, estimate: float | None = None) -> str:
    """`0.025`; for a method that estimates it `auto (→ 0.0123)`, or `2 × auto (→ …)`."""
    if not estimates(name):
        return f"{lr:g}"
    factor = "" if lr == 1 else f"{lr:g} × "
    return f"{factor}auto" + ("" if estimate is None else f" (→ {estimate:.3g})")


@dataclass(frozen=True)
class Entry:
    """A method under a schedule: one curve of a figure."""

    method: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.method}@{self.schedule}"

    def lrs(self, preset: Preset) -> tuple[float, float]:
        """The range of the first grid; under a/√(i+b) scaled to the same rate at the first step."""
        like = self.method
        while like and like not in preset.lrs:
            like = METHODS[like].like
        low, high = preset.lrs[like] if like else METHODS[self.method].lrs
        name, _, b = self.schedule.partition(":")
        scale = math.sqrt(float(b)) if name == "sqrt" else 1.0
        return low * scale, high * scale


def entry(text: str, preset: Preset) -> Entry:
    """Parse `madgrad` or `madgrad@flat`; `@staged` is the preset's tenthing, or the paper's.

    Without a schedule it is the one that the method's authors recommend, or the preset's.
    """
    name, _, schedule = text.strip().partition("@")
    if name not in METHODS:
        raise StudyError(f"unknown method {name!r}; use one of {', '.join(METHODS)}")
    method = METHODS[name]
    if method.package:
        peers.check_installed(method.package)
    if schedule == "staged":
        staged = preset.schedule.startswith("tenthing")
        schedule = preset.schedule if staged else PAPER_STAGES
    schedule = schedule or method.schedule or preset.schedule
    schedules.check(schedule)
    return Entry(name, schedule)


PAPER_STAGES = "tenthing:50%-75%"  # epochs 150 and 225 of 300

# The paper's further figures, as rows of entries.
FIGURES: dict[str, tuple[tuple[str, ...], ...]] = {
    "dual-averaging": (
        ("da@flat", "adagrad-da@flat", "adagrad@flat", "sgd-plain@flat"),
        ("da@staged", "adagrad-da@staged", "adagrad@staged", "sgd-plain@staged"),
    ),
    "sqrt-decay": (
        (
            "sgd-plain@staged",
            "sgd-plain@sqrt:1",
            "sgd-plain@sqrt:10",
            "sgd-plain@sqrt:100",
            "sgd-plain@sqrt:1000",
            "sgd-plain@sqrt:10000",
        ),
    ),
}


class PaperSetting(NamedTuple):
    lr: float
    decay: float
    result: float | None = None  # final, if the text gives it


class PaperProblem(NamedTuple):
    """A table of the appendix "Parameter settings"."""

    architecture: str
    length: str
    batch: str
    schedule: str
    seeds: int
    result: str  # what the results in `best` are, or what the text gives instead
    best: dict[str, PaperSetting]


PAPER: dict[str, PaperProblem] = {
    "CIFAR10": PaperProblem(
        "PreAct ResNet152, 58,144,842 parameters",
        "300 epochs",
        "128",
        "tenthing:150-225",
        10,
        "the text has no final accuracies for this problem, only curves",
        {
            "madgrad": PaperSetting(2.5e-4, 1e-4),
            "adagrad": PaperSetting(0.01, 1e-4),
            "adam": PaperSetting(2.5e-4, 1e-4),
            "sgd": PaperSetting(0.1, 1e-4),
        },
    ),
    "ImageNet": PaperProblem(
        "ResNet50",
        "90 epochs",
        "8 x 32",
        "tenthing:30-60-90",
        5,
        "the text has one accuracy, MADGRAD's 75.87 at epoch 70",
        {
            "madgrad": PaperSetting(1e-3, 2.5e-5),
            "adagrad": PaperSetting(0.01, 1e-4),
            "adam": PaperSetting(2.5e-4, 1e-4),
            "sgd": PaperSetting(0.1, 1e-4),
        },
    ),
    "fastMRI": PaperProblem(
        "12 layer VarNet 2, 12,931,532 parameters",
        "50 epochs",
        "8 x 1",
        "tenthing:40",
        5,
        "the text has no numbers for this problem, only curves",
        {
            "madgrad": PaperSetting(0.01, 0.0),
            "adagrad": PaperSetting(0.25, 0.0),
            "adam": PaperSetting(2.5e-4, 0.0),
            "sgd": PaperSetting(0.01, 0.0),
        },
    ),
    "IWSLT14": PaperProblem(
        "lstm_wiseman_iwslt_de_en",
        "60,000 updates",
        "4096 tokens",
        "inverse-sqrt:4000",
        10,
        "test loss",
        {
            "madgrad": PaperSetting(0.025, 5e-6, 4.33),
            "adagrad": PaperSetting(0.25, 1e-5, 4.38),
            "adam": PaperSetting(0.01, 0.05, 4.35),
            "adamw": PaperSetting(0.01, 0.05, 4.35),  # fairseq's Adam decays as torch's AdamW
            "sgd": PaperSetting(1.0, 1e-5),
        },
    ),
    "BookWiki": PaperProblem(
        "roberta_base, 110M parameters",
        "20,000 updates",
        "8 x 16 sentences x 16 updates",
        "polynomial:10000",
        5,
        "test loss",
        {
            "madgrad": PaperSetting(0.005, 0.0, 2.07),
            "adagrad": PaperSetting(0.01, 0.0),
            "adam": PaperSetting(0.001, 0.0, 2.09),
            "sgd": PaperSetting(1.0, 0.0),
        },
    ),
}
