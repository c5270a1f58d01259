"""Statistics -> tables, plots, one self-contained page."""

import html
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from cubegrad.study import figures, statistics
from cubegrad.study.methods import METHODS, PAPER, PaperProblem, lr_text
from cubegrad.study.problem import StudyError
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Estimate, Judge, Summary

Rows = list[list[str]]  # the first one is the head


@dataclass(frozen=True)
class Experiment:
    """Runs that may stand in one table: one problem at one length on one kind of device."""

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
    made = []
    for members in groups.values():
        about = members[0].about
        judge = Judge(about["metric"], about["higher_is_better"])
        entries = statistics.by_entry(members)
        order = sorted(entries, key=_place)
        summaries = [statistics.summarise(entries[entry], judge) for entry in order]
        made.append(Experiment(members[0].settings, about, members, summaries))
    return made


def _place(entry: str) -> tuple[str, int]:
    """Schedules together, methods in the order of METHODS."""
    method, _, schedule = entry.partition("@")
    return schedule, list(METHODS).index(method) if method in METHODS else len(METHODS)


def number(point: Estimate | None, unit: str) -> str:
    """`98.7 ± 0.3`, with two digits of the error."""
    if point is None:
        return "–"
    if not point.error:
        return f"{point.mean:.2f}" if unit == "%" else f"{point.mean:.4g}"
    decimals = min(max(1 - math.floor(math.log10(point.error)), 0), 8)
    return f"{point.mean:.{decimals}f} ± {point.error:.{decimals}f}"


def table(experiment: Experiment) -> Rows:
    """Best settings and results; beside them the paper's, where it has this problem."""
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
    labels = figures.names(experiment.summaries)
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
    found = [point.mean for point in summary.estimated_lr()[-1:]]
    return [lr_text(summary.method, lr, *found), f"{decay:g}"]


def _seeds(summary: Summary) -> str:
    lost = f", {summary.diverged} diverged" if summary.diverged else ""
    return f"{len(summary.seeds)}{lost}"


def _search(summary: Summary) -> str:
    if not summary.searched:
        return "none"
    lost = f", {summary.search_diverged} diverged" if summary.search_diverged else ""
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
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def notes(experiment: Experiment) -> list[str]:
    """What the numbers are, and where they come from."""
    judge, s = experiment.judge, experiment.settings
    held = any(record.settings.hold_out for record in experiment.records)
    split = "a held-out part of the training set" if held else "the test set, as in the paper"
    way = "highest" if judge.higher_is_better else "lowest"
    schedules = {record.settings.schedule for record in experiment.records}
    schedule = f", {s.schedule}" if len(schedules) == 1 else ""  # several stand in the table
    lines = [
        f"{experiment.about['description']}; "
        f"preset {s.preset}: {s.epochs} epochs, batch {s.batch}{schedule}, on {s.device}.",
        f"Each method's learning rate and decay are those of the {way} {judge.metric} after the "
        f"last epoch on {split}. Results are means of other seeds than those of the search, where "
        "there are any; ± is 2 standard errors. Train loss is the mean over the last epoch.",
    ]
    if figures.estimated(experiment.summaries):
        lines.append(
            "An lr that is auto is estimated while training and not searched; the value beside it "
            "is the mean estimate after the last epoch, before the schedule."
        )
    if any(summary.at_edge for summary in experiment.summaries):
        lines.append("A best value at the edge means that the search met its limit (--widen).")
    if experiment.paper:
        p = experiment.paper
        lines.append(
            f"The paper: {p.architecture}, {p.length}, batch {p.batch}, {p.schedule}, "
            f"{p.seeds} seeds; {p.result}."
        )
    return [*lines, origin(experiment.records)]


def origin(records: Sequence[Record]) -> str:
    """Machine, versions, dates and the time it took."""
    kinds, dates = _all(records, "kind"), sorted(_all(records, "date"))
    versions = ", ".join(
        f"{name} {'/'.join(_all(records, name))}" for name in ("cubegrad", "torch", "python")
    )
    minutes = sum(record.seconds for record in records) / 60
    commits = "/".join(_all(records, "commit")) or "none"
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"{len(records)} runs, {minutes:.1f} minutes of training on {' / '.join(kinds)}; "
        f"{versions}; commit {commits}; {days}."
    )


def _all(records: Sequence[Record], name: str) -> list[str]:
    """The values of a field of the records' machines, without repeats."""
    found = (record.machine.get(name) for record in records)
    return list(dict.fromkeys(str(value) for value in found if value is not None))


def write(records: Iterable[Record], folder: Path, commands: Sequence[str] = ()) -> str:
    """Write tables, plots and page into `folder`; returns the tables for a terminal."""
    found = experiments(records)
    if not found:
        raise StudyError(f"{folder.parent} has no finished run yet; run the sweep again first")
    scratch = folder.with_name(f".{folder.name}.new")  # a failure keeps the old report whole
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    texts, pages, prints = [], [], []
    for experiment in found:
        rows, name, lines = table(experiment), experiment.name, notes(experiment)
        arguments = (experiment.summaries, experiment.judge, experiment.unit)
        counts = sorted({len(summary.seeds) for summary in experiment.summaries} - {0}) or [0]
        seeds = " or ".join(map(str, counts))
        title = f"{experiment.about['description']}: mean of {seeds} seeds ± 2 standard errors"
        figures.save(figures.curves(*arguments, title), scratch / f"{name}-curves")
        sensitivity = f"{name}: the search, at each method's best decay"
        figures.save(figures.lr_figure(*arguments, sensitivity), scratch / f"{name}-lr")
        pictures = [f"![curves]({name}-curves.png)", f"![learning rates]({name}-lr.png)"]
        if figures.estimated(experiment.summaries):
            heading = f"{name}: estimates after each epoch, before the schedule"
            rates = figures.estimate_figure(experiment.summaries, heading)
            figures.save(rates, scratch / f"{name}-estimated-lr")
            pictures.append(f"![estimated learning rates]({name}-estimated-lr.png)")
        texts.append("\n\n".join([f"# {name}", markdown(rows), *lines, *pictures]))
        pages.append(_section(experiment, rows, lines))
        prints.append(plain(rows))
    ran = [f"    {command}" for command in commands]
    foot = ["## Commands\n\n" + "\n".join(ran)] if ran else []
    (scratch / "report.md").write_text("\n\n".join([*texts, *foot]) + "\n", encoding="utf-8")
    (scratch / "index.html").write_text(_page(pages, commands), encoding="utf-8")
    folder.mkdir(exist_ok=True)
    for path in scratch.iterdir():
        path.replace(folder / path.name)
    scratch.rmdir()
    return "\n\n".join(prints)


def _section(experiment: Experiment, rows: Rows, lines: Sequence[str]) -> str:
    drawn = figures.panels(experiment.summaries, experiment.judge, experiment.unit)
    shapes = "".join(_pair(row[:2]) for row in drawn)
    rates = _pair(row[2] for row in drawn)
    found = [figure for row in drawn for figure in row[3:]]
    if found:
        rates += (
            "<p>A level line is a method that estimates its learning rate.</p>"
            "<h2>The estimated learning rate</h2>"
            "<p>After each epoch, before the schedule. A dashed level is the best of MADGRAD's "
            f"search.</p>{_pair(found)}"
        )
    cells = [[html.escape(cell) for cell in row] for row in rows]
    head = "".join(f"<th>{cell}</th>" for cell in cells[0])
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells[1:])
    said = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return (
        f"<h1>{html.escape(experiment.name)}</h1>"
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
        f"<h2>Test, and training loss</h2><p>Bands are ± 2 standard errors.</p>"
        f"{shapes}"
        f"<h2>How much the learning rate matters</h2>"
        f"<p>The runs of the search at each method's best decay; a cross is a diverged run. A line "
        f"that leaves the plot goes on to worse values.</p>"
        f"{rates}{said}"
    )


def _pair(drawn: Iterable[Figure]) -> str:
    """Side by side where there is room, else below each other."""
    shapes = "".join(f"<figure>{figures.inline(figure)}</figure>" for figure in drawn)
    return f'<div class="pair">{shapes}</div>'


def _page(sections: Sequence[str], commands: Sequence[str]) -> str:
    ran = "".join(f"{html.escape(command)}\n" for command in commands)
    foot = f'<h2>Commands</h2><div class="scroll"><pre>{ran}</pre></div>' if ran else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cubegrad: comparison</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: auto; padding: 1rem;
  color: #222; background: #fff }}
h1, h2 {{ line-height: 1.2 }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: left;
  white-space: nowrap }}
.pair {{ display: flex; flex-wrap: wrap; gap: 1rem }}
figure {{ flex: 1 1 20rem; margin: 0; min-width: 0; max-width: 34rem }}
svg {{ width: 100%; height: auto }}
</style></head><body>
{"".join(sections)}{foot}
</body></html>
"""
