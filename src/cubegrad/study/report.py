"""Statistics -> tables, plots, and one self-contained page (see page.py)."""

import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cubegrad.study import figures, page, statistics, styles
from cubegrad.study.files import writing
from cubegrad.study.methods import METHODS, PAPER, PaperProblem, lr_text
from cubegrad.study.problem import StudyError
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Estimate, Judge, Summary

Rows = list[list[str]]  # the first is the header

# Defaults for records that do not describe their problem.
UNKNOWN: dict[str, Any] = {
    "description": "",
    "metric": "loss",
    "higher_is_better": False,
    "unit": "",
    "paper": "",
}


@dataclass(frozen=True)
class Experiment:
    """Runs that share a table: one problem at one length on one kind of device."""

    settings: Settings
    about: dict[str, Any]
    records: list[Record]
    summaries: list[Summary]

    @property
    def judge(self) -> Judge:
        return Judge(self.about["metric"], self.about["higher_is_better"])

    @property
    def unit(self) -> str:
        return str(self.about["unit"])

    @property
    def paper(self) -> PaperProblem | None:
        return PAPER.get(self.about["paper"])

    @property
    def name(self) -> str:
        return f"{self.settings.problem}-{self.settings.preset}"


def experiments(records: Iterable[Record]) -> list[Experiment]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        s = record.settings
        group = (s.problem, s.preset, s.epochs, s.batch, s.device, s.options)
        groups.setdefault(group, []).append(record)
    result = []
    for members in groups.values():
        about = UNKNOWN | members[0].about
        judge = Judge(about["metric"], about["higher_is_better"])
        entries = statistics.by_entry(members)
        ordered = sorted(entries, key=_sort_key)
        summaries = [statistics.summarise(entries[entry], judge) for entry in ordered]
        result.append(Experiment(members[0].settings, about, members, summaries))
    return result


def _sort_key(entry: str) -> tuple[str, int]:
    """Schedules together, methods in the order of METHODS."""
    method, _, schedule = entry.partition("@")
    return schedule, list(METHODS).index(method) if method in METHODS else len(METHODS)


def number(point: Estimate | None, unit: str) -> str:
    """`98.70 ± 0.31`, with two digits of the error."""
    if point is None:
        return "–"
    large = max(abs(point.mean), point.error or 0.0) >= 1e7  # too many digits for a table
    if not point.error:
        return f"{point.mean:.2f}" if unit == "%" and not large else f"{point.mean:.4g}"
    decimals = 0 if large else max(1 - math.floor(math.log10(point.error)), 0)
    if large or decimals > 8:
        return f"{point.mean:.4g} ± {point.error:.2g}"
    return f"{point.mean:.{decimals}f} ± {point.error:.{decimals}f}"


def table(experiment: Experiment) -> Rows:
    """Best settings and results, and the paper's if it has this problem."""
    judge, paper = experiment.judge, experiment.paper
    beside = experiment.about.get("beside", ())
    metrics = list(dict.fromkeys([judge.metric, *beside, "loss", "train_loss"]))
    shown = [m for m in metrics if any(m in s.final for s in experiment.summaries)]
    heads = {
        m: f"test {m}{f', {experiment.unit}' if m == judge.metric and experiment.unit else ''}"
        for m in shown
    }
    heads |= {"train_loss": "train loss"}
    head = ["method", "lr", "decay", *(heads[m] for m in shown), "seeds", "search"]
    labels = styles.names(experiment.summaries)
    rows = [head + (["paper: lr", "decay", "result"] if paper else [])]
    for summary in experiment.summaries:
        best = _setting(summary)
        results = [
            number(summary.final.get(m), experiment.unit if m == judge.metric else "")
            for m in shown
        ]
        row = [labels[summary.entry], *best, *results, _seeds(summary), _search(summary)]
        rows.append(row + (_paper(paper, summary.entry) if paper else []))
    return rows


def _setting(summary: Summary) -> list[str]:
    if summary.best is None:
        return ["–", "–"]
    lr, decay = summary.best
    estimate = [point.mean for point in summary.estimated_lr()[-1:]]
    return [lr_text(summary.method, lr, *estimate), f"{decay:g}"]


def _seeds(summary: Summary) -> str:
    lost = f", {summary.diverged} diverged" if summary.diverged else ""
    return f"{len(summary.seeds)}{lost}"


def _search(summary: Summary) -> str:
    if not summary.searched:
        return "none"
    lost = f", {summary.search_diverged} diverged" if summary.search_diverged else ""
    lost += f", {summary.search_cut} stopped early" if summary.search_cut else ""
    edge = f", best {' and '.join(summary.at_edge)} at the edge" if summary.at_edge else ""
    return f"{summary.searched} runs{lost}{edge}"


def _paper(paper: PaperProblem, entry: str) -> list[str]:
    setting = paper.best.get(entry.partition("@")[0])
    if setting is None:
        return ["–", "–", "–"]
    result = "–" if setting.result is None else f"{setting.result:g}"
    return [f"{setting.lr:g}", f"{setting.decay:g}", result]


def plain(rows: Rows) -> str:
    """For a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def notes(experiment: Experiment) -> list[str]:
    """What the numbers mean, and how they were made."""
    judge, s = experiment.judge, experiment.settings
    held = any(record.settings.hold_out for record in experiment.records)
    split = "a held-out part of the training set" if held else "the test set, as in the paper"
    way = "highest" if judge.higher_is_better else "lowest"
    schedules = {record.settings.schedule for record in experiment.records}
    schedule = f", {s.schedule}" if len(schedules) == 1 else ""  # else the table names them
    lines = [
        f"{experiment.about['description']}; "
        f"preset {s.preset}: {s.epochs} epochs, batch {s.batch}{schedule}, on {s.device}.",
        f"Each method's learning rate and decay are those of the {way} {judge.metric} after the "
        f"last epoch on {split}. Results are means over seeds that the search did not use, if "
        "there are any; ± is 2 standard errors. Train loss is the mean over the last epoch.",
    ]
    if figures.estimated(experiment.summaries):
        lines.append(
            "An lr of auto is estimated while training instead of searched; the value beside it "
            "is the mean estimate after the last epoch, before the schedule."
        )
    if any(summary.at_edge for summary in experiment.summaries):
        lines.append("A best value at the edge means that the search reached its limit (--widen).")
    if any(summary.search_cut for summary in experiment.summaries):
        lines.append(
            "Runs stopped early are those that successive halving gave up (--search halving); the "
            "choice is among the others."
        )
    if experiment.paper:
        p = experiment.paper
        lines.append(
            f"The paper: {p.architecture}, {p.length}, batch {p.batch}, {p.schedule}, "
            f"{p.seeds} seeds; {p.result}."
        )
    return [*lines, origin(experiment.records)]


def origin(records: Sequence[Record]) -> str:
    """Machine, versions, dates and training time."""
    kinds, dates = _all(records, "kind"), sorted(_all(records, "date"))
    versions = ", ".join(
        f"{name} {'/'.join(_all(records, name))}" for name in ("cubegrad", "torch", "python")
    )
    minutes = sum(record.seconds for record in records) / 60
    commits = "/".join(_all(records, "commit")) or "none"
    days = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "no date"
    return (
        f"{len(records)} runs, {minutes:.1f} minutes of training on {' / '.join(kinds)}; "
        f"{versions}; commit {commits}; {days}."
    )


def _all(records: Sequence[Record], name: str) -> list[str]:
    """The distinct values of a field of `Record.machine`."""
    values = (record.machine.get(name) for record in records)
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def write(records: Iterable[Record], folder: Path, commands: Sequence[str] = ()) -> str:
    """Write tables, plots and page into `folder`; returns the tables for a terminal."""
    grouped = experiments(records)
    if not grouped:
        raise StudyError(f"{folder.parent} has no finished run yet; run the sweep again first")
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_old_drafts(folder)
        # A failure leaves the old report intact, and two reports at once do not mix their drafts.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            tables = _draft(grouped, Path(scratch), commands)
            folder.mkdir(exist_ok=True)
            for path in Path(scratch).iterdir():
                path.replace(folder / path.name)
    return "\n\n".join(map(plain, tables))


def _remove_old_drafts(folder: Path) -> None:
    """Remove what killed processes left. A draft of the last hour may still be in use."""
    for draft in folder.parent.glob(f".{folder.name}.*"):
        if time.time() - draft.stat().st_mtime > 3600:
            shutil.rmtree(draft, ignore_errors=True)


def _draft(experiments: Sequence[Experiment], folder: Path, commands: Sequence[str]) -> list[Rows]:
    """Write all files of the report; returns the tables."""
    texts, sections, tables = [], [], []
    for experiment, stem in zip(experiments, file_stems(experiments), strict=True):
        rows, lines = table(experiment), notes(experiment)
        pictures = _draw(experiment, folder / stem)
        links = [f"![{words}]({quote(file)})" for words, file in pictures.items()]
        texts.append("\n\n".join([f"# {experiment.name}", markdown(rows), *lines, *links]))
        panels = figures.panels(experiment.summaries, experiment.judge, experiment.unit)
        sections.append(page.section(experiment.name, rows, lines, panels))
        tables.append(rows)
    ran = [f"    {command}" for command in commands]
    foot = ["## Commands\n\n" + "\n".join(ran)] if ran else []
    whole = "\n\n".join([*texts, *foot]) + "\n"
    for name, text in {"report.md": whole, "index.html": page.page(sections, commands)}.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return tables


def file_stems(experiments: Iterable[Experiment]) -> list[str]:
    """A file name for each; duplicates, such as one problem at two lengths, are numbered."""
    taken: dict[str, str] = {}  # by casefolded name: file systems may ignore case
    for experiment in experiments:
        name, number = experiment.name, 1
        while name.casefold() in taken:
            number += 1
            name = f"{experiment.name}-{number}"
        taken[name.casefold()] = name
    return list(taken.values())


def _draw(experiment: Experiment, path: Path) -> dict[str, str]:
    """Save the plots as `path` plus an ending; returns file names by what they show."""
    arguments = (experiment.summaries, experiment.judge, experiment.unit)
    counts = sorted({len(summary.seeds) for summary in experiment.summaries} - {0}) or [0]
    seeds = " or ".join(map(str, counts))
    title = f"{experiment.about['description']}: mean of {seeds} seeds ± 2 standard errors"
    plots = {"curves": ("curves", figures.curves(*arguments, title))}
    heading = f"{experiment.name}: the search, at each method's best decay"
    plots["learning rates"] = ("lr", figures.lr_figure(*arguments, heading))
    if figures.estimated(experiment.summaries):
        heading = f"{experiment.name}: estimates after each epoch, before the schedule"
        rates = figures.estimate_figure(experiment.summaries, heading)
        plots["estimated learning rates"] = ("estimated-lr", rates)
    files = {}
    for words, (ending, figure) in plots.items():
        figures.save(figure, path.with_name(f"{path.name}-{ending}"))
        files[words] = f"{path.name}-{ending}.png"
    return files
