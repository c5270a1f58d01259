"""The comparison of codes with a float32 state: its table, its page, that it runs and resumes."""

from pathlib import Path

import pytest

from cubegrad.study.records import Record, Runs, Settings

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
ABOUT = {"metric": "loss", "higher_is_better": False, "unit": "bits", "beside": ["accuracy"]}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.chdir(ROOT)


def record(method, seed, loss, accuracy=90.0):
    settings = Settings("toy", "cpu", 2, 16, method, "flat", 0.1, 0.0, seed)
    curve = {"train_loss": [0.5], "loss": [loss], "accuracy": [accuracy]}
    return Record(settings, "diverged" if loss is None else "finished", curve, 1.0, ABOUT)


def test_a_gain_is_taken_seed_for_seed_and_held_against_its_error():
    from compact_table import rows, table

    records = [
        *(record("madgrad", seed, loss) for seed, loss in ((1, 1.0), (2, 2.0), (9, 5.0))),
        *(record("madgrad-compact", seed, loss, 91.0) for seed, loss in ((2, 2.2), (1, 1.4))),
        *(record("mirror-madgrad", seed, loss) for seed, loss in ((1, 1.0), (2, 2.0))),
        *(record("mirror-madgrad-compact", seed, loss) for seed, loss in ((1, 1.1), (2, None))),
    ]
    loss, accuracy = rows(records)  # a run that diverged leaves no row, nor does a lone seed
    assert loss.gains == pytest.approx([-0.4, -0.2])
    assert not loss.holds
    assert (accuracy.metric, accuracy.gains, accuracy.holds) == ("accuracy", [1.0, 1.0], True)
    assert table(records).splitlines()[2:] == [
        "| toy, cpu | lr 0.1, 2 epochs | loss, bits | 2 | 1.5 ± 1.0 | 1.80 ± 0.80 | −0.30 ± 0.20 |"
        " no |",
        "| toy, cpu | lr 0.1, 2 epochs | accuracy, % | 2 | 90.00 | 91.00 | +1.00 | yes |",
    ]


def test_the_page_has_the_table_of_its_records():
    from compact_table import table

    records, broken = Runs(RESULTS / "compact").load()
    assert not broken
    assert table(records.values()) in (RESULTS / "compact" / "README.md").read_text()


def test_the_float32_runs_of_the_searches_are_taken_over(tmp_path):
    from compact_quality import jobs, parse

    words = ["--preset", "gpu", "--problems", "cifar10,iwslt14,bookwiki,fastmri"]
    runs = Runs(tmp_path)
    todo = jobs(parse([*words, "--out", str(tmp_path)]), runs)
    shared = ["compiled code of cifar10", "tokens"]
    assert [job.name for job in todo] == shared + [
        f"{name} madgrad-compact@{schedule} lr {lr:g} decay {decay:g} seed {seed}"
        for name, schedule, lr, decay in (
            ("cifar10", "tenthing:50%-75%", 2.5e-4, 1e-3),
            ("iwslt14", "inverse-sqrt:400", 0.05, 0),
            ("bookwiki", "polynomial:1000", 0.01, 0),
            ("fastmri", "tenthing:80%", 0.05, 0),
        )
        for seed in (1, 2, 3)
    ]
    taken = runs.load()[0].values()
    assert len(taken) == 12
    assert {one.settings.method for one in taken} == {"madgrad"}


@pytest.mark.processes
@pytest.mark.thorough
def test_an_epoch_of_digits_in_both_forms_is_not_run_again(tmp_path, capsys):
    from compact_quality import main

    words = ["--problems", "digits", "--epochs", "1", "--seeds", "2", "--out", str(tmp_path)]
    main(words)
    first = capsys.readouterr().out
    assert first.splitlines()[2].startswith(
        "| digits, cpu | lr 0.025, 1 epochs | accuracy, % | 2 |"
    )
    lines = (tmp_path / "records.jsonl").read_text()
    assert lines.count("\n") == 4
    main(words)
    assert capsys.readouterr().out == first
    assert (tmp_path / "records.jsonl").read_text() == lines
