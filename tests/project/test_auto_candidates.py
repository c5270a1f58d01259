"""The candidate rules for choosing a learning rate: their table, that they train and resume."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cubegrad.study import Task, methods
from cubegrad.study.records import Record, Runs, Settings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def candidates(monkeypatch):
    """The script; the methods it adds to the study are removed after the test."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    monkeypatch.delitem(sys.modules, "auto_candidates", raising=False)
    import auto_candidates

    return auto_candidates


def record(method, lr, seed, loss, auto_lr=None):
    settings = Settings("toy", "cpu", 2, 16, method, "flat", lr, 0.0, seed)
    curve = {"train_loss": [1.0, 0.5], "loss": [1.0, loss]}
    if auto_lr is not None:
        curve["auto_lr"] = [1e-3, auto_lr]
    status = "diverged" if loss is None else "finished"
    return Record(settings, status, curve, 1.0, {"metric": "loss", "higher_is_better": False})


def test_the_table_has_results_rates_and_gains_seed_for_seed(candidates):
    records = [
        *(record("madgrad", lr, 0, loss) for lr, loss in ((0.01, 0.5), (0.1, 0.1), (1.0, None))),
        *(record("madgrad", 0.1, seed, loss) for seed, loss in ((1, 0.2), (2, 0.4))),
        *(record("distance", 1.0, seed, loss, 0.08) for seed, loss in ((1, 0.1), (2, 0.3))),
        *(record("walk", 1.0, seed, None) for seed in (1, 2)),
        record("bet", 1.0, 1, 0.25, 0.02),
        record("bet", 1.0, 2, 0.25, 0.04),
        record("bet", 1.0, 3, None),
    ]
    head = "| candidate | toy loss (cpu, 2 epochs, flat, decay 0) |"
    assert candidates.table(records).splitlines() == [
        "Mean ± 2 standard errors (lr at the end):",
        "",
        head,
        "| --- | --- |",
        "| madgrad | 0.3 ± 0.2 (0.1) |",
        "| distance | 0.2 ± 0.2 (0.08) |",
        "| walk | 2 of 2 diverged |",
        "| bet | 0.25 ± 0 (0.03, 1 diverged) |",
        "",
        "Better than the best fixed lr by, seed for seed:",
        "",
        head,
        "| --- | --- |",
        "| distance | +0.1 ± 0 |",
        "| bet | +0.05 ± 0.2 |",
    ]


@pytest.mark.training
def test_two_epochs_of_digits_record_their_rates_and_are_not_run_again(
    candidates, tmp_path, capsys
):
    words = ["--epochs", "2", "--seeds", "2", "--candidates", "distance", "--out", str(tmp_path)]
    candidates.main(words)
    first = capsys.readouterr().out
    records, _ = Runs(tmp_path).load()
    assert [one.settings.seed for one in records.values()] == [1, 2]
    for one in records.values():
        rates = one.curve["auto_lr"]
        assert 0 < rates[0] < rates[1] < 1
        assert one.curve["accuracy"][-1] > 30  # of ten classes
    lines = (tmp_path / "records.jsonl").read_text()
    candidates.main(words)
    assert capsys.readouterr().out == first
    assert (tmp_path / "records.jsonl").read_text() == lines


def descend(candidates, parts, breaks):
    """Twenty steps on Σ i|x_i − b_i|; at each break a new optimizer loads the state of the old."""
    params = [torch.nn.Parameter(part) for part in torch.linspace(-1, 1, 7).split(4)]
    goals, slopes = torch.linspace(3, -2, 7).split(4), torch.arange(1, 8).split(4)

    def make():
        return candidates.Auto(params, parts, lr=1.0, weight_decay=0.0)

    optimizer = make()
    for step in range(20):
        if step in breaks:
            state = optimizer.state_dict()
            optimizer = make()
            optimizer.load_state_dict(state)
        for param, goal, slope in zip(params, goals, slopes, strict=True):
            param.grad = (param.detach() - goal).sign() * slope
        optimizer.step()
    return torch.cat([param.detach() for param in params]), optimizer.param_groups[0]["memories"][
        0
    ]["d"]


def test_every_candidate_moves_and_resumes_from_its_state_dict(candidates):
    ends = {}
    for name, parts in candidates.CANDIDATES.items():
        whole, d = descend(candidates, parts, ())
        parted, again = descend(candidates, parts, (3, 11))
        assert torch.equal(whole, parted), name
        assert torch.equal(d, again), name
        ends[name] = whole
    both = ends.pop("both")  # in so short a run it equals one of the two
    assert any(torch.equal(both, ends[name]) for name in ("distance", "walk"))
    assert len({tuple(end.tolist()) for end in ends.values()}) == len(ends)  # all differ


def test_the_distance_stays_below_the_true_one_on_a_convex_problem(candidates):
    _, d = descend(candidates, candidates.CANDIDATES["distance"], ())
    assert 0.01 < d < 4  # ‖x_0 − x*‖_∞


@pytest.mark.parametrize("own", [False, True], ids=["", "own-step"])
def test_a_scaled_problem_has_scaled_gradients(candidates, own):
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(model, batch):
        return model(batch).sum()

    def step(optimizer, batch):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    task = Task(model, lambda _: [], loss, lambda *_: {}, 1, step=step if own else None)
    task = replace(task, **candidates.scaled(task, 1000.0))
    before, batch = model.weight.item(), torch.ones(1, 1)
    for _ in range(2):
        if own:
            task.step(optimizer, batch)
        else:
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    assert model.weight.item() == pytest.approx(before - 2000.0)
