"""The comparison of lr="auto" with other optimizers: what is run, its table, its picture."""

import importlib
import json
import statistics
from dataclasses import replace
from pathlib import Path

import auto_quality
import auto_table
import pytest
from shared import earlier

from cubegrad.study.records import Record, Runs, Settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ABOUT = {"metric": "loss", "higher_is_better": False, "unit": "bits", "beside": []}
LOSSES = {"madgrad-auto": 2.005, "prodigy": 2.1, "dog": 1.99, "madgrad": 2.0, "adamw": 1.9}


def record(method, seed, loss, lr=1.0):
    settings = Settings("toy", "cpu", 2, 16, method, "flat", lr, 0.0, seed)
    status = "diverged" if loss is None else "finished"
    return Record(settings, status, {"train_loss": [0.5], "loss": [loss]}, 1.0, ABOUT)


def made_up():
    return [
        record(method, seed, loss + (seed - 2) / 100, 0.01 if "w" in method else 1.0)
        for method, loss in LOSSES.items()
        for seed in (1, 2, 3)
    ]


def test_the_table_has_the_best_without_a_rate_in_bold_and_the_gaps():
    lines = auto_table.table([*made_up(), record("adamw", 0, 0.1)]).splitlines()
    assert lines[0] == "|  | toy, cpu: loss, bits |"
    assert '| MADGRAD, `lr="auto"` | 2.005 ± 0.012 |' in lines
    assert "| DoG | **1.990 ± 0.012** |" in lines
    assert "| AdamW, best of a search | 1.900 ± 0.012 (lr 0.01) |" in lines
    first = next(line for line in lines if line.startswith("- MADGRAD"))
    assert "on 0 of 1; at worst +0.8 % behind (toy, cpu); within" in first
    assert first.endswith("fixed lr on 1 of 1.")


@pytest.mark.parametrize("preset", [".", "cpu"])
def test_the_page_has_the_tables_of_its_records(preset):
    folder = BENCHMARKS.parent / "docs" / "results" / "peers"
    records, broken = Runs(folder / preset).load()
    assert not broken
    assert auto_table.table(records.values()) in (folder / "README.md").read_text()


def test_a_method_that_diverged_is_never_the_best():
    lines = auto_table.table([*made_up(), *(record("prodigy", s, None) for s in (4, 5))])
    assert "| Prodigy | diverged |" in lines


def test_a_decay_of_0_is_that_of_the_command_line():
    """The hash of a run knows 0 from 0.0, so runs of the searches would be repeated."""
    options = auto_quality.parse(["--preset", "gpu", "--known", "/nowhere"])
    for _, one in auto_quality.wanted(options, {}):
        assert isinstance(one.decay, float)
        assert isinstance(one.lr, float)


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
@pytest.mark.parametrize("problem", ["imagenet", "fastmri"])
def test_the_runs_of_the_page_are_still_the_ones_it_asks_for(preset, problem):
    """A change of a preset must not change what the committed records mean."""
    folder = BENCHMARKS.parent / "docs" / "results" / "peers"
    done = Runs(folder / "cpu" if preset == "cpu" else folder).load()[0].values()
    options = auto_quality.parse(["--problems", problem, "--preset", preset])

    def problem_of(one):  # which rates were searched depends on what had been run
        return replace(one, method="", lr=0, seed=0)

    records = {problem_of(one.settings) for one in done if one.settings.problem == problem}
    assert records
    assert records <= {problem_of(one) for _, one in auto_quality.wanted(options, {})}


def test_the_earlier_problems_are_those_of_the_records():
    results = BENCHMARKS.parent / "docs" / "results"
    for problem, folder in (
        (earlier.imagenet(), "imagenet/resnet50"),
        (earlier.fastmri(), "fastmri-two-heads"),
    ):
        options = {one.settings.options for one in Runs(results / folder).load()[0].values()}
        assert options == {json.dumps(dict(problem.presets["gpu"].options), sort_keys=True)}


@pytest.mark.plots
def test_the_picture_is_drawn(tmp_path):
    runs = Runs(tmp_path)
    for one in made_up():
        runs.append(one)
    plot = importlib.import_module("plot_auto_peers")
    plot.main([str(tmp_path), str(tmp_path / "peers.png")])
    assert (tmp_path / "peers.png").stat().st_size > 10_000


@pytest.mark.parametrize(("method", "least"), [("MADGRAD", 1e4), ("MADGRADW", 10)])  # 985,000, 975
def test_the_estimate_runs_away_on_noise_alone_but_not_against_a_slope(method, least):
    """docs/auto.md: with more steps than coordinates. A slope stops it."""
    pytest.importorskip("prodigyopt")
    pytest.importorskip("dadaptation")
    noise = importlib.import_module("auto_noise")

    def grown(coordinates, steps, curvature=0.0):
        row = noise.Row(method, coordinates, curvature)
        return [noise.growth(row, seed, (steps,))[0] for seed in range(5)]

    assert statistics.median(grown(4, 2_000)) > least
    assert max(grown(4, 2_000, curvature=1.0)) < 100
    assert max(grown(20_000, 20)) < 1.1


def test_the_table_of_the_docs_is_that_of_the_data():
    pytest.importorskip("prodigyopt")
    pytest.importorskip("dadaptation")
    noise = importlib.import_module("auto_noise")
    rows = json.loads((BENCHMARKS / "auto" / "results" / "auto_noise.json").read_text())["rows"]
    page = (BENCHMARKS.parent / "docs" / "auto.md").read_text(encoding="utf-8")
    for row in rows:
        by_seed = row.pop("by_seed")
        assert f"{noise.line(noise.Row(**row), by_seed)}\n" in page
    assert [noise.Row(**row) for row in rows] == noise.ROWS
