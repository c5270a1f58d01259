"""What `evaluate` of a problem may return, and how a wrong value is reported."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
import toy_problem
from small_runs import settings_of

from cubegrad.study import StudyError
from cubegrad.study.records import Record, from_line, to_line
from cubegrad.study.train import Place, run

SETTINGS = settings_of(toy_problem.problem(), epochs=1)


def test_a_missing_metric_is_reported() -> None:
    wrong = replace(toy_problem.problem(), metric="bleu")
    with pytest.raises(StudyError, match=r"judged by 'bleu' and its evaluate returns loss; return"):
        run(wrong, SETTINGS, Place())


def evaluated(metrics: object) -> Record:
    def build(setup):
        return replace(toy_problem.build(setup), evaluate=lambda *_: metrics)

    return run(replace(toy_problem.problem(), build=build), SETTINGS, Place())


@pytest.mark.parametrize(
    "value",
    [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5]),
     torch.tensor(0.5, dtype=torch.bfloat16), Fraction(1, 2)],
    ids=repr,
)  # fmt: skip
def test_a_metric_may_be_any_real_number(value: object) -> None:
    record = evaluated({"loss": value, "count": np.int64(3), "won": True})
    assert record.curve["loss"] == [0.5]
    assert (record.curve["count"], record.curve["won"]) == ([3.0], [1.0])
    assert {type(x) for values in record.curve.values() for x in values} == {float}
    assert from_line(to_line(record)) == record


@pytest.mark.parametrize(
    "value", [float("nan"), np.float32("inf"), torch.tensor(-math.inf), 10**400]
)
def test_a_metric_that_is_not_finite_is_a_run_that_diverged(value: object) -> None:
    assert evaluated({"loss": value}).status == "diverged"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "0.5"}, r"evaluate of problem 'toy' returns loss = '0\.5'; return a real number"),
        ({"loss": None}, "returns loss = None; return a real number"),
        ({"loss": 1j}, "returns loss = 1j; return a real number"),
        ({"loss": torch.ones(2)}, r"returns loss = tensor\(\[1\., 1\.\]\); return a real number"),
        ({"loss": np.ones(2)}, r"returns loss = array\(\[1\., 1\.\]\); return a real number"),
        ({"loss": [0.5]}, r"returns loss = \[0\.5\]; return a real number"),
        (0.5, r"returns 0\.5; return a dict such as"),
        (None, "returns None; return a dict such as"),
        ({"loss": 0.5, 3: 0.5}, "a metric named 3; use plain text other than train_loss and"),
        ({"loss": 0.5, "train_loss": 0.5}, "a metric named 'train_loss'; use plain text other"),
        ({"loss": 0.5, "estimated_lr": 0.5}, "a metric named 'estimated_lr'; use plain text"),
        ({"loss": 0.5, "a\n": 0.5}, r"a metric named 'a\\n'; use plain text"),
    ],
)
def test_a_wrong_metric_is_reported_after_the_first_epoch(metrics: object, message: str) -> None:
    with pytest.raises(StudyError, match=message):
        evaluated(metrics)
