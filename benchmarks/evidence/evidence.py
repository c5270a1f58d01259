"""The statistics of docs/results/README.md and details.md, from all records: tables and a figure.

python benchmarks/evidence/evidence.py
"""

import argparse
import json
import math
import re
from pathlib import Path

import plot_evidence
from evidence_rows import (
    COMPACT,
    MADGRAD,
    MAIN,
    Comparison,
    Row,
    comparisons,
    load,
    profile,
    repeats,
)

from cubegrad.study import comparison, statistics
from cubegrad.study.comparison import Difference
from cubegrad.study.methods import METHODS, estimates, lr_text
from cubegrad.study.records import Record
from cubegrad.study.statistics import Estimate
from cubegrad.study.wording import listed, number

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TOLERANCES = (0.5, 1.0, 2.0, 5.0)  # %
PAGES = {  # what of them is made here
    "README.md": ("overview", "standing"),
    "details.md": ("decay", "robustness", "details", "left out"),
}
UPDATES = ("updates", "steps")  # options that say how many an epoch has
RIVALS = ("sgd", "adam", "adamw", "adagrad")
BETTER, WORSE = "▲", "▼"
NO_BREAK, MAY_BREAK, BREAK = "\N{NO-BREAK SPACE}", "\N{ZERO WIDTH SPACE}", "<br>"

Table = list[list[str]]  # the first row is the header


def markdown(rows: Table, left: int = 1) -> str:
    """A table whose first columns are aligned to the left, the others to the right."""
    lines = [rows[0], [*["---"] * left, *["---:"] * (len(rows[0]) - left)], *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def metric(one: Comparison) -> str:
    return one.judge.metric + (f", {one.unit}" if one.unit else "")


def length(one: Comparison) -> str:
    """`10 epochs of 250 updates`, where the preset's options have the number of updates."""
    options = json.loads(one.settings.options)
    updates = next((options[name] for name in UPDATES if options.get(name)), None)
    return f"{one.settings.epochs} epochs" + (f" of {updates} updates" if updates else "")


def overview(found: list[Comparison]) -> Table:
    """Problems by methods: the result, and whether it differs from MADGRAD's."""
    methods = [method for method in MAIN if any(one.row(method) for one in found)]
    # The longest name may break.
    labels = (METHODS[m].label.replace("Mirror", f"Mirror{MAY_BREAK}") for m in methods)
    rows = [["", *labels]]
    for one in found:
        found_rows = map(one.row, methods)
        cells = ["–" if row is None else _cell(one, row) for row in found_rows]
        rows.append([f"{one.title}{BREAK}{one.settings.epochs} epochs: {metric(one)}", *cells])
    return rows


def _cell(one: Comparison, row: Row) -> str:
    """The mean with its marks, and below it the error, so that the table fits on a page."""
    shown = (other for other in one.rows if other.method in MAIN and not other.chosen_by_its_seeds)
    mean, _, error = number(one.final(row), one.unit).partition(" ± ")
    sign = {1: f" {BETTER}", -1: f" {WORSE}", 0: ""}[0 if row.method == MADGRAD else row.gain.sign]
    marks = " †" * bool(row.summary.at_edge) + " ‡" * row.chosen_by_its_seeds
    cell = (f"**{mean}**" if row is next(shown, None) else mean) + sign + marks
    return cell.replace(" ", NO_BREAK) + (f"{BREAK}±{NO_BREAK}{error}" if error else "")


def details(one: Comparison) -> Table:
    """All methods of a problem, the best first."""
    target = one.row("adam", "adamw")
    heads = ["method", metric(one), "better than MADGRAD by", "lr", "decay", "seeds", "search"]
    reached = f"epoch with {target.label if target else 'Adam'}'s result"
    rows = [[*heads, reached, "GPU hours", "fastest run"]]
    for row in one.rows:
        s = row.summary
        lr, decay = s.best or (math.nan, math.nan)
        last = [point.mean for point in s.estimated_lr()[-1:]]
        rows.append(
            [
                row.label,
                number(one.final(row), one.unit),
                "" if row.method == MADGRAD else gain(row.gain),
                lr_text(row.method, lr, *last),
                f"{decay:g}",
                f"{len(s.seeds)}" + (f", {s.diverged} diverged" if s.diverged else ""),
                _search(row),
                _reached(one, row, target),
                f"{sum(row.seconds) / 3600:.3f}",
                f"{min(row.seconds):.0f} s",
            ]
        )
    return rows


def gain(found: Difference) -> str:
    """`+0.25 [−0.53, +0.31]`, to two digits of the interval's half width; bold without 0 in it."""
    point, interval = found.estimate, found.interval
    if point is None:
        return "–"
    if interval is None:
        return f"{point.mean:+.2g}".replace("-", "−")
    half = (interval[1] - interval[0]) / 2
    digits = max(1 - math.floor(math.log10(half)), 0) if half else 2
    mean, low, high = (f"{value:+.{digits}f}" for value in (point.mean, *interval))
    text = f"{mean} [{low}, {high}]".replace("-", "−")
    return f"**{text}**" if found.sign else text


def _search(row: Row) -> str:
    s = row.summary
    if not s.searched:
        if estimates(row.method):
            return "none needed"
        return "MADGRAD's best" if row.method.endswith(COMPACT) else "elsewhere"
    edge = f", {' and '.join(s.at_edge)} at the edge" if s.at_edge else ""
    itself = ", by the same seeds" if row.chosen_by_its_seeds else ""
    return f"{s.searched} runs{edge}{itself}"


def _reached(one: Comparison, row: Row, target: Row | None) -> str:
    if target is None:
        return "–"
    curve, higher = row.summary.curves[one.judge.metric], one.judge.higher_is_better
    epoch = comparison.first_epoch(curve, one.final(target).mean, higher)
    return "never" if epoch is None else str(epoch)


def robustness(found: list[Comparison]) -> Table:
    """How much of a span of rates that all methods of a problem have run is near the best."""
    heads = ["problem", "span", "method", "rates run", "decades"]
    shares = [f"within {percent:g} %" for percent in TOLERANCES]
    rows = [[*heads, *shares, "one step lower", "one step higher"]]
    for one in found:
        searched = [row for row in map(one.row, MAIN) if row and row.searched_lr]
        profiles = {row.label: profile(one, row) for row in searched}
        inside = {
            row.label
            for row in searched
            if len(profiles[row.label]) > 1 and "lr" not in row.summary.at_edge
        }
        span = comparison.common_span(profiles[label] for label in inside)
        for label, rates in profiles.items():
            spans = [comparison.share_within(rates, percent, span) for percent in TOLERANCES]
            known = [
                f"{100 * share.within / share.span:.0f} %" if share.span else "–" for share in spans
            ]
            outside = "edge" if len(rates) > 1 else "one rate"
            gap = ", a gap" if label in inside and spans[0].missing > 1e-9 else ""
            low, high = comparison.one_step_off(rates)
            rows.append(
                [
                    one.title,
                    f"{span[0]:+.1f} to {span[1]:+.1f}".replace("-", "−"),
                    label,
                    f"{len(rates)}{gap}",
                    f"{rates[-1].offset - rates[0].offset:.1f}",
                    *(known if label in inside else [outside] * len(TOLERANCES)),
                    _behind(low),
                    _behind(high),
                ]
            )
    return rows


def _behind(percent: float | None) -> str:
    if percent is None:
        return "not run"
    if math.isinf(percent):
        return "diverged"
    return f"−{percent:.2g} %" if percent < 100 else "−100 % or more"


def decay_gains(found: list[Comparison]) -> Table:
    """The best settings of a search without and with decay, where it tried both."""
    rows = [["problem", "method", "without decay", "lr", "with decay", "lr", "decay", "gain"]]
    for one in found:
        for row in filter(None, map(one.row, MAIN)):
            tried = statistics.searched(row.records)
            halves = [
                {s: tried[s] for s in tried if (s[1] > 0) is decayed} for decayed in (False, True)
            ]
            without, with_decay = (statistics.best(half, one.judge) for half in halves)
            if without is None or with_decay is None:
                continue
            before, after = (one.judge.score(tried[s])[0] for s in (without, with_decay))
            cells = [one.title, row.label]
            for score, setting in ((before, without), (after, with_decay)):
                value = Estimate(score if one.judge.higher_is_better else -score, None, 1)
                cells += [number(value, one.unit), lr_text(row.method, setting[0])]
            gained = f"{after - before:+.{2 if one.unit == '%' else 3}f}".replace("-", "−")
            rows.append([*cells, f"{with_decay[1]:g}", gained])
    return rows


def standing(found: list[Comparison]) -> list[str]:
    """MADGRAD against each of the others, counted."""
    lines = []
    for rival in RIVALS:
        signs = {
            one.short_title: row.gain.sign
            for one in found
            if (row := one.row(rival)) and not row.chosen_by_its_seeds
        }
        parts = [
            f"{word} on {len(names)}{f' ({listed(names)})' if names and sign else ''}"
            for word, sign in (("better", -1), ("worse", 1), ("undecided", 0))
            for names in [[name for name in signs if signs[name] == sign]]
        ]
        count = f"{len(signs)} problem{'s' if len(signs) > 1 else ''}"
        lines.append(f"- MADGRAD against {METHODS[rival].label}, {count}: {listed(parts)}.")
    rows = [row for _, one in every_table(found) for row in one.rows]
    seconds = [second for row in rows for second in row.seconds]
    lines.append(
        f"- {len(seconds)} runs, {sum(seconds) / 3600:.1f} GPU hours as they were run, in "
        f"{len(rows)} rows."
    )
    return lines


def every_table(found: list[Comparison]) -> list[tuple[Comparison, Comparison]]:
    """Each comparison, beside the first one of its problem."""
    return [(first, one) for first in found for one in (first, *first.others)]


def heading(first: Comparison, one: Comparison) -> str:
    """`MR images, VarNet, 4 epochs, without cross_validate`: what differs from the first table."""
    own, firsts = map(_options, (one, first))
    changed = [f"{name} {own[name]}" for name in own if own[name] != firsts.get(name)]
    missing = [f"without {name}" for name in firsts if name not in own]
    return ", ".join([one.title, length(one), *changed, *missing])


def _options(one: Comparison) -> dict[str, str]:
    """What `length` does not say, in JSON."""
    preset, batch = one.settings.preset, one.settings.batch
    options = {"preset": preset, "batch": batch, **json.loads(one.settings.options)}
    return {name: json.dumps(options[name]) for name in options if name not in UPDATES}


def repeated(folders: dict[str, list[Record]]) -> str:
    """How far the same run, made twice, is from itself."""
    parts = [
        f"up to {gap:.2g}{f' {unit}' if unit else ''} in {n} pairs ({problem})"
        for problem, (gap, n, unit) in repeats(folders).items()
    ]
    if not parts:
        return "- No run was repeated."
    return f"- Repeated with the same seed on another day, by another commit: {listed(parts)}."


def blocks(folders: dict[str, list[Record]]) -> dict[str, str]:
    """The parts of the pages that the records determine, by name."""
    found, left_out = comparisons(folders)
    tables = [
        f"### {heading(first, one)}\n\n{markdown(details(one))}"
        for first, one in every_table(found)
    ]
    return {
        "overview": markdown(overview(found)),
        "standing": "\n".join([*standing(found), repeated(folders)]),
        "robustness": markdown(robustness(found), left=3),
        "decay": markdown(decay_gains(found), left=2),
        "details": "\n\n".join(tables),
        "left out": "\n".join(f"- {line}." for line in left_out),
    }


def fill(page: str, parts: dict[str, str]) -> str:
    """A page with each part between its two comments."""
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise SystemExit(f"the page needs the lines {begin} and {end} once each")
        pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
        page = re.sub(pattern, lambda _, t=f"{begin}\n\n{text}\n\n{end}": t, page, flags=re.DOTALL)
    return page


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args(words).results
    folders = load(folder)
    parts = blocks(folders)
    for name, names in PAGES.items():
        page = folder / name
        filled = fill(page.read_text(encoding="utf-8"), {one: parts[one] for one in names})
        page.write_text(filled, encoding="utf-8")
    plot_evidence.draw(comparisons(folders)[0]).savefig(folder / "evidence.png", dpi=150)


if __name__ == "__main__":
    main()
