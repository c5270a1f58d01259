"""Statistics -> tables, plots, and one self-contained page (see page.py)."""

import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from cubegrad.study import figures, page, styles, wording
from cubegrad.study.experiments import Experiment, experiments, file_stems
from cubegrad.study.files import writing
from cubegrad.study.methods import PaperProblem, lr_text
from cubegrad.study.problem import StudyError
from cubegrad.study.records import Record
from cubegrad.study.statistics import Summary
from cubegrad.study.wording import number

Rows = list[list[str]]  # the first is the header
# What Markdown may read as more than text, anywhere (but "_" inside a word is only that) and at the
# start of a paragraph. GitHub still makes a link of an address, to what it says.
MARKUP = re.compile(r"[\\`*\[\]<>&~$#]|(?<![^\W_])_|_(?![^\W_])")
LIST = re.compile(r"^(?=[+-])|^([0-9]+)(?=[.)](?:\s|$))")


def table(experiment: Experiment, edges: bool = True) -> Rows:
    """Best settings and results, and the paper's if it has this problem; the best result first.

    `edges` adds to the search's cell whether it ended at the edge of its grid.
    """
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
    for summary in experiment.ranked:
        best = _setting(summary)
        results = [
            number(summary.final.get(m), experiment.unit if m == judge.metric else "")
            for m in shown
        ]
        row = [labels[summary.entry], *best, *results, _seeds(summary), _search(summary, edges)]
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


def _search(summary: Summary, edges: bool) -> str:
    if not summary.searched:
        return "none"
    lost = f", {summary.search_diverged} diverged" if summary.search_diverged else ""
    lost += f", {summary.search_cut} stopped early" if summary.search_cut else ""
    at_edge = summary.at_edge if edges else ()
    edge = f", best {' and '.join(at_edge)} at the edge" if at_edge else ""
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
    cells = [[escaped(cell).replace("|", r"\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def escaped(text: str) -> str:
    """As a line of Markdown that shows this text."""
    return MARKUP.sub(r"\\\g<0>", wording.one_line(text))


def paragraph(text: str) -> str:
    """The same for a line that begins a paragraph, which must not become a list."""
    return LIST.sub(r"\1\\", escaped(text))


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
        rows, lines = table(experiment), wording.notes(experiment)
        pictures = _draw(experiment, folder / stem)
        links = [f"![{words}]({quote(file)})" for words, file in pictures.items()]
        heading, verdict = escaped(wording.title(experiment)), wording.verdict(experiment)
        parts = [paragraph(verdict), markdown(rows), *map(paragraph, lines), *links]
        texts.append("\n\n".join([f"# {heading}", *parts]))
        sections.append(page.section(experiment, table(experiment, edges=False), stem))
        tables.append(rows)
    ran = [f"    {wording.printable(line)}" for one in commands for line in one.splitlines()]
    foot = ["## Commands\n\n" + "\n".join(ran)] if ran else []
    whole = "\n\n".join([*texts, *foot]) + "\n"
    titles = [wording.title(experiment) for experiment in experiments]
    html = page.page(titles, sections, commands)
    for name, text in {"report.md": whole, "index.html": html}.items():
        (folder / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return tables


def _draw(experiment: Experiment, path: Path) -> dict[str, str]:
    """Save the plots as `path` plus an ending; returns file names by what they show."""
    arguments = (experiment.summaries, experiment.judge, experiment.unit)
    seeds = wording.seed_counts(experiment.summaries)
    title = f"{experiment.about['description']}: mean of {seeds} ± 2 standard errors"
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
