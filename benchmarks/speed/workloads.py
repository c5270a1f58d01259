"""What is timed: the shapes of the parameters, and the optimizers that step them."""

import importlib
import sys
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

sys.path.append(str(Path(__file__).parents[1]))
from shared.shapes import Shape, gpt2, resnet50

ADAM_FUSED = "torch Adam fused"
ADAMW_FUSED = "torch AdamW fused"
MADGRADW = "cubegrad MADGRADW"
MADGRADW_COMPACT = "cubegrad MADGRADW compact"
MADGRAD_DEFAULT = "cubegrad MADGRAD"
COMPACT = "cubegrad MADGRAD compact"


@dataclass(frozen=True)
class Contender:
    """One row of a table: a class, where to import it from, and what to build it with."""

    name: str
    module: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    graph: bool = False  # time the replay of a CUDA graph of one step
    beside: str = ""  # on a CPU, the name of another to time in alternation

    def build(self, params: list[Tensor]) -> Optimizer:
        made = getattr(importlib.import_module(self.module), self.kind)(params, **self.options)
        if hasattr(made, "train"):  # a schedule-free one evaluates at other weights
            made.train()
        return made


CUBEGRAD_EAGER = Contender(
    "cubegrad MADGRAD eager", "cubegrad", "MADGRAD", {"foreach": False, "fused": False}
)
DECOUPLED = {"weight_decay": 0.01, "decoupled_weight_decay": True}
AUTO = {"lr": "auto", "fused": True}
CONTENDERS = (
    Contender(MADGRADW, "cubegrad", "MADGRADW", {"fused": True}, beside=ADAMW_FUSED),
    Contender(
        MADGRADW_COMPACT,
        "cubegrad",
        "MADGRADW",
        {"fused": True, "compact": True},
        beside=ADAMW_FUSED,
    ),
    Contender(
        "cubegrad MADGRADW schedule-free",
        "cubegrad",
        "MADGRADW",
        {"fused": True, "schedule_free": True},
        beside=ADAMW_FUSED,
    ),
    Contender(
        "cubegrad MADGRADW schedule-free, compact",
        "cubegrad",
        "MADGRADW",
        {"fused": True, "schedule_free": True, "compact": True},
        beside=ADAMW_FUSED,
    ),
    Contender(
        "cubegrad MADGRADW, lr auto",
        "cubegrad",
        "MADGRADW",
        AUTO,
        beside=MADGRADW,
    ),
    Contender(
        "cubegrad MADGRADW compact, lr auto",
        "cubegrad",
        "MADGRADW",
        AUTO | {"compact": True},
        beside=MADGRADW_COMPACT,
    ),
    Contender(
        "cubegrad MADGRADW compact, momentum=0",
        "cubegrad",
        "MADGRADW",
        {"fused": True, "compact": True, "momentum": 0.0},
    ),
    Contender(
        "cubegrad MADGRADW compact, graph replay",
        "cubegrad",
        "MADGRADW",
        {"fused": True, "compact": True, "capturable": True},
        graph=True,
    ),
    Contender(MADGRAD_DEFAULT, "cubegrad", "MADGRAD"),
    Contender("cubegrad MADGRAD fused", "cubegrad", "MADGRAD", {"fused": True}),
    Contender(
        "cubegrad MADGRAD fused, graph replay",
        "cubegrad",
        "MADGRAD",
        {"fused": True, "capturable": True},
        graph=True,
    ),
    Contender(
        "cubegrad MADGRAD fused, lr auto",
        "cubegrad",
        "MADGRAD",
        AUTO,
        beside="cubegrad MADGRAD fused",
    ),
    Contender(
        "cubegrad MADGRAD fused, lr auto, decay",
        "cubegrad",
        "MADGRAD",
        AUTO | {"weight_decay": 1e-4},
        beside="cubegrad MADGRAD fused",
    ),
    Contender(
        "cubegrad MADGRAD fused, lr auto, graph replay",
        "cubegrad",
        "MADGRAD",
        AUTO | {"capturable": True},
        graph=True,
    ),
    Contender(
        COMPACT,
        "cubegrad",
        "MADGRAD",
        {"fused": True, "compact": True},
        beside="cubegrad MADGRAD fused",
    ),
    Contender(
        "cubegrad MADGRAD compact, graph replay",
        "cubegrad",
        "MADGRAD",
        {"fused": True, "compact": True, "capturable": True},
        graph=True,
    ),
    Contender(
        "cubegrad MADGRAD compact, lr auto",
        "cubegrad",
        "MADGRAD",
        AUTO | {"compact": True},
        beside=COMPACT,
    ),
    Contender(
        "cubegrad MADGRAD compact, momentum=0",
        "cubegrad",
        "MADGRAD",
        {"fused": True, "compact": True, "momentum": 0.0},
    ),
    Contender(
        "cubegrad MirrorMADGRAD compact",
        "cubegrad",
        "MirrorMADGRAD",
        {"fused": True, "compact": True},
    ),
    Contender("cubegrad MADGRAD foreach", "cubegrad", "MADGRAD", {"foreach": True, "fused": False}),
    CUBEGRAD_EAGER,
    Contender("cubegrad MADGRAD momentum=0", "cubegrad", "MADGRAD", {"momentum": 0.0}),
    Contender("cubegrad MirrorMADGRAD", "cubegrad", "MirrorMADGRAD"),
    *(
        Contender(
            f"cubegrad {name}{', compact' if compact else ''}, decoupled decay",
            "cubegrad",
            name,
            {"fused": True, "compact": compact} | DECOUPLED,
            beside=ADAMW_FUSED,
        )
        for name in ("MADGRAD", "MirrorMADGRAD")
        for compact in (False, True)
    ),
    Contender(ADAM_FUSED, "torch.optim", "Adam", {"fused": True}),
    Contender(ADAMW_FUSED, "torch.optim", "AdamW", {"fused": True}),
    Contender(
        "torch Adam fused, graph replay",
        "torch.optim",
        "Adam",
        {"fused": True, "capturable": True},
        graph=True,
    ),
    Contender("torch Adam foreach", "torch.optim", "Adam", {"foreach": True}),
    Contender(
        "torch SGD momentum fused",
        "torch.optim",
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "fused": True},
    ),
    Contender("torch Adagrad fused", "torch.optim", "Adagrad", {"fused": True}),
    Contender("torch Adagrad foreach", "torch.optim", "Adagrad", {"foreach": True}),
    Contender("madgrad MADGRAD", "madgrad", "MADGRAD", {"lr": 1e-2}),
    Contender("pytorch_optimizer MADGRAD", "pytorch_optimizer", "MADGRAD", {"lr": 1e-2}),
    Contender("optimi Adam", "optimi", "Adam", {"lr": 1e-3}),
    Contender("flashoptim AdamW", "flashoptim", "FlashAdamW"),
    Contender("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
    Contender("prodigyopt Prodigy", "prodigyopt", "Prodigy"),
    Contender("dadaptation D-Adapt Adam", "dadaptation", "DAdaptAdam"),
    Contender("DoG", "cubegrad.study.dog", "DoG"),
    Contender("schedulefree AdamW", "schedulefree", "AdamWScheduleFree"),
)


@dataclass(frozen=True)
class Case:
    """One set of parameters and its contenders. Cases of one name share a table."""

    name: str
    shapes: list[Shape]
    dtype: torch.dtype = torch.float32
    contenders: tuple[Contender, ...] = CONTENDERS

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.shapes))


NAMES = ("one", "gpt2-large", "gpt2-large-bf16", "resnet50", "many", "growth")
GPU_ONLY = ("gpt2-large", "gpt2-large-bf16")  # 774M parameters: 19 GB with state and gradients


def cases(name: str, on_gpu: bool, small: bool) -> list[Case]:
    """The cases of one name; `small` scales them down to about a thousandth."""
    without_eager = tuple(c for c in CONTENDERS if c is not CUBEGRAD_EAGER)
    if name == "one":
        elements = 2**16 if small else 2**29 if on_gpu else 2**26
        return [Case(name, [(elements // 1024, 1024)], contenders=without_eager)]
    if name in GPU_ONLY:
        shapes = gpt2(1, 64, 512, 32) if small else gpt2(36, 1280, 50257, 1024)
        dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
        return [_checked(Case(name, shapes, dtype, without_eager), 774_030_080, small)]
    if name == "resnet50":
        shapes = resnet50(2, 10) if small else resnet50(64, 1000)
        return [_checked(Case(name, shapes), 25_557_032, small)]
    if name == "many":
        return [Case(name, [(1024,)] * (40 if small else 2000))]
    elements, least = (40_000, 1) if small else (16_000_000, 10)
    duel = tuple(c for c in CONTENDERS if c.name in (MADGRAD_DEFAULT, ADAM_FUSED))
    counts = [least * 10**power for power in range(3 if small else 4)]
    return [Case(name, [(elements // n,)] * n, contenders=duel) for n in counts]


def _checked(case: Case, published: int, small: bool) -> Case:
    if not small and case.parameters != published:
        raise ValueError(f"{case.name} has {case.parameters} parameters, not {published}")
    return case
