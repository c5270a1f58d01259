"""The report's sentences, for made-up records."""

from dataclasses import replace

import pytest
from made_up_records import CIFAR10_RECORDS, cifar10_record

from cubegrad.study import report, wording
from cubegrad.study.experiments import Experiment
from cubegrad.study.records import Record


def experiment_of(results: dict[str, list[float | None]]) -> Experiment:
    """By method, the accuracy of seeds 0, 1, ...; None diverges."""
    records = [
        cifar10_record(method, 0.1, seed, accuracy)
        for method, values in results.items()
        for seed, accuracy in enumerate(values)
    ]
    (experiment,) = report.experiments(records)
    return experiment


def renamed(records: list[Record], problem: str, description: str) -> Experiment:
    changed = [
        replace(
            record,
            settings=replace(record.settings, problem=problem),
            about={**record.about, "description": description},
        )
        for record in records
    ]
    (experiment,) = report.experiments(changed)
    return experiment


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({"madgrad": [90.0, 92.0]}, "MADGRAD reaches a test accuracy of 91.0 ± 2.0 %."),
        (
            # Seed for seed 3 ± 12.7 and 3 ± 2.5: Student's t with two seeds.
            {"madgrad": [90.0, 92.0], "adam": [88.0, 88.0], "sgd": [86.8, 89.2]},
            "MADGRAD has the highest test accuracy, 91.0 ± 2.0 %; "
            "Adam cannot be told apart from it; SGD is behind.",
        ),
        (
            {"madgrad": [90.0, 92.0], "adam": [90.0, 92.0], "sgd": [89.0, 91.0]},
            "MADGRAD has the highest test accuracy, 91.0 ± 2.0 %; "
            "Adam cannot be told apart from it; SGD is behind.",
        ),
        (
            {"sgd": [90.0], "adam": [91.0]},
            "Adam has the highest test accuracy, 91.00 %; "
            "with fewer than two seeds in common, small differences mean little.",
        ),
        (
            {"sgd": [90.0, 92.0], "madgrad-auto": [50.0, 52.0], "adam": [40.0, 42.0]},
            "SGD has the highest test accuracy, 91.0 ± 2.0 %; "
            "MADGRAD (lr auto) and Adam are behind.",
        ),
        (
            {"sgd": [90.0, 92.0], "adam": [None]},
            "SGD has the highest test accuracy, 91.0 ± 2.0 %; Adam diverged.",
        ),
        ({"sgd": [None]}, "There is no result: every run diverged."),
    ],
)
def test_the_result_in_a_sentence(results: dict[str, list[float | None]], words: str) -> None:
    assert wording.verdict(experiment_of(results)) == words


def test_titles() -> None:
    records = CIFAR10_RECORDS
    (experiment,) = report.experiments(records)
    assert wording.title(experiment) == "MADGRAD and 1 other on CIFAR-10"
    mine = renamed(records, "mine", "my net on my data")
    assert wording.title(mine) == "MADGRAD and 1 other: my net on my data"
    assert wording.title(renamed(records, "mine", "long " * 20)) == "MADGRAD and 1 other on mine"
    assert wording.title(experiment_of({"sgd": [1.0]})) == "SGD on CIFAR-10"
    auto = experiment_of({"sgd": [1.0], "madgrad-auto": [2.0], "adam": [2.0]})
    assert wording.title(auto) == "MADGRAD (lr auto) and 2 others on CIFAR-10"


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("flat", "constant learning rate"),
        ("tenthing:60%-85%", "learning rate divided by 10 at 60 % and 85 % of the run"),
        ("tenthing:30-60-90", "learning rate divided by 10 at epoch 30, 60 and 90"),
        ("polynomial:400", "warm-up over 400 steps, then learning rate falling linearly to 0"),
        ("warmup:5%", "warm-up over 5 % of the run, then constant learning rate"),
        ("cosine", "learning rate falling to 0 along a cosine"),
        ("of another version:1", "of another version:1"),
        ("tenthing", "tenthing"),
    ],
)
def test_schedules_in_words(schedule: str, words: str) -> None:
    assert wording.schedule_words(schedule) == words


def test_uncommitted_changes_are_named() -> None:
    records = [
        replace(record, machine={**record.machine, "commit": commit})
        for record, commit in zip(CIFAR10_RECORDS, ["abc-dirty", "abc"] * 5, strict=False)
    ]
    assert "; commit abc with uncommitted changes and abc; " in wording.origin(records)


def test_runs_from_different_weights_are_named() -> None:
    def note_of(*starts: str | None) -> list[str]:
        records = [
            replace(record, machine={**record.machine, "start": start})
            for record, start in zip(CIFAR10_RECORDS, starts * 50, strict=False)
        ]
        (experiment,) = report.experiments(records)
        return [line for line in wording.notes(experiment) if "sets of weights" in line]

    (note,) = note_of("aa", "bb", None)
    assert "2 different sets of weights (aa, bb)" in note
    assert note_of("aa") == note_of("aa", None) == note_of(None) == []
