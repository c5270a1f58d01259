"""The code of docs/editing_weights.md: each block runs by itself."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "editing_weights.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_runs_by_itself(index):
    torch.manual_seed(index)
    exec(compile(BLOCKS[index], f"{PAGE.name}, block {index}", "exec"), {"__name__": "__main__"})


def test_there_are_blocks():
    assert len(BLOCKS) == 9
