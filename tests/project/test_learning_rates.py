"""The pages whose tables and figures are made from records: learning rates, bfloat16 weights."""

from pathlib import Path

import bf16_training
import plot_lr
import pytest
import sensitivity
import torch
import which_lr

from cubegrad import MADGRAD

DOCS = Path(__file__).parents[2] / "docs"
FILES = DOCS.parent / "benchmarks" / "memory" / "results"


def test_the_page_on_learning_rates_has_the_table_of_the_records():
    table = which_lr.table()
    assert table in (DOCS / "learning_rate.md").read_text()


def test_what_the_readme_says_of_ratios_is_in_the_table():
    ratios = [float(which_lr.row(kind)[3].removesuffix("×")) for kind in which_lr.KINDS]
    for these, low, high in ((ratios[:2], 0.5, 4), (ratios[2:3] + ratios[6:7], 4, 5)):
        assert all(low <= ratio <= high for ratio in these)
    assert [min(ratios[3:6]), max(ratios[3:6])] == [1, 4]


def test_the_page_on_memory_has_the_losses_of_the_records():
    lines = bf16_training.table(bf16_training.load(FILES / "bf16_h200.jsonl"))
    page = (DOCS / "memory.md").read_text()
    small = [line.split(" | ") for line in lines.splitlines()[2:] if "| 0.002 |" not in line]
    assert len(small) == 8
    assert all(cells[4] in page for cells in small)


@pytest.mark.plots
def test_the_figure_of_learning_rates_is_drawn_from_the_records(tmp_path):
    experiment, madgrad, _ = which_lr.search(which_lr.KINDS[1])
    points = dict(plot_lr.losses(madgrad, experiment.judge.higher_is_better))
    assert max(points.values()) == points[madgrad.best[0]] == 0
    assert points[0.005] == pytest.approx(-1.04)  # as in the table
    figure = tmp_path / "lr.png"
    plot_lr.main([str(figure)])
    assert figure.stat().st_size > 50_000


def test_the_page_for_newcomers_has_the_table_of_the_small_nets():
    lines = sensitivity.load(sensitivity.RESULTS)
    assert sensitivity.table(lines) in (DOCS / "coming_from.md").read_text()
    for cell in sensitivity.cells():
        assert sensitivity.missing(cell, lines) is None  # every search has ended


def test_a_larger_loss_needs_a_rate_that_is_smaller_by_its_root():
    ends = []
    for size in (1.0, 64.0):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = MADGRAD(model.double().parameters(), lr=0.01 / size**0.5, eps=0.0)
        x = torch.randn(32, 8, dtype=torch.float64)
        for _ in range(20):
            optimizer.zero_grad()
            (size * (model(x) - x.sum(1, keepdim=True)).square().mean()).backward()
            optimizer.step()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_the_page_for_newcomers_has_the_settings_of_the_records():
    starts = which_lr.starts()
    assert starts in (DOCS / "coming_from.md").read_text()
