"""The report of a method that estimates its learning rate, from made-up records."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from made_up_records import cifar10_record

from cubegrad.study import figures, report, wording
from cubegrad.study.methods import lr_text
from cubegrad.study.records import Record


def estimating(lr: float, seed: int, accuracy: float, schedule: str = "flat") -> Record:
    record = cifar10_record("madgrad-auto", lr, seed, accuracy, schedule)
    estimates = [1e-4, 2e-3, 0.01 + 0.002 * seed]
    return replace(record, curve={**record.curve, "estimated_lr": estimates})


SWEPT = [cifar10_record("madgrad", lr, 0, 90 - abs(lr - 0.025)) for lr in (0.01, 0.025, 0.05)]
FOUND = [estimating(1.0, seed, 90.0 + seed) for seed in (0, 1, 2)]
SET = [cifar10_record("madgrad-compact", 0.025, seed, 80.0) for seed in (0, 1, 2)]


def test_the_table_has_the_estimate_for_a_learning_rate() -> None:
    (experiment,) = report.experiments([*SWEPT, *FOUND])
    _, auto, madgrad = report.table(experiment)
    assert madgrad[:3] == ["MADGRAD", "0.025", "0.0001"]
    # Estimates 0.01, 0.012 and 0.014; nothing was chosen, so every seed counts.
    assert auto[:4] == ["MADGRAD, lr auto", "auto (→ 0.012)", "0.0001", "91.0 ± 1.2"]
    assert auto[6:8] == ["3", "none"]
    assert auto[8:] == ["–", "–", "–"]  # the paper has no such method
    assert "is estimated while training" in "\n".join(wording.notes(experiment))
    (experiment,) = report.experiments(SWEPT)
    assert "estimated" not in "\n".join(wording.notes(experiment))


def test_a_factor_is_in_the_learning_rate_that_is_shown() -> None:
    doubled = [replace(r, settings=replace(r.settings, lr=2.0)) for r in FOUND]
    (experiment,) = report.experiments(doubled)
    assert report.table(experiment)[1][1] == "2 × auto (→ 0.024)"
    points = experiment.summaries[0].estimated_lr()
    assert [point.mean for point in points] == pytest.approx([2e-4, 4e-3, 0.024])
    # Deviations ±0.004: variance 1.6e-5, 2 sqrt(1.6e-5 / 3).
    assert points[2].error == pytest.approx(2 * math.sqrt(1.6e-5 / 3))
    assert lr_text("madgrad", 2.0) == "2"
    assert lr_text("of another version", 2.0) == "2"


def test_a_seed_that_diverged_is_counted_where_nothing_was_chosen() -> None:
    (experiment,) = report.experiments([*FOUND, cifar10_record("madgrad-auto", 1.0, 3, None)])
    row = report.table(experiment)[1]
    assert row[1] == "auto (→ 0.012)"
    assert row[6:8] == ["4, 1 diverged", "none"]
    (experiment,) = report.experiments([cifar10_record("madgrad-auto", 1.0, 0, None)])
    assert report.table(experiment)[1][1:3] == ["–", "–"]
    assert figures.estimated(experiment.summaries) == []


@pytest.mark.plots
def test_the_plots_of_estimates(tmp_path: Path) -> None:
    report.write([*SWEPT, *FOUND], tmp_path / "report")
    svg = (tmp_path / "report" / "cifar10-gpu-estimated-lr.svg").read_text(encoding="utf-8")
    for words in ("estimated learning rate", "MADGRAD, lr auto", "MADGRAD, best lr 0.025"):
        assert f">{words}<" in svg
    assert (tmp_path / "report" / "cifar10-gpu-estimated-lr.png").stat().st_size > 10_000
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "![estimated learning rates](cifar10-gpu-estimated-lr.png)" in text
    page = Page((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    *_, search, found = page.charts[0]["charts"]
    auto, madgrad = "madgrad-auto@flat", "madgrad@flat"
    assert search["series"][0] == {"id": auto, "level": 91.0, "text": "91.00"}
    assert found["title"].startswith("estimated learning rate")
    assert found["series"][0]["points"][2][0::3] == [3, "0.0120 ± 0.0023"]
    assert found["series"][1] == {"id": madgrad, "level": 0.025, "text": "0.025, searched"}


def axes_of(records: list[Record]) -> tuple[Any, Any]:
    """The axes of the estimates, and those of the search."""
    (experiment,) = report.experiments(records)
    arguments = (experiment.summaries, experiment.judge, "%", "")
    found = figures.estimate_figure(experiment.summaries, "")
    return found.axes, figures.lr_figure(*arguments).axes


def test_what_is_drawn_of_an_estimate() -> None:
    (found,), (search,) = axes_of([*SWEPT, *FOUND])
    best, mean = found.lines
    assert (list(best.get_ydata()), best.get_linestyle()) == ([0.025, 0.025], "--")
    assert list(mean.get_ydata()) == pytest.approx([1e-4, 2e-3, 0.012])
    assert found.get_yscale() == "log"
    # A factor has no place on an axis of learning rates: its result is a horizontal line.
    assert list(search.lines[1].get_ydata()) == [91.0, 91.0]
    assert search.get_xlabel() == "learning rate"
    low, high = search.get_ylim()
    assert low < 89.975 < 91.0 < high


def test_one_rate_that_was_tried_is_no_best_one() -> None:
    (found,), _ = axes_of([SWEPT[0], *FOUND])
    assert len(found.lines) == 1


def drawn_by_lr(records: list[Record]) -> list[str]:
    (one,) = report.experiments(records)
    (axes,) = figures.lr_figure(one.summaries, one.judge, "%", "").axes
    return [str(line.get_label()) for line in axes.lines]


def test_the_plot_of_a_search_has_the_methods_with_its_seeds(tmp_path: Path) -> None:
    """Those with other seeds may have other data."""
    assert drawn_by_lr([*SWEPT, *SET[1:], *FOUND[1:]]) == ["MADGRAD"]
    methods = ["MADGRAD", "MADGRAD, lr auto", "MADGRAD, compact"]
    assert drawn_by_lr([*SWEPT, *SET, *FOUND]) == methods
    report.write([*SWEPT, *SET[1:]], tmp_path / "report")
    page = Page((tmp_path / "report" / "index.html").read_text(encoding="utf-8"))
    assert [len(chart["series"]) for chart in page.charts[0]["charts"]] == [2, 2, 1]


def test_without_a_search_all_rates_are_drawn() -> None:
    assert drawn_by_lr(SET) == ["MADGRAD, compact"]
    diverged = [cifar10_record("sgd", lr, 0, None) for lr in (0.1, 0.2)]
    assert drawn_by_lr([*diverged[:1], *SET]) == ["MADGRAD, compact"]
    assert drawn_by_lr([*diverged, *SET]) == ["MADGRAD, compact"]
    decays = [replace(r, settings=replace(r.settings, decay=1e-4)) for r in FOUND]
    assert drawn_by_lr([*SET, *FOUND, *decays]) == ["MADGRAD, lr auto", "MADGRAD, compact"]


def test_factors_alone_have_an_axis_of_their_own() -> None:
    factors = [estimating(factor, 0, 90 - factor) for factor in (0.5, 1.0, 2.0)]
    _, (search,) = axes_of(factors)
    assert search.get_xlabel() == "factor of the estimated learning rate"
    assert list(search.lines[0].get_xdata()) == [0.5, 1.0, 2.0]


def test_each_schedule_has_a_panel_if_something_is_estimated_under_it() -> None:
    other = [cifar10_record("madgrad", lr, 0, 90.0, "sqrt:4") for lr in (0.1, 0.25)]
    panels, searches = axes_of([*SWEPT, *FOUND, *other])
    assert (len(panels), len(searches)) == (1, 2)
    assert panels[0].get_title(loc="left") == "flat"
    more = [estimating(2.0, seed, 90.0, "sqrt:4") for seed in (0, 1)]
    panels, _ = axes_of([*SWEPT, *FOUND, *other, *more])
    assert [axes.get_title(loc="left") for axes in panels] == ["flat", "sqrt:4"]
    labels = [text.get_text() for text in panels[1].get_legend().get_texts()]
    assert labels == ["MADGRAD, best lr 0.1", "MADGRAD, lr auto, factor 2"]
