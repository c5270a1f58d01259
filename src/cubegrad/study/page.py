"""The report as one self-contained page. All text from records is escaped here."""

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import cubegrad
from cubegrad.study import charts, styles, wording
from cubegrad.study.experiments import Experiment

# Nothing is loaded, whatever a record holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def section(experiment: Experiment, rows: Sequence[Sequence[str]], name: str) -> str:
    """One experiment: result, table, charts, and how it was made. `rows` is sorted by result."""
    lines = wording.notes(experiment)
    facts = "".join(f"<p>{_text(line)}</p>" for line in lines)
    given = html.escape(wording.printable(experiment.settings.options))
    options = f"<p>Options of the preset: <code>{given}</code></p>" if given != "{}" else ""
    return (
        f'<section id="{html.escape(name)}"><h1>{_text(wording.title(experiment))}</h1>'
        f'<p class="verdict">{_unbroken(_text(wording.verdict(experiment)))}</p>'
        f"<p>{_unbroken(_text(wording.compared(experiment)))}</p>"
        f"{_table(experiment, rows)}{_charts(experiment)}"
        f"<details><summary>How it was made: choices, settings, versions</summary>{facts}"
        f"{options}</details></section>"
    )


def _text(text: str) -> str:
    return html.escape(wording.one_line(text))


def _unbroken(text: str) -> str:
    """Keep a number, its error and its unit on one line."""
    return text.replace(" ±", "&nbsp;±").replace("± ", "±&nbsp;").replace(" %", "&nbsp;%")


def _table(experiment: Experiment, rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    own = next((i for i, cell in enumerate(head) if cell.startswith("paper: ")), len(head))
    labels = [cell.removeprefix("paper: ") for cell in head]
    result = f"test {experiment.judge.metric}"
    lines = []
    for row, summary in zip(body, experiment.ranked, strict=True):
        cells = []
        for i, (label, cell) in enumerate(zip(labels, row, strict=True)):
            kind = "method" if i == 0 else "result" if label.startswith(result) else ""
            tags = wording.caveats(summary) if kind == "result" else []
            cells.append(_cell(label if i < own else f"paper’s {label}", kind, cell, tags))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(f'<th scope="col">{_text(label)}</th>' for label in labels)
    paper = len(head) - own
    above = f'<tr><td colspan="{own}"></td><th colspan="{paper}">in the MADGRAD paper</th></tr>'
    return (
        f"<table><thead>{above if paper else ''}<tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def _cell(label: str, kind: str, text: str, tags: Sequence[str]) -> str:
    notes = "".join(f"<small>{_text(tag)}</small>" for tag in tags)
    tag, scope = ("th", ' scope="row"') if kind == "method" else ("td", "")
    kind = "none" if text == "–" and not kind else kind
    return (
        f'<{tag}{scope} class="{kind}" data-label="{_text(label)}">'
        f"<span>{_text(text)}</span>{notes}</{tag}>"
    )


def _charts(experiment: Experiment) -> str:
    groups = charts.groups(experiment)
    blocks = []
    for group in groups:
        name = ", ".join(filter(None, ["Curves", group["name"]]))
        last = _help(experiment, groups) if group is groups[-1] else ""
        blocks.append(
            f'<h2>{_text(name)}</h2><div class="charts">'
            f'<script type="application/json">{_json(group)}</script>'
            "<noscript><p>The curves need JavaScript. The plots beside this page show them too."
            f"</p></noscript>{last}</div>"
        )
    return "".join(blocks)


def _help(experiment: Experiment, groups: Sequence[dict[str, Any]]) -> str:
    series = [one for group in groups for chart in group["charts"] for one in chart["series"]]
    lines = [
        "Point at a chart, or use the arrow keys, to read its values. Switch methods off and on "
        "above the charts; the axes follow. Bands are ± 2 standard errors.",
        "The chart of the search has its runs at each method’s best decay; a line that leaves it "
        "goes on to worse values.",
    ]
    if any(one.get("lost") for one in series):
        lines.append("A cross is a run that diverged.")
    if any(summary.search_cut for summary in experiment.summaries):
        lines.append("Runs that were stopped early are not shown.")
    if any("level" in one for one in series):
        lines.append(
            "A horizontal line there is a method that estimates its learning rate; among the "
            "estimates, the best rate of MADGRAD’s search."
        )
    return f'<p class="help">{" ".join(lines)}</p>'


def _json(data: Any) -> str:
    """Without a "<", which could end the script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _colours() -> str:
    light = "".join(f"--c{i}:{colour};" for i, colour in enumerate(styles.COLOURS))
    dark = "".join(f"--c{i}:{colour};" for i, colour in enumerate(styles.DARK))
    dashes = "".join(f".d{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(styles.DASHES))
    both = f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    strokes = "".join(f".s{i}{{--c:var(--c{i})}}" for i in range(len(styles.COLOURS)))
    return f"{both}{strokes}{dashes}"


def _asset(name: str) -> str:
    return (resources.files("cubegrad.study") / name).read_text(encoding="utf-8")


def page(titles: Sequence[str], sections: Sequence[str], commands: Sequence[str]) -> str:
    title = titles[0] if len(titles) == 1 else f"{len(titles)} comparisons of optimizers"
    ran = "".join(f"<pre>{html.escape(wording.printable(command))}</pre>" for command in commands)
    fold = f"<details><summary>The commands that ran it</summary>{ran}</details>" if ran else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<style>
{_asset("page.css")}{_colours()}
</style></head><body>
{"".join(sections)}{fold}
<footer>Made with cubegrad {cubegrad.__version__}.</footer>
<script>
{_asset("page.js")}</script>
</body></html>
"""
