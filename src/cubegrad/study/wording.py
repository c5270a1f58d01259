"""The report's numbers and sentences: what was compared, the result, the caveats."""

import math
import re
from collections.abc import Iterable, Sequence

from cubegrad.study import catalogue, styles
from cubegrad.study.comparison import Difference, difference, reported
from cubegrad.study.experiments import Experiment
from cubegrad.study.records import Record
from cubegrad.study.statistics import Estimate, Summary

# Line ends and other control characters, and those that turn the direction of writing.
NOT_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    return NOT_TEXT.sub(" ", text)


def one_line(text: str) -> str:
    """A description may hold anything: its words, with single spaces between them."""
    return " ".join(printable(text).split())


def value(number: float, unit: str = "") -> str:
    """Four significant digits; a percentage has two decimals if they show it."""
    if unit == "%" and 0.01 <= abs(number) < 1e7:
        return f"{number:.2f}"
    return f"{number:.4g}"


def number(point: Estimate | None, unit: str) -> str:
    """`98.70 ± 0.31`, with two digits of the error; tiny and huge ones as `3e-09 ± 1.2e-07`."""
    if point is None:
        return "–"
    mean, error = point.mean, point.error
    if not error:
        return value(mean, unit)
    if math.isinf(error):
        return f"{mean:.4g} ± inf"
    place = math.floor(math.log10(error))
    decimals = max(1 - place, 0)
    if 1e-4 <= max(abs(mean), error) < 1e7 and decimals <= 8:
        return f"{mean:.{decimals}f} ± {error:.{decimals}f}"
    size = math.floor(math.log10(abs(mean))) if mean else place
    digits = min(max(size - place + 2, 1), 8)
    return f"{mean:.{digits}g} ± {error:.2g}"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def title(experiment: Experiment) -> str:
    """`MADGRAD and 4 others on handwritten digits`"""
    names = [_inline(name) for name in styles.names(experiment.summaries).values()]
    lead = next((name for name in names if name.startswith("MADGRAD")), names[0])
    others = len(names) - 1
    who = lead if not others else f"{lead} and {others} other{'s' if others > 1 else ''}"
    if experiment.settings.problem in catalogue.TITLES:
        return f"{who} on {catalogue.TITLES[experiment.settings.problem]}"
    description = experiment.about["description"]
    if 0 < len(description) <= 80:
        return f"{who}: {description}"
    return f"{who} on {experiment.settings.problem}"


def verdict(experiment: Experiment) -> str:
    """The result in one sentence.

    Two methods cannot be told apart if the 95 % interval of their difference, seed for seed,
    contains 0.
    """
    metric, unit = experiment.judge.metric, experiment.unit
    results = [s for s in experiment.ranked if metric in s.final]
    if not results:
        return "There is no result: every run diverged."
    labels = {entry: _inline(name) for entry, name in styles.names(experiment.summaries).items()}
    first, *others = results
    top = first.final[metric]
    shown = f"{number(top, unit)}{f' {unit}' if unit else ''}"
    if len(experiment.summaries) == 1:
        return f"{labels[first.entry]} reaches a test {metric} of {shown}."
    way = "highest" if experiment.judge.higher_is_better else "lowest"
    parts = [f"{labels[first.entry]} has the {way} test {metric}, {shown}"]
    leads = {labels[s.entry]: _lead(experiment, first, s) for s in others}
    undecided = [name for name, lead in leads.items() if lead.interval and lead.sign == 0]
    behind = [name for name, lead in leads.items() if lead.sign > 0]
    if undecided:
        parts.append(f"{_counted(undecided)} cannot be told apart from it")
    if behind:
        parts.append(f"{_counted(behind)} {_is(behind)} behind")
    if len(undecided) + len(behind) < len(others):
        parts.append("with fewer than two seeds in common, small differences mean little")
    lost = [labels[s.entry] for s in experiment.summaries if metric not in s.final]
    if lost:
        parts.append(f"{_counted(lost)} diverged")
    return f"{'; '.join(parts)}."


def _inline(label: str) -> str:
    """`MADGRAD (lr auto)`: a list of names has commas of its own."""
    name, comma, rest = label.partition(", ")
    return f"{name} ({rest})" if comma else name


def _lead(experiment: Experiment, first: Summary, other: Summary) -> Difference:
    """What the first gains over the other, seed for seed."""
    judge = experiment.judge

    def results(summary: Summary) -> dict[int, float | None]:
        runs = reported(experiment.records, summary)
        return {seed: record.last(judge.metric) for seed, record in runs.items()}

    return difference(results(first), results(other), judge)


def _counted(names: Sequence[str]) -> str:
    return listed(names) if len(names) <= 5 else f"{len(names)} others"


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def caveats(summary: Summary) -> list[str]:
    """What a reader must know about one method's result."""
    lines = [f"best {name} at the edge of its grid" for name in summary.at_edge]
    n = len(summary.seeds)
    if summary.diverged:
        verb = "is" if summary.diverged == 1 else "are"
        lines.append(f"{summary.diverged} of {n} seeds diverged and {verb} left out")
    if n - summary.diverged == 1:
        lines.append("one seed, so no error is known")
    if summary.best is None:
        lines.append("every run diverged")
    return lines


def compared(experiment: Experiment) -> str:
    """What was run, for how long, and how often."""
    s = experiment.settings
    about = experiment.about["description"] or s.problem
    schedules = {record.settings.schedule for record in experiment.records}
    rate = schedule_words(s.schedule) if len(schedules) == 1 else "each under the schedule named"
    device = {"cpu": "the CPU", "cuda": "a GPU"}.get(s.device, s.device)
    epochs = f"{s.epochs} epoch{'s' if s.epochs > 1 else ''}"
    return (
        f"{about[:1].upper()}{about[1:]}: {epochs} at batch size {s.batch}, {rate}, on {device}. "
        f"Results are means over {seed_counts(experiment.summaries)} ± 2 standard errors."
    )


def seed_counts(summaries: Iterable[Summary]) -> str:
    """`3 seeds`, or `3 or 5 seeds` if the methods have different numbers, or `1 to 5 seeds`."""
    counts = sorted({len(summary.seeds) for summary in summaries} - {0}) or [0]
    words = f"{counts[0]} to {counts[-1]}" if len(counts) > 2 else " or ".join(map(str, counts))
    return f"{words} seed{'' if words == '1' else 's'}"


def schedule_words(schedule: str) -> str:
    """The schedule as a person would say it; an unknown one as it is."""
    name, _, argument = schedule.partition(":")
    stops = [stop.replace("%", " %") for stop in argument.split("-")]
    if name == "tenthing" and argument:
        where = f"{listed(stops)} of the run" if "%" in argument else f"epoch {listed(stops)}"
        return f"learning rate divided by 10 at {where}"
    warm_up = f"warm-up over {stops[0]} {'of the run' if '%' in argument else 'steps'}"
    words = {
        "flat": "constant learning rate",
        "sqrt": f"learning rate falling as 1/√(i + {argument})",
        "inverse-sqrt": f"{warm_up}, then learning rate falling as 1/√i",
        "polynomial": f"{warm_up}, then learning rate falling linearly to 0",
        "cosine": "learning rate falling to 0 along a cosine",
        "warmup": f"{warm_up}, then constant learning rate",
    }
    return words.get(name, schedule)


def notes(experiment: Experiment) -> list[str]:
    """How the numbers were made, and what they mean."""
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
    if any(summary.estimated_lr() for summary in experiment.summaries):
        lines.append(
            "An lr of auto is estimated while training instead of searched; the value beside it "
            "is the mean estimate after the last epoch, before the schedule."
        )
    if any(summary.at_edge for summary in experiment.summaries):
        lines.append(
            "A best value at the edge means that the search reached its limit (--widen): the "
            "method may do better beyond it."
        )
    if any(summary.search_cut for summary in experiment.summaries):
        lines.append(
            "Runs stopped early had fallen behind in training loss (--search halving). The choice "
            "is among the others, so a setting that starts slowly may have been missed."
        )
    starts = _all(experiment.records, "start")
    if len(starts) > 1:
        lines.append(
            f"These runs began with {len(starts)} different sets of weights ({', '.join(starts)}): "
            "methods that did not begin with the same ones cannot be compared."
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
    seconds = sum(record.seconds for record in records)
    time = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.2g} seconds"
    commits = listed([*map(_commit, _all(records, "commit"))]) or "none"
    days = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "no date"
    return (
        f"{len(records)} runs, {time} of training on {' / '.join(kinds)}; "
        f"{versions}; commit {commits}; {days}."
    )


def _commit(text: str) -> str:
    """`git describe` marks a working copy that differs from its commit."""
    clean = text.removesuffix("-dirty")
    return text if clean == text else f"{clean} with uncommitted changes"


def _all(records: Iterable[Record], name: str) -> list[str]:
    """The distinct values of a field of `Record.machine`."""
    values = (record.machine.get(name) for record in records)
    return list(dict.fromkeys(str(value) for value in values if value is not None))
