"""MADGRADW's choices: their table, their page, the problems of the CPU, and that all of it runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cubegrad.study import Setup, train
from cubegrad.study.records import Record, Runs, Settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "madgradw"
PAGE = RESULTS / "choices.md"
TOY = Settings("toy", "cpu", 2, 16, "madgradw", "flat", 0.1, 0.0, 0)
ABOUT = {"metric": "loss", "higher_is_better": False, "unit": "bits"}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)


def records(method, losses, lr=0.1):
    for seed, loss in losses.items():
        one = replace(TOY, method=method, seed=seed, lr=lr)
        status = "diverged" if loss is None else "finished"
        yield Record(one, status, {"train_loss": [0.5], "loss": [loss]}, 1.0, ABOUT)


def test_a_variant_is_compared_with_madgradw_seed_for_seed():
    from choices_table import table

    found = [
        *records("madgradw", {0: 1.0, 6: 2.0, 7: 3.0}),
        *records("madgradw/q3", {0: 0.8, 6: 2.1}),
        *records("adamw", {0: 1.1, 6: 2.2, 7: 3.15}),
        *records("madgradw/free", {0: 1.1, 6: None}),
        *records("madgradw/x2", {6: 1.5}),
        *records("adamw", {0: 1.4}, lr=0.2),
        *records("adamw", {0: None}, lr=0.4),
    ]
    columns = [replace(TOY, seed=3), replace(TOY, epochs=9)]  # no run is as long as the second
    assert table(found, columns).splitlines() == [
        "| | toy, 2 epochs, bits |",
        "|---|---:|",
        "| AdamW | **−0.150 [−0.274, −0.026]**, 3 seeds |",
        "| MADGRADW | 2.000 |",
        "| q 3 | +0.050 (+0.200, −0.100) |",
        "| not held | diverged |",
        "| step × 2 | +0.500 |",
        "",
        "| toy, 2 epochs | lr 0.1 | lr 0.2 | lr 0.4 |",
        "|---|---:|---:|---:|",
        "| AdamW | 1.100 | 1.400 | diverged |",
    ]


def test_the_page_has_the_tables_of_its_records():
    import choices_table
    import go_on_from_adamw
    import madgradw_choices

    found, broken = Runs(RESULTS / "choices").load()
    assert not broken
    columns = madgradw_choices.columns(madgradw_choices.parse([]))
    for part in choices_table.table(found.values(), columns).split("\n\n"):
        assert part in PAGE.read_text(encoding="utf-8")
    rows = json.loads((RESULTS / "going_on.json").read_text())["rows"]
    assert go_on_from_adamw.table(rows) in PAGE.read_text(encoding="utf-8")


def test_the_summary_of_madgradw_has_the_means_of_these_records():
    import choices_table
    import madgradw_choices

    page = (ROOT / "docs" / "madgradw.md").read_text(encoding="utf-8")
    found = Runs(RESULTS / "choices").load()[0]
    results = choices_table.grouped(found.values())
    for column in madgradw_choices.columns(madgradw_choices.parse([])):
        runs = results.get(choices_table._common(column))
        if not runs:  # no run is as long
            continue
        seeds = runs["adamw"].keys() & runs["madgradw"].keys()
        adamw, ours = (
            sum(runs[name][seed].last(runs[name][seed].about["metric"]) for seed in seeds)
            / len(seeds)
            for name in ("adamw", "madgradw")
        )
        places = 2 if adamw > 50 else 3
        assert f"| {adamw:.{places}f} | {ours:.{places}f} | " in page
    rows = json.loads((RESULTS / "going_on.json").read_text())["rows"]
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        cells = [sum(row["losses"][span] for row in own) / len(own) for span in own[0]["losses"]]
        assert " | ".join(f"{cell:.3f}" for cell in cells) in page


def test_the_default_variants_are_one_run_a_seed_at_the_best_rate_of_adamw():
    import madgradw_choices as choices

    def wanted(*words):
        return [one for _, one in choices.wanted(choices.parse(["--preset", "cpu", *words]))]

    runs = wanted("--problems", "novels-gpt")
    assert len({one.method for one in runs}) * 2 == len(runs) == len({one.key for one in runs})
    assert {(one.lr, one.decay, one.device) for one in runs} == {(8e-3, 0.1, "cpu")}
    rates = wanted("--problems", "novels-gpt", "--variants", "q3,adamw", "--lrs", "1e-3,2e-3")
    assert {(one.method, one.lr) for one in rates if not one.seed} == {
        (method, lr) for method in ("madgradw/q3", "adamw") for lr in (1e-3, 2e-3)
    }


@pytest.mark.processes
def test_it_runs_and_resumes(tmp_path):
    pytest.importorskip("sklearn")
    command = [sys.executable, "benchmarks/evidence/madgradw_choices.py", "--out", str(tmp_path)]
    command += ["--preset", "cpu-confirm", "--problems", "digits", "--epochs", "1"]
    command += ["--variants", "adamw,madgradw,q3", "--seeds", "1"]

    def said():
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)

    first = said()
    found = Runs(tmp_path).load()[0]
    assert {one.settings.method for one in found.values()} == {"adamw", "madgradw", "madgradw/q3"}
    assert "| | digits, 1 epoch, % |" in first.stdout
    assert first.stderr.count("start digits") == 3
    second = said()
    assert second.stdout == first.stdout
    assert "start" not in second.stderr


def test_fine_tuning_begins_with_the_weights_that_the_first_run_has_kept(tmp_path, monkeypatch):
    import text_problems

    shape = text_problems.SHAPE._replace(
        width=16, layers=1, heads=2, context=8, batch=2, steps=2, validation_batches=1
    )
    monkeypatch.setattr(text_problems, "SHAPE", shape)
    monkeypatch.setitem(text_problems.PRETRAINING, "epochs", 2)
    monkeypatch.setitem(text_problems.PRETRAINING, "schedule", "polynomial:1")
    for folder, name in (("novels", "novels100.txt"), ("wikitext-2", "train.txt")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(bytes(range(256)) * 4)
    problem = text_problems.wikitext()
    one = Settings("wikitext-gpt", "cpu", 1, 2, "madgradw", "flat", 1e-3, 0.1, 1)
    first = train.run(problem, one, train.Place(tmp_path))
    assert first.last("loss") > 0
    kept = text_problems.pretrained(Setup(problem.presets["cpu"], 1, torch.device("cpu"), tmp_path))
    fresh = text_problems.byte_gpt.GPT(shape).state_dict()
    assert any(not torch.equal(fresh[name], kept[name]) for name in fresh)
    monkeypatch.setattr(text_problems, "novels", None)  # so that nothing is trained anew
    second = train.run(problem, replace(one, seed=2), train.Place(tmp_path))
    assert second.machine["start"] == first.machine["start"]
    assert second.curve != first.curve


def test_what_follows_adamw_runs_and_has_a_table(tmp_path, capsys):
    import go_on_from_adamw

    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_bytes(bytes(range(256)) * 32)
    words = ["--text", str(text), "--steps", "2", "--after", "10", "--seeds", "2"]
    go_on_from_adamw.main([*words, "--json", str(out)])
    report = json.loads(out.read_text())
    assert [(row["name"], row["seed"]) for row in report["rows"]] == [
        (name, seed) for seed in (0, 1) for name in go_on_from_adamw.NAMES
    ]
    adamw = report["rows"][0]
    assert [adamw["length"], adamw["cosine"]] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert go_on_from_adamw.table(report["rows"]) in capsys.readouterr().out


def test_what_goes_on_leaves_the_state_of_adamw_to_the_next_one():
    import go_on_from_adamw

    model = torch.nn.Linear(3, 2)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    adamw.step()
    before = adamw.state[model.weight]["exp_avg"].clone()
    for name in go_on_from_adamw.NAMES:
        go_on_from_adamw.going_on(name, adamw, list(model.parameters())).step()
        assert torch.equal(adamw.state[model.weight]["exp_avg"], before), name
