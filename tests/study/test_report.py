"""The report of made-up records: its tables, its plots, and a page that works offline."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from html_page import Page
from made_up_records import CIFAR10_RECORDS, cifar10_record

from cubegrad.study import StudyError, figures, report, styles, wording
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Estimate


def test_the_table_against_the_paper() -> None:
    (experiment,) = report.experiments(CIFAR10_RECORDS)
    head, madgrad, sgd = report.table(experiment)
    assert head == [
        "method", "lr", "decay", "test accuracy, %", "test loss", "train loss", "seeds", "search",
        "paper: lr", "decay", "result",
    ]  # fmt: skip
    assert madgrad == [
        "MADGRAD", "0.0001", "0.0001", "93.50", "0.25", "0.5", "2, 1 diverged",
        "2 runs, best lr at the edge", "0.00025", "0.0001", "–",
    ]  # fmt: skip
    # 90 and 92: mean 91, variance 2, two standard errors 2.
    assert sgd == [
        "SGD", "0.25", "0.0001", "91.0 ± 2.0", "0.25", "0.5", "2", "3 runs, 1 diverged",
        "0.1", "0.0001", "–",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mean", "error", "unit", "text"),
    [
        (98.7654, 0.345, "%", "98.77 ± 0.34"),
        (98.7654, None, "%", "98.77"),
        (0.0123456, None, "", "0.01235"),
        (0.0123456, 0.00078, "", "0.01235 ± 0.00078"),
        (123.4, 25.0, "", "123 ± 25"),
        (5.0, 0.0, "", "5"),
        (1e308, None, "%", "1e+308"),
        (1.234567e9, 2.5e7, "", "1.235e+09 ± 2.5e+07"),
        (0.0, float("inf"), "", "0 ± inf"),
        (1.5e-12, 2.5e-13, "", "1.5e-12 ± 2.5e-13"),
        (3e-9, 1.2e-7, "", "3e-09 ± 1.2e-07"),  # not 0.00000000 ± 0.00000012
        (1 / 3, 1e-14, "", "0.33333333 ± 1e-14"),
        (0.0004, 0.012, "", "0.000 ± 0.012"),  # a difference that is 0 within its error
        (0.0, 0.001, "", "0.0000 ± 0.0010"),
        (2.3456e-6, None, "%", "2.346e-06"),
        (0.0, None, "%", "0"),
        (123456.0, 1234.0, "", "123456 ± 1234"),
    ],
)
def test_numbers(mean: float, error: float | None, unit: str, text: str) -> None:
    assert report.number(Estimate(mean, error, 3), unit) == text


def test_a_method_that_diverged_everywhere_keeps_its_row() -> None:
    (experiment,) = report.experiments([*CIFAR10_RECORDS[:3], cifar10_record("adam", 0.1, 0, None)])
    adam = report.table(experiment)[2]
    assert adam[:6] == ["Adam", "–", "–", "–", "–", "–"]
    assert adam[7] == "1 runs, 1 diverged"


def test_notes_say_how_settings_were_chosen_and_where_they_ran() -> None:
    (experiment,) = report.experiments(CIFAR10_RECORDS)
    text = "\n".join(wording.notes(experiment))
    for words in (
        "preset gpu: 3 epochs, batch 128, flat, on cpu",
        "highest accuracy after the last epoch on the test set, as in the paper",
        "± is 2 standard errors",
        "PreAct ResNet152, 58,144,842 parameters, 300 epochs, batch 128",
        "the text has no final accuracies",
        "9 runs, 9.0 minutes of training on one GPU; cubegrad 0, torch 2.x, python 3.x",
        "commit abc; 2026-01-02.",
    ):
        assert words in text
    held = [replace(r, settings=replace(r.settings, hold_out=True)) for r in CIFAR10_RECORDS[:3]]
    (experiment,) = report.experiments([*held, *CIFAR10_RECORDS[3:5]])
    assert "on a held-out part of the training set" in "\n".join(wording.notes(experiment))
    several = [
        *CIFAR10_RECORDS,
        cifar10_record("adam", 0.1, 0, 90.0, "sqrt:1"),
    ]  # then each row names its schedule
    (experiment,) = report.experiments(several)
    assert "3 epochs, batch 128, on cpu" in wording.notes(experiment)[0]
    assert "SGD, flat" in [row[0] for row in report.table(experiment)]


def test_eight_methods_have_eight_styles() -> None:
    methods = ("madgrad", "sgd", "adam", "adagrad", "adamw", "mirror-madgrad")
    methods += ("madgrad-compact", "madgrad-auto")
    (experiment,) = report.experiments([cifar10_record(m, 0.1, 0, 50.0) for m in methods])
    assert len(set(figures.style(experiment.summaries).values())) == 8
    for kind in (styles.COLOURS, styles.LINES, styles.DARK, styles.DASHES):
        assert len(set(kind)) == len(styles.COLOURS)


def test_rows_follow_the_papers_figures() -> None:
    methods = ("da", "adagrad-da", "adagrad", "sgd-plain")
    both = [cifar10_record(m, 0.1, 0, 50.0, s) for s in ("flat", "tenthing:1-2") for m in methods]
    (experiment,) = report.experiments(both)
    lines = figures.rows(experiment.summaries)
    assert [[s.entry for s in line] for line in lines] == [
        [f"{m}@{schedule}" for m in ("sgd-plain", "adagrad", "da", "adagrad-da")]
        for schedule in ("flat", "tenthing:1-2")
    ]
    chosen = figures.style(experiment.summaries)
    assert chosen["da@flat"] == chosen["da@tenthing:1-2"]  # a method keeps its colour
    assert len(set(chosen.values())) == 4
    decays = [cifar10_record("sgd-plain", 0.1, 0, 50.0, f"sqrt:{b}") for b in (1, 10, 100)]
    (experiment,) = report.experiments(decays)
    assert len(figures.rows(experiment.summaries)) == 1
    assert len(set(figures.style(experiment.summaries).values())) == 3
    assert figures.names(experiment.summaries)["sgd-plain@sqrt:10"] == "SGD, no momentum, sqrt:10"
    pairs = (("adam", "tenthing:1-2"), ("dog", "flat"), ("prodigy", "cosine"))
    own = [cifar10_record(method, 0.1, 0, 50.0, schedule) for method, schedule in pairs]
    (experiment,) = report.experiments(own)  # beside the methods that follow the preset's schedule
    assert len(figures.rows(experiment.summaries)) == 1
    assert figures.names(experiment.summaries)["dog@flat"] == "DoG, flat"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "report"
    report.write(CIFAR10_RECORDS, folder, ["cubegrad compare cifar10 --preset gpu"])
    return folder


def test_all_files_are_written(written: Path) -> None:
    assert {path.name for path in written.iterdir()} == {
        "index.html", "report.md", "cifar10-gpu-curves.png", "cifar10-gpu-curves.svg",
        "cifar10-gpu-lr.png", "cifar10-gpu-lr.svg",
    }  # fmt: skip
    assert [path.name for path in written.parent.iterdir()] == ["report"]
    for path in written.glob("*.png"):
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert 800 <= width <= 4000
        assert 500 <= height <= 3000


def test_plots_show_each_method_test_left_and_training_right(written: Path) -> None:
    svg = (written / "cifar10-gpu-curves.svg").read_text(encoding="utf-8")
    for words in (
        "test accuracy, %",
        "training loss",
        "MADGRAD, lr 0.0001",
        "SGD, lr 0.25",
        "epoch",
    ):
        assert words in svg
    assert svg.index("test accuracy") < svg.index("training loss")
    rates = (written / "cifar10-gpu-lr.svg").read_text(encoding="utf-8")
    assert "learning rate" in rates
    assert ">SGD<" in rates


def test_the_page_is_one_file_that_loads_nothing(written: Path) -> None:
    text = (written / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.addresses == []
    assert not {"img", "link", "iframe"} & set(page.tags)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "A &lt;net&gt; &amp; more: 3 epochs at batch size 128" in text
    assert "<title>MADGRAD and 1 other on CIFAR-10</title>" in text
    assert "<pre>cubegrad compare cifar10 --preset gpu</pre>" in text


def test_the_page_has_caveats_at_the_number_and_the_papers_columns(written: Path) -> None:
    text = (written / "index.html").read_text(encoding="utf-8")
    assert "<span>91.0 ± 2.0</span></td>" in text
    tags = (
        "best lr at the edge of its grid",
        "1 of 2 seeds diverged and is left out",
        "one seed, so no error is known",
    )
    assert f"<span>93.50</span>{''.join(f'<small>{tag}</small>' for tag in tags)}</td>" in text
    assert '<th colspan="3">in the MADGRAD paper</th>' in text
    assert 'data-label="paper’s lr"><span>0.00025</span>' in text
    assert text.index(">MADGRAD</span>") < text.index(">SGD</span>")


def test_the_data_of_the_charts(written: Path) -> None:
    (group,) = Page((written / "index.html").read_text(encoding="utf-8")).charts
    assert [(e["label"], e["setting"]) for e in group["legend"]] == [
        ("MADGRAD", "lr 0.0001"), ("SGD", "lr 0.25"),
    ]  # fmt: skip
    test, train, search = group["charts"]
    assert test["title"] == "test accuracy, %"
    assert test["series"][1]["points"][2] == [3, 91.0, 2.0, "91.0 ± 2.0"]
    assert (train["title"], train["log"]) == ("training loss", True)
    assert search["series"][1]["points"] == [[0.1, 90.0, 0.0, "90.00"], [0.25, 92.0, 0.0, "92.00"]]
    assert search["series"][1]["lost"] == [0.5]


def test_the_markdown_has_the_table_and_points_at_the_plots(written: Path) -> None:
    text = (written / "report.md").read_text(encoding="utf-8")
    assert "| SGD | 0.25 | 0.0001 | 91.0 ± 2.0 |" in text
    for name in re.findall(r"!\[.*?\]\((.+?)\)", text):
        assert (written / name).exists()
    assert text.count("![") == 2
    assert "    cubegrad compare cifar10 --preset gpu" in text


@pytest.mark.plots
def test_a_new_report_replaces_the_old_and_touches_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    report.write(CIFAR10_RECORDS, folder)
    first = (folder / "index.html").read_bytes()
    report.write(CIFAR10_RECORDS, folder)
    assert (folder / "index.html").read_bytes() == first  # the same numbers, the same page
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.plots
def test_several_problems_in_one_directory_are_kept_apart(tmp_path: Path) -> None:
    other = [replace(r, settings=replace(r.settings, problem="other")) for r in CIFAR10_RECORDS]
    printed = report.write([*CIFAR10_RECORDS, *other], tmp_path / "report")
    assert printed.count("MADGRAD") == 2
    assert (tmp_path / "report" / "other-gpu-curves.png").exists()
    assert (tmp_path / "report" / "cifar10-gpu-curves.png").exists()


def test_nothing_to_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="has no finished run yet"):
        report.write([], tmp_path / "report")
    assert not list(tmp_path.iterdir())


@pytest.mark.plots
def test_a_lone_epoch_and_a_lone_method_can_be_drawn(tmp_path: Path) -> None:
    lone = cifar10_record("sgd", 0.1, 0, 90.0)
    curve = {name: values[:1] for name, values in lone.curve.items()}
    printed = report.write([replace(lone, curve=curve)], tmp_path / "report")
    assert "SGD" in printed
    every = [cifar10_record("adam", 0.1, 0, None)]
    assert "Adam" in report.write(every, tmp_path / "lost")


def test_metrics_beside_the_main_one_are_in_the_table() -> None:
    settings = Settings("p", "cpu", 1, 8, "madgrad", "flat", 0.1, 0.0, 0)
    about = {
        "description": "d",
        "metric": "loss",
        "higher_is_better": False,
        "unit": "",
        "paper": "",
    }
    curve: dict[str, list[float | None]] = {"train_loss": [2.0], "loss": [1.5], "bleu": [23.5]}
    plain = Record(settings, "finished", curve, 1.0, about, {})
    (experiment,) = report.experiments([plain])
    assert report.table(experiment)[0][3:5] == [
        "test loss",
        "train loss",
    ]  # older records name no other metrics
    (experiment,) = report.experiments([replace(plain, about={**about, "beside": ["bleu"]})])
    head, row = report.table(experiment)
    assert head[3:6] == ["test loss", "test bleu", "train loss"]
    assert row[3:6] == ["1.5", "23.5", "2"]


def test_the_plot_of_rates_shows_every_method() -> None:
    good, poor = [91.0, 92.0, 93.0, 10.0], [85.0, 80.0, 20.0]
    low, high = figures.visible([good, poor, []], higher_is_better=True)
    # Of the seven values, 10 is the worst and left out; 20 is in the better three quarters.
    assert low == pytest.approx(20 - 0.08 * 73)
    assert high == pytest.approx(93 + 0.08 * 73)
    low, high = figures.visible([[1.0] * 8, [5.0, 6.0, 7.0]], higher_is_better=False)
    assert (low, high) == (pytest.approx(1 - 0.08 * 5), pytest.approx(6 + 0.08 * 5))
    assert figures.visible([[2.0]], higher_is_better=False) == (pytest.approx(1.8), 2.2)
