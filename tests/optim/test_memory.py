"""The memory table of docs/distributed.md, computed from what a step allocates."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from cubegrad import MADGRAD, MirrorMADGRAD

DOC = Path(__file__).parents[2] / "docs" / "distributed.md"
ROWS = {
    "MADGRAD, float32": (MADGRAD, 0.9, torch.float32),
    "MADGRAD, momentum 0, float32": (MADGRAD, 0.0, torch.float32),
    "MirrorMADGRAD, float32": (MirrorMADGRAD, 0.9, torch.float32),
    "MADGRAD, any momentum, bfloat16": (MADGRAD, 0.0, torch.bfloat16),
    "MirrorMADGRAD, bfloat16": (MirrorMADGRAD, 0.9, torch.bfloat16),
}


def bytes_per_parameter(cls, momentum, dtype):
    param = nn.Parameter(torch.ones(1000, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = cls([param], momentum=momentum)
    optimizer.step()
    held = [param, param.grad, *optimizer.state[param].values()]
    return sum(t.untyped_storage().nbytes() for t in held if t.ndim) // param.numel()


def row(name):
    size = bytes_per_parameter(*ROWS[name])
    gigabytes = [size * billions / gpus for billions in (1, 7, 70) for gpus in (1, 8, 64)]
    cells = [f"{float(f'{number:.3g}'):g}" for number in gigabytes]
    return " | ".join([f"| {name}", str(size), *cells]) + " |"


@pytest.mark.parametrize("name", ROWS)
def test_the_table_has_what_is_measured(name):
    assert row(name) in DOC.read_text().splitlines()


def test_the_table_has_no_other_rows():
    assert re.findall(r"^\| (\S*MADGRAD, .*?) \| \d+ \|", DOC.read_text(), re.M) == list(ROWS)
