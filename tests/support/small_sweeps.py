"""A sweep of four short runs, and the curves that a sweep has recorded."""

from pathlib import Path
from typing import Any

from cubegrad.study import Problem
from cubegrad.study.methods import Entry
from cubegrad.study.records import Runs
from cubegrad.study.sweep import Plan


def four_runs(problem: Problem) -> Plan:
    """Two methods at two learning rates."""
    entries = [Entry("madgrad", "flat"), Entry("sgd", "flat")]
    return Plan(problem, "cpu", problem.presets["cpu"], entries, lrs=(0.01, 0.1), widen=0)


def curves(folder: Path) -> dict[str, Any]:
    records, broken = Runs(folder).load()
    assert broken == []
    return {key: record.curve for key, record in sorted(records.items())}
