"""Reports of odd records: strange names, texts and numbers, and two reports at the same time."""

import html
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_up_records import ABOUT, CIFAR10_RECORDS, MACHINE

from cubegrad.study import StudyError, cli, commands, figures, report, wording
from cubegrad.study.records import Record, Runs, Settings, to_line

NASTY = "<script>alert(1)</script> & \"q\" $\\frac{$ | 'a'"


TURNS = "\u202e\u2066\x85"
FORGED = (
    "a net\r\n\r\n# Better\u2028![x](http://a.example/b.png)\n| a |\n|---|\n\x1b[31m <b>\x00"
    + TURNS
)
CONTROLS = {*map(chr, [*range(10), *range(11, 32), *range(127, 160)]), *TURNS, "\u2028"}


def records_of(
    problem: str, records: Sequence[Record] = CIFAR10_RECORDS, **settings: object
) -> list[Record]:
    changes = {"problem": problem, **settings}
    return [replace(one, settings=replace(one.settings, **changes)) for one in records]


def record_of(lr: float, seed: int, train: Sequence[float], loss: Sequence[float]) -> Record:
    settings = Settings("odd", "cpu", 3, 8, "sgd", "flat", lr, 0.0, seed)
    curve: dict[str, list[float | None]] = {"train_loss": list(train), "loss": list(loss)}
    return Record(settings, "finished", curve, 1.0, {}, MACHINE)


@pytest.mark.plots
@pytest.mark.parametrize("name", ["{outside}/evil", "../evil"])
@pytest.mark.parametrize("field", ["problem", "preset"])
def test_a_name_of_a_record_is_never_a_path(
    name: str, field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside, runs = tmp_path / "outside", tmp_path / "a" / "runs"
    outside.mkdir()
    runs.mkdir(parents=True)
    change = {field: name.format(outside=outside)}
    evil = [replace(one, settings=replace(one.settings, **change)) for one in CIFAR10_RECORDS]
    lines = [to_line(one) for one in [*evil, *CIFAR10_RECORDS]]
    (runs / "records.jsonl").write_text("".join(lines))
    assert cli.main(["report", str(runs)]) == 0
    out, errors = capsys.readouterr()
    assert errors.count(": left out; rerun the command that wrote it\n") == len(evil)
    assert "MADGRAD" in out
    found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    plots = {f"cifar10-gpu-{kind}.{end}" for kind in ("lr", "curves") for end in ("png", "svg")}
    assert found == {"records.jsonl", "index.html", "report.md"} | plots
    assert not list(outside.iterdir())


@pytest.mark.plots
def test_plots_of_a_name_with_dots_and_spaces_have_its_name(tmp_path: Path) -> None:
    report.write(records_of("my net1.5"), tmp_path / "report")
    names = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert names == {"my net1.5-gpu-curves.png", "my net1.5-gpu-lr.png"}
    text = (tmp_path / "report" / "report.md").read_text()
    assert "![curves](my%20net1.5-gpu-curves.png)" in text


@pytest.mark.plots
def test_two_lengths_of_one_problem_have_plots_of_their_own(tmp_path: Path) -> None:
    longer = records_of("cifar10", epochs=30)
    other = records_of("CIFAR10")  # the same file on a file system that ignores case
    report.write([*CIFAR10_RECORDS, *longer, *other], tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    linked = re.findall(r"!\[curves\]\((.+?)\)", text)
    assert linked == [
        "cifar10-gpu-curves.png", "cifar10-gpu-2-curves.png", "CIFAR10-gpu-3-curves.png",
    ]  # fmt: skip
    assert all((tmp_path / "report" / name).exists() for name in linked)


@pytest.mark.plots
def test_texts_of_a_record_cannot_forge_parts_of_a_report(tmp_path: Path) -> None:
    metric, method = "![m](http://a.example/c.png) <i>", "_[m](http://a.example/d)"
    about = {**ABOUT, "description": FORGED, "metric": metric, "unit": "*%*"}
    odd = []
    for one in CIFAR10_RECORDS:
        curve = {metric if name == "accuracy" else name: v for name, v in one.curve.items()}
        settings = replace(one.settings, problem="odd", method=method)
        machine = {**MACHINE, "kind": FORGED, "start": f"{FORGED} {one.settings.seed}"}
        odd.append(replace(one, settings=settings, about=about, machine=machine, curve=curve))
    report.write(odd, tmp_path, ["cubegrad compare 'a\n# b'", "cubegrad \x1b[31m \u202e\x85"])
    text = (tmp_path / "report.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert [line[:2] for line in headings] == ["# ", "##"]
    assert "a net \\# Better !\\[x\\](http://a.example/b.png) | a | |---| \\[31m" in headings[0]
    assert re.findall(r"(?<!\\)\[(.*?)]", text) == ["curves", "learning rates"]
    assert re.findall(r"(?<!\\)[<`]|(?<!\\)\*", text) == []
    page = (tmp_path / "index.html").read_text()
    assert CONTROLS & {*text, *page} == set()
    assert "a net # Better ![x](http://a.example/b.png) | a | |---| [31m &lt;b&gt;</h1>" in page
    for path in tmp_path.glob("*.svg"):
        shown = "".join(ElementTree.parse(path).getroot().itertext())  # refuses control characters
        assert "a net # Better ![x](" in shown or "odd-gpu: the search" in shown
        assert method in shown  # in the legend, despite its "_"


@pytest.mark.parametrize(
    "text",
    [
        NASTY, FORGED, "# a", "> a", "- a", "+ a", "1. a", "2) a", "1.", "3-layer net", "0.5 of it",
        "---", "***", "___", "~~~", "```", "    a", "=", "~~a~~", "_a_ x_y __b__", "a_*_b", "&lt;",
        "a  \nb", "\\*a*", "\\", "[a]: b", "[^1]", "<!-- a", "http:<b>",
    ],
)  # fmt: skip
def test_any_text_is_shown_as_it_is(text: str) -> None:
    markdown_it = pytest.importorskip("markdown_it", reason="needs markdown-it-py")
    renderer = markdown_it.MarkdownIt("gfm-like", {"linkify": False})
    shown = html.escape(wording.one_line(text), quote=False).replace('"', "&quot;")
    assert renderer.render(report.paragraph(text)) == f"<p>{shown}</p>\n"
    assert f"<td>{shown}</td>" in renderer.render(report.markdown([["head"], [text]]))
    assert renderer.render(f"# {report.escaped(text)}") == f"<h1>{shown}</h1>\n"


@pytest.mark.plots
def test_a_record_without_a_description_is_reported(tmp_path: Path) -> None:
    bare = [replace(record_of(0.1, 0, [1.0], [2.0]), machine={})]
    assert "SGD" in report.write(bare, tmp_path / "report")
    assert "no date." in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.plots
@pytest.mark.parametrize(
    ("records", "cells"),
    [
        ([record_of(0.1, 0, [1.0], [1e308])], ["1e+308", "1"]),
        (
            [record_of(0.1, s, [1e308] * 3, [v] * 3) for s, v in enumerate((1e308, 1.5e308))],
            ["1.25e+308 ± 5e+307", "1e+308"],
        ),
        (
            [record_of(0.1, s, [1.0], [v]) for s, v in enumerate((-1.7e308, 1.7e308))],
            ["0 ± inf", "1"],
        ),
        (
            [record_of(0.1, s, [5e-324] * 3, [v] * 3) for s, v in enumerate((1e-300, 3e-300))],
            ["2e-300 ± 2e-300", "4.941e-324"],
        ),
        ([record_of(0.1, 0, [-1.0, 0.0, -3.0], [-1.0, -2.0, -3.0])], ["-3", "-3"]),
        ([record_of(0.1, 0, [0.0] * 3, [0.0] * 3)], ["0", "0"]),
    ],
    ids=["one", "two", "both signs", "tiny", "below zero", "zero"],
)
def test_any_finite_number_can_be_reported(
    records: list[Record], cells: list[str], tmp_path: Path
) -> None:
    """Warnings are errors here, matplotlib's among them."""
    report.write(records, tmp_path / "report")
    (experiment,) = report.experiments(records)
    assert report.table(experiment)[1][3:5] == cells
    assert (tmp_path / "report" / "index.html").stat().st_size > 10_000


@pytest.mark.plots
def test_a_number_too_large_to_draw_does_not_hide_the_others(tmp_path: Path) -> None:
    fine = [record_of(lr, 0, [3.0, 2.0, 1.0], [3.0, 2.0, 1.0 + lr]) for lr in (0.1, 0.2)]
    wild = record_of(0.5, 0, [1e308, 2.0, 1e308], [1e300, 2.0, 1e308])
    (experiment,) = report.experiments([*fine, wild])
    assert experiment.summaries[0].best == (0.1, 0.0)
    report.write([*fine, wild], tmp_path / "report")
    extreme = [record_of(lr, 0, [1.0], [1.0]) for lr in (5e-324, 1e-3, 1e308)]
    report.write(extreme, tmp_path / "report")


def test_seeds_with_other_metrics_are_reported_by_what_they_share(tmp_path: Path) -> None:
    one, two = (record_of(0.1, seed, [2.0, 1.0], [4.0, 3.0]) for seed in (0, 1))
    two.curve["bleu"] = [30.0]
    one.curve["top5"], two.curve["top5"] = [1.0, 5.0], [7.0]  # not after each epoch
    (experiment,) = report.experiments([one, two])
    (summary,) = experiment.summaries
    assert summary.final.keys() == {"train_loss", "loss", "top5"}
    assert summary.final["top5"].mean == 6.0
    assert "SGD" in report.write([one, two], tmp_path / "report")


@pytest.mark.plots
def test_two_reports_at_the_same_time_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, save, inner = tmp_path / "report", figures.save, []

    def saving(figure, path: Path) -> None:
        save(figure, path)
        if not inner:
            inner.append(1)
            inner.append(report.write(CIFAR10_RECORDS, folder))

    monkeypatch.setattr(figures, "save", saving)
    assert report.write(CIFAR10_RECORDS, folder) == inner[1]
    assert list(tmp_path.iterdir()) == [folder]
    assert len(list(folder.iterdir())) == 6


def test_drafts_of_killed_reports_are_deleted(tmp_path: Path) -> None:
    for name, age in ((".report.old", 7200), (".report.now", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    report.write(CIFAR10_RECORDS, tmp_path / "report")
    assert {path.name for path in tmp_path.iterdir()} == {"report", ".report.now"}


@pytest.mark.plots
@pytest.mark.parametrize("command", ["sweep", "compare"])
def test_the_directory_is_held_until_its_report_is_there(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], report.write

    def writing(*arguments: object) -> str:
        with pytest.raises(StudyError, match="in use by another run"):
            Runs(tmp_path / "out").locked().__enter__()
        written.append(1)
        return write(*arguments)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands.report, "write", writing)
    words = "toy_problem:problem --methods sgd --lr 0.1 --workers 1 --seeds 1 --out out"
    assert cli.main([command, *words.split()]) == 0
    assert written == [1]
