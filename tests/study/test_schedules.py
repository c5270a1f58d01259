"""Every schedule point by point, against values worked out by hand."""

import pytest

from cubegrad.study import StudyError
from cubegrad.study.schedules import check, parse, warms_up

POINTS = [
    # spec, epochs, steps an epoch, {step: factor}
    ("flat", 3, 10, {0: 1, 29: 1}),
    # Epochs 150 and 225 of 300, at 391 steps: steps 58650 and 87975.
    (
        "tenthing:150-225",
        300,
        391,
        {0: 1, 58649: 1, 58650: 0.1, 87974: 0.1, 87975: 0.01, 117299: 0.01},
    ),
    ("tenthing:30-60-90", 90, 2, {59: 1, 60: 0.1, 119: 0.1, 120: 0.01, 179: 0.01, 180: 0.001}),
    ("tenthing:40", 50, 1, {39: 1, 40: 0.1, 49: 0.1}),
    ("tenthing:50%-75%", 8, 10, {39: 1, 40: 0.1, 59: 0.1, 60: 0.01}),
    ("tenthing:60%-85%", 15, 20, {179: 1, 180: 0.1, 254: 0.1, 255: 0.01}),
    ("sqrt:1", 1, 100, {0: 1, 3: 1 / 2, 8: 1 / 3, 99: 1 / 10}),
    ("sqrt:100", 1, 1000, {0: 1 / 10, 44: 1 / 12, 300: 1 / 20}),
    (
        "inverse-sqrt:4",
        1,
        100,
        {0: 1 / 4, 1: 1 / 2, 2: 3 / 4, 3: 1, 15: 1 / 2, 35: 1 / 3, 99: 1 / 5},
    ),
    ("inverse-sqrt:1", 1, 10, {0: 1, 3: 1 / 2}),
    ("tenthing:1e308", 1, 100, {0: 1, 99: 1}),
    ("polynomial:5", 1, 20, {0: 1 / 5, 3: 4 / 5, 4: 1, 12: 1 / 2, 19: 1 / 16, 20: 0}),
    ("polynomial:1", 2, 5, {0: 1, 5: 1 / 2, 9: 1 / 10}),
    ("cosine", 2, 6, {0: 1, 4: 3 / 4, 6: 1 / 2, 8: 1 / 4, 12: 0}),
    ("warmup:4", 1, 20, {0: 1 / 4, 2: 3 / 4, 3: 1, 19: 1}),
    ("warmup:5%", 4, 20, {0: 1 / 4, 2: 3 / 4, 3: 1, 79: 1}),
    ("warmup:5%", 1, 10, {0: 1, 9: 1}),
]


@pytest.mark.parametrize(("spec", "epochs", "steps", "points"), POINTS, ids=lambda p: str(p)[:20])
def test_points(spec: str, epochs: int, steps: int, points: dict[int, float]) -> None:
    schedule = parse(spec, epochs, steps)
    assert {step: schedule(step) for step in points} == pytest.approx(points, rel=1e-12)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "linear",
        "flat:3",
        "tenthing",
        "tenthing:a",
        "sqrt:",
        "sqrt:0",
        "sqrt:-1",
        "polynomial:x",
        "sqrt:100\n",
        "cosine:3",
        "warmup",
        "warmup:0%",
    ],
)
def test_unknown_schedules_are_refused_with_the_remedy(spec: str) -> None:
    with pytest.raises(StudyError, match=r"schedule.*(use flat|must be > 0)"):
        check(spec)


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    check("polynomial:100")
    with pytest.raises(StudyError, match="100 steps and the run has 50; use polynomial:5"):
        parse("polynomial:100", 5, 10)


def test_which_schedules_warm_up() -> None:
    warming = [spec for spec, *_ in POINTS if warms_up(spec)]
    assert {spec.partition(":")[0] for spec in warming} == {"inverse-sqrt", "polynomial", "warmup"}
    for spec, epochs, steps, _ in POINTS:
        schedule = parse(spec, epochs, steps)
        assert schedule(0) >= schedule(1) or spec in warming
