"""The runs of the evidence: where a search goes, what is run next, and that it resumes."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import pytest

from cubegrad.study import methods
from cubegrad.study.records import Record, Runs

ROOT = Path(__file__).parents[2]
ABOUT = {"metric": "accuracy", "higher_is_better": True, "unit": "%"}


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    return importlib.import_module("evidence_runs")


@pytest.fixture
def plan(runs):
    """imagenet has an inner decay; its metric is an accuracy."""
    options = runs.parse(["--preset", "gpu"])
    return runs.plan_of(runs.Trial("imagenet", 1), options)


def record(settings, accuracy):
    curve = {"train_loss": [1.0], "accuracy": [accuracy]}
    status = "diverged" if accuracy is None else "finished"
    return Record(settings, status, curve, 1.0, ABOUT)


def hill(lr, decay, lr_at=0.25, decay_at=0.005):
    """Its top is beyond both edges of SGD's first grid, on a slope across the axes."""
    x, y = math.log10(lr / lr_at), math.log10(decay / decay_at)
    return 60 - 5 * (x**2 + y**2 + x * y)


def climb(runs, plan, method, accuracy, elsewhere=()):
    """The setting that the search ends with, and everything that it has run."""
    entry, done = methods.entry(method, plan.preset), {}
    for _ in range(30):
        missing, best = runs.search(plan, entry, done, elsewhere)
        if not missing:
            return best, {(one.settings.lr, one.settings.decay) for one in done.values()}
        assert best is None
        done |= {one.key: record(one, accuracy(one.lr, one.decay)) for one in missing}
    raise AssertionError("the search does not end")


def test_a_search_ends_where_all_neighbours_are_worse(runs, plan):
    best, tried = climb(runs, plan, "sgd", hill)
    assert best == (0.25, 0.005)
    assert {(0.1, 0.005), (0.5, 0.005), (0.25, 0.0025), (0.25, 0.01)} <= tried
    assert len(tried) < 15  # a grid that reaches as far has 5 x 6 settings


def test_a_search_begins_where_runs_of_another_length_had_their_best(runs, plan):
    entry = methods.entry("sgd", plan.preset)

    def known(lr, decay, accuracy, **changes):
        one = plan.settings(entry, (lr, decay), 0, hold_out=False)
        return record(replace(one, **{"epochs": 10, **changes}), accuracy)

    elsewhere = [
        known(0.25, 0.005, 50.0),
        known(0.5, 0.005, 49.0),
        known(0.025, 1e-4, 60.0, epochs=5),  # shorter
        known(0.01, 1e-4, 60.0, epochs=plan.preset.epochs),  # of this length
        known(0.01, 1e-4, 60.0, seed=1),
        known(0.01, 1e-4, 60.0, method="adam"),
        known(0.01, 1e-4, 60.0, hold_out=True),
    ]
    missing, best = runs.search(plan, entry, {}, elsewhere)
    around = {(0.25, 0.005), (0.1, 0.005), (0.5, 0.005), (0.25, 0.0025), (0.25, 0.01)}
    assert {(one.lr, one.decay) for one in missing} == around
    assert {one.epochs for one in missing} == {plan.preset.epochs}
    assert best is None
    assert climb(runs, plan, "sgd", hill, elsewhere) == ((0.25, 0.005), around)
    assert climb(runs, plan, "sgd", hill, [known(0.25, 0.005, None)]) == climb(
        runs, plan, "sgd", hill
    )


def test_a_search_ends_if_every_rate_diverges(runs, plan):
    best, tried = climb(runs, plan, "sgd", lambda *_: None)
    assert best is None
    assert min(lr for lr, _ in tried) == 2.5e-4  # six values below 0.025
    assert climb(runs, plan, "madgrad-auto", lambda *_: None) == (None, {(1.0, 5e-4)})


def test_adamw_begins_with_decay_and_mirror_madgrad_with_the_rates_of_madgrad(runs):
    options = runs.parse(["--preset", "gpu", "--problems", "iwslt14", "--known", "/nowhere"])
    first = {}
    for _, one in runs.wanted(options, {}):
        first.setdefault(one.method, set()).add((one.lr, one.decay))
    assert {decay for _, decay in first["adamw"]} == {0.01}
    for problem, decay in (("cifar10", 0.5), ("imagenet", 0.25)):
        plan = runs.plan_of(runs.Trial(problem, 1), options)
        missing, _ = runs.search(plan, methods.entry("adamw", plan.preset), {})
        assert {one.decay for one in missing} == {decay}
    assert first["mirror-madgrad"] == first["madgrad"]
    assert len(first["madgrad"]) == 3
    bookwiki = runs.plan_of(runs.Trial("bookwiki", 1), options)
    entry = methods.entry("mirror-madgrad", bookwiki.preset)
    assert {one.lr for one in runs.search(bookwiki, entry, {})[0]} == {0.025, 0.05, 0.1}


def test_the_seeds_wait_for_the_search_and_codes_take_the_choice(runs):
    options = runs.parse(["--preset", "gpu", "--problems", "imagenet", "--known", "/nowhere"])
    done = {}
    for _ in range(30):
        todo = [one for _, one in runs.wanted(options, done) if one.key not in done]
        search = [one for one in todo if one.seed == 0]
        if not search:
            break
        chosen = {one.method for one in todo if one.seed}
        assert not chosen & {one.method for one in search}
        done |= {one.key: record(one, hill(one.lr, one.decay, 1e-3, 5e-4)) for one in search}
    compact = [one for one in todo if one.method == "madgrad-compact"]
    assert [(one.lr, one.decay, one.seed) for one in compact] == [
        (1e-3, 5e-4, seed) for seed in (1, 2, 3, 4, 5)
    ]
    assert {one.seed for one in todo} == {1, 2, 3, 4, 5}


@pytest.mark.processes
def test_it_runs_a_problem_and_resumes(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.setattr(runs, "SEARCHED", ("madgrad",))
    monkeypatch.setitem(runs.TRIALS, "cpu", (runs.Trial("digits", 5, seeds=1),))
    command = ["--epochs", "1", "--out", str(tmp_path), "--known", str(tmp_path / "none")]
    runs.main(command)
    found = Runs(tmp_path / "digits").load()[0]
    assert {one.settings.method for one in found.values()} == {"madgrad", "madgrad-compact"}
    assert "MADGRAD, compact" in capsys.readouterr().out
    runs.main(command)
    captured = capsys.readouterr()
    assert "start" not in captured.err
    assert Runs(tmp_path / "digits").load()[0].keys() == found.keys()
    other = tmp_path / "other"  # which takes over what is known and leads to the choice
    runs.main([*command[:2], "--out", str(other), "--known", str(tmp_path)])
    assert "start" not in capsys.readouterr().err
    taken = Runs(other / "digits").load()[0]
    assert taken.keys() <= found.keys()
    assert {key for key, one in found.items() if one.settings.seed} <= taken.keys()


def test_runs_from_weights_of_another_machine_are_not_taken_over(runs, tmp_path):
    for problem in ("imagenet", "finetune"):
        plan = runs.plan_of(runs.Trial(problem, 1), runs.parse(["--preset", "gpu"]))
        entry = methods.entry("sgd", plan.preset)
        first = runs.search(plan, entry, {})[0]
        known, out = (tmp_path / name for name in (f"known-{problem}", problem))
        runs.Folders(known).append(record(first[0], 50.0))
        options = ["--preset", "gpu", "--problems", problem, "--methods", "sgd"]
        options += ["--known", str(known), "--out", str(out)]
        runs.jobs(runs.parse(options), runs.Folders(out))
        taken = runs.Folders(out).load()[0].keys()
        assert taken == ({first[0].key} if problem == "imagenet" else set())


def test_the_committed_runs_are_complete(runs, tmp_path, monkeypatch):
    """The same command, from the records, has nothing to do, and chooses what the tables have.

    Fine-tuning is not among them: each machine pretrains for itself. Nor is MADGRADW, which has not
    been run on a GPU yet.
    """
    monkeypatch.delitem(runs.AT_ITS_BEST, "adamw")
    problems = "imagenet,digits,cifar10,iwslt14,bookwiki,fastmri"
    words = ["--preset", "gpu", "--problems", problems, "--out", str(tmp_path)]
    options = runs.parse(words)
    assert [job.name for job in runs.jobs(options, runs.Folders(options.out))] == []
    rows = importlib.import_module("evidence_rows")
    tables = {one.settings.problem: one for one in rows.comparisons(rows.load(options.known))[0]}
    done = runs.Folders(options.out).load()[0]
    elsewhere = runs.known(options.known, ("auto",)).values()
    for trial in runs.shared_device.chosen(runs.TRIALS["gpu"], problems):
        plan = runs.plan_of(trial, options)
        for method in runs.SEARCHED:
            _, best = runs.search(plan, methods.entry(method, plan.preset), done, elsewhere)
            assert best == tables[trial.problem].row(method).summary.best, (trial.problem, method)
