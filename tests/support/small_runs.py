"""Set-ups and settings of a problem's smallest preset, and the numbers of a run."""

import json
from pathlib import Path

import pytest
import torch

from cubegrad.study import Problem, Setup
from cubegrad.study.records import Record, Settings

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def setup_of(
    problem: Problem,
    data: Path = Path("nowhere"),
    seed: int = 0,
    device: torch.device = CPU,
    hold_out: bool = False,
) -> Setup:
    return Setup(problem.presets["cpu"], seed, device, data, hold_out)


def settings_of(problem: Problem, **changes: object) -> Settings:
    """Of one run with MADGRAD, unless changed."""
    preset = problem.presets["cpu"]
    lengths = {"epochs": preset.epochs, "batch": preset.batch, "schedule": "flat"}
    values = {"method": "madgrad", "lr": 0.01, "decay": 0.0, "seed": 0}
    return Settings(problem.name, "cpu", **{**lengths, **values, **changes})  # type: ignore[arg-type]


def curve_text(record: Record) -> str:
    """The curve with every bit of its numbers, also the sign of a zero."""
    return json.dumps(record.curve)
