"""The pages whose tables are made from records: which learning rate, and bfloat16 weights."""

import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FILES = DOCS.parent / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))


def test_the_page_on_learning_rates_has_the_table_of_the_records():
    table = importlib.import_module("which_lr").table()
    assert table in (DOCS / "learning_rate.md").read_text()


def test_what_the_readme_says_of_ratios_is_in_the_table():
    which_lr = importlib.import_module("which_lr")
    ratios = [float(which_lr.row(kind)[3].removesuffix("×")) for kind in which_lr.KINDS]
    for these, low, high in ((ratios[:2], 0.5, 4), (ratios[2:3] + ratios[5:6], 4, 5)):
        assert all(low <= ratio <= high for ratio in these)
    assert [min(ratios[3:5]), max(ratios[3:5])] == [1, 2.5]


def test_the_page_on_memory_has_the_losses_of_the_records():
    bf16_training = importlib.import_module("bf16_training")
    lines = bf16_training.table(bf16_training.load(FILES / "bf16_h200.jsonl"))
    page = (DOCS / "memory.md").read_text()
    small = [line.split(" | ") for line in lines.splitlines()[2:] if "| 0.002 |" not in line]
    assert len(small) == 8
    assert all(cells[4] in page for cells in small)
