"""The benchmark of early progress at its toy size, and the page made of its records."""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "evidence" / "results" / "early_progress"


@pytest.fixture
def benchmark(monkeypatch):
    module = importlib.import_module("early_progress")
    # In this process: another one would spend seconds on importing torch.
    runner = importlib.import_module("shared.byte_gpt")
    monkeypatch.setattr(runner, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield module
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture
def methods():
    return importlib.import_module("early_methods")


def test_runs_are_recorded_once_and_tabulated(benchmark, tmp_path, capsys):
    words = ["--preset", "tiny", "--text", str(ROOT / "README.md"), "--out", str(tmp_path)]
    figure = tmp_path / "early.png"
    benchmark.main([*words, "--only", "main", "others"])
    benchmark.main([*words, "--only", "main", "others", "--plot", str(figure)])  # all runs are done
    shown = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    keys = [(r["method"], r["schedule"], r["lr"], r["seed"]) for r in records]
    assert len(set(keys)) == len(keys) == shown.count(" at last")
    assert {seed for *_, seed in keys} == {0, 1}
    assert all(r["validation"]["1"] < r["validation"]["0.05"] for r in records)  # it learns
    assert all(len(r["curve"]) == len(r["moves"]) == r["steps"] for r in records)
    assert all(trial.method in shown for trial in benchmark.EXPERIMENTS["others"])
    with Image.open(figure) as image:
        assert 800 <= image.width <= 4000


def test_the_page_has_the_tables_of_the_committed_records(benchmark):
    page = (ROOT / "docs" / "early_progress.md").read_text()
    tables = benchmark.tables(benchmark.load(RECORDS / "records.jsonl")).split("\n\n")[1::2]
    assert len(tables) == len(benchmark.EXPERIMENTS) + 2
    for table in tables:
        assert table.count("\n") >= 3
        assert table in page, f"docs/early_progress.md does not have the table\n{table}"


def test_adam_with_nothing_changed_is_adam(methods):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    both = methods.AdamWith([("weight", ours)], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    for _ in range(20):
        ours.grad = theirs.grad = torch.randn(5, generator=generator, dtype=torch.float64)
        for optimizer in both:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_step_sizes_of_madgrad_are_as_wanted(methods):
    wanted = methods.factors("10% linear", 1000)
    sizes = methods.as_in_madgrad(methods.as_in_adam(wanted))
    ratios = [size / one for size, one in zip(sizes[50:990], wanted[50:990], strict=True)]
    assert max(ratios) / min(ratios) < 1.02  # sums in place of integrals


@pytest.mark.parametrize(("scale", "root"), [(1.0, "MADGRAD"), (1000.0, "MADGRAD, square root")])
def test_the_square_root_has_madgrads_step_sizes_and_no_scale(methods, scale, root):
    """Gradients of ±1 give both roots the same steps; the square root ignores their size."""
    signs = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).sign().double()
    ends = []
    for name, size in (("MADGRAD, square root", 1.0), (root, scale)):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        options = {"eps": 0.0} if name == "MADGRAD" else {}
        optimizer = methods.METHODS[name]([("weight", weight)], lr=0.01, **options)
        for row in signs:
            weight.grad = size * row
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-8)
