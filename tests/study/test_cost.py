"""What a plan is expected to cost, before it runs."""

from dataclasses import replace
from typing import Any

import pytest
import toy_problem

from cubegrad.study import Preset, Problem, cost
from cubegrad.study.cost import Cost
from cubegrad.study.methods import Entry
from cubegrad.study.plan import Plan
from cubegrad.study.records import Record

SGD, ADAMW = Entry("sgd", "flat"), Entry("adamw", "flat")


def plan(**changes: Any) -> Plan:
    preset = Preset(9, 16, decays=(0.0, 1e-4), lrs={"sgd": (1e-3, 1e-2), "adam": (1e-3, 5e-3)})
    problem = Problem("toy", "", toy_problem.build, {"cpu": preset})
    return replace(Plan(problem, "cpu", preset, [SGD]), **changes)


def test_growth_counts_each_end_that_can_grow() -> None:
    # Of 4 rates 2 are ends, each with 2 decays; of 2 decays one is an end, with 4 rates.
    assert cost.growth(plan(), SGD) == 1 + 2
    assert cost.growth(plan(search_seeds=3), SGD) == 3 * 3
    assert cost.growth(plan(widen=0), SGD) == 0
    assert cost.growth(plan(lrs=(0.1,), decays=(0.0,)), SGD) == 0


def test_what_is_recorded_is_not_to_be_done() -> None:
    whole = cost.expected(plan(final_seeds=5), {})
    assert whole == Cost(8 + 3 + 5, 9 * (8 + 3 + 5))
    keys = [settings.key for settings in cost.first_grid(plan(), SGD)]
    assert cost.expected(plan(final_seeds=5), keys[:6]).runs == whole.runs - 6


def test_halving_finishes_about_a_ninth_of_the_runs_and_a_larger_rate() -> None:
    halved = plan(search="halving")
    assert cost.search(halved, 27) == Cost(3 + 1, 27 * 1 + 9 * 2 + 3 * 6 + 9)
    assert cost.search(halved, 0) == Cost()


def test_adamw_has_adams_rates_and_decays_of_its_own() -> None:
    both = plan(entries=[SGD, ADAMW])
    assert both.first_lrs(ADAMW) == (1e-3, 2.5e-3, 5e-3)
    assert both.first_decays(ADAMW) == (0.0, 0.01)
    assert both.first_decays(Entry("madgrad-decoupled", "flat")) == (0.0, 0.01)
    assert both.first_decays(SGD) == (0.0, 1e-4)
    assert plan(decays=(0.5,)).first_decays(ADAMW) == (0.5,)


@pytest.mark.parametrize(("method", "seconds"), [("sgd", 2.0), ("adamw", 3.0), ("adam", 4.0)])
def test_the_time_of_an_epoch_is_the_methods_or_else_the_others(
    method: str, seconds: float
) -> None:
    curve: dict[str, list[float | None]] = {"train_loss": [1.0, 1.0]}
    records = [
        Record(plan().settings(entry, (0.1, 0.0), 0, False), "finished", curve, time)
        for entry, time in [(SGD, 4.0), (Entry("adam", "flat"), 8.0)]
    ]
    found = cost.seconds_per_epoch(plan(), Entry(method, "flat"), records)
    assert found == seconds
    other = [replace(r, settings=replace(r.settings, batch=17)) for r in records]
    assert cost.seconds_per_epoch(plan(), SGD, other) is None
