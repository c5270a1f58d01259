"""The report as one self-contained page. All text from records is escaped here."""

import html
from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure

from cubegrad.study import figures


def section(
    name: str, rows: Sequence[Sequence[str]], notes: Sequence[str], panels: list[list[Figure]]
) -> str:
    """One experiment: its table, its notes, and the `figures.panels`."""
    curves = "".join(_pair(row[:2]) for row in panels)
    rates = _pair(row[2] for row in panels)
    estimates = [figure for row in panels for figure in row[3:]]
    if estimates:
        rates += (
            "<p>A horizontal line is a method that estimates its learning rate.</p>"
            "<h2>The estimated learning rate</h2>"
            "<p>After each epoch, before the schedule. A dashed line is the best rate of MADGRAD's "
            f"search.</p>{_pair(estimates)}"
        )
    cells = [[html.escape(cell) for cell in row] for row in rows]
    head = "".join(f"<th>{cell}</th>" for cell in cells[0])
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells[1:])
    texts = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f"<h1>{html.escape(name)}</h1>"
        f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
        f"<h2>Test, and training loss</h2><p>Bands are ± 2 standard errors.</p>"
        f"{curves}"
        f"<h2>How much the learning rate matters</h2>"
        f"<p>The runs of the search at each method's best decay; a cross is a diverged run. A line "
        f"that leaves the plot goes on to worse values.</p>"
        f"{rates}{texts}"
    )


def _pair(panels: Iterable[Figure]) -> str:
    """Side by side if there is room, else stacked."""
    cells = "".join(f"<figure>{figures.inline(figure)}</figure>" for figure in panels)
    return f'<div class="pair">{cells}</div>'


def page(sections: Sequence[str], commands: Sequence[str]) -> str:
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
