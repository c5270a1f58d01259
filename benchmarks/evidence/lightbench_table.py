"""The tables of lightbench_runs.py, and the results that the package was published with."""

import importlib.util
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LADDER = ("trivial", "easy", "medium", "hard", "extreme", "nightmare")
THEIRS = {"AdamW": "AdamW", "ForeachSFAdamW": "schedule-free AdamW"}  # of the published ones
Record = dict[str, Any]
Cell = tuple[str, str]  # problem, difficulty
Trials = dict[str, int | None]  # by optimizer; None: lost


def published() -> dict[Cell, Record]:
    """What lightbench's own table says: the trials of two optimizers, and how many of all won."""
    found = importlib.util.find_spec("lightbench")
    places = list(found.submodule_search_locations or ()) if found else []
    files = [file for place in places for file in Path(place).glob("benchmark_results.md")]
    cells = defaultdict[Cell, Record](lambda: {"won_by": 0, "of": 0})
    for line in (line for file in files for line in file.read_text().splitlines()):
        row = [word.strip() for word in line.strip("|").split("|")]
        if len(row) < 8 or row[4] not in ("✓", "✗"):
            continue
        (name, optimizer, cautious, mars, won), trials = row[:5], row[7]
        problem, _, difficulty = name.rpartition("-")
        cell = cells[problem, difficulty]
        cell["of"] += 1
        cell["won_by"] += won == "✓"
        if optimizer in THEIRS and cautious == mars == "No":
            cell[THEIRS[optimizer]] = int(trials) if won == "✓" else None
    return dict(cells)


def known(records: Sequence[Record], problem: str, difficulty: str, name: str) -> Record | None:
    """The record of this run, or of an easier one that was lost or does not exist."""
    for one in records:
        same = (one["problem"], one["optimizer"]) == (problem, name)
        step = LADDER.index(difficulty) - LADDER.index(one["difficulty"])
        if same and (step == 0 or (step > 0 and not one["won"])):
            return one
    return None


def outcomes(records: Sequence[Record]) -> dict[Cell, Trials]:
    """By problem and difficulty, where someone was run and nobody is missing.

    Who lost an easier one has lost this one too, as in lightbench's runner.
    """
    names = dict.fromkeys(one["optimizer"] for one in records)
    ran = {(one["problem"], one["difficulty"]) for one in records if one["end"] != "skipped"}
    problems = dict.fromkeys(one["problem"] for one in records)
    cells: dict[Cell, Trials] = {}
    for cell in itertools.product(problems, LADDER):
        found = {name: known(records, *cell, name) for name in names}
        runs = {name: one for name, one in found.items() if one}
        if cell in ran and len(runs) == len(names):
            cells[cell] = {n: one["trials"] if one["won"] else None for n, one in runs.items()}
    return cells


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, with numbers to the right."""
    parts = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(part)} |" for part in parts)


def wins(cells: dict[Cell, Trials]) -> str:
    """Wins by difficulty, and the trials in the cells that all optimizers won."""
    names = list(next(iter(cells.values())))
    difficulties = [one for one in LADDER if any(one == level for _, level in cells)]
    common = [trials for trials in cells.values() if None not in trials.values()]

    def count(name: str, level: str | None) -> str:
        some = [trials[name] for (_, at), trials in cells.items() if level in (None, at)]
        return f"{sum(one is not None for one in some)} of {len(some)}"

    def mean(name: str) -> str:
        return f"{statistics.fmean(one[name] or 0 for one in common):.1f}" if common else "–"

    head = ["optimizer", *difficulties, "all", f"trials in the {len(common)} that all won"]
    rows = [[n, *(count(n, one) for one in difficulties), count(n, None), mean(n)] for n in names]
    return lines(head, rows)


def by_problem(records: Sequence[Record], cells: dict[Cell, Trials]) -> str:
    """The trial that won, at each difficulty, beside the published results."""
    names = list(next(iter(cells.values())))
    theirs = {(one["problem"], one["difficulty"]): one["published"] for one in records}
    problems = dict.fromkeys(problem for problem, _ in cells)

    def row(problem: str) -> list[str]:
        levels = [level for name, level in cells if name == problem]
        ours = [[cells[problem, level][name] for level in levels] for name in names]
        said = [theirs.get((problem, level)) or {} for level in levels]
        both = [[one.get(name) for one in said] for name in THEIRS.values()]
        winners = " / ".join(f"{one['won_by']}" if one else "–" for one in said)
        of_all = max((one["of"] for one in said if one), default=0)
        shown = [
            " / ".join("–" if one is None else f"{one}" for one in some) for some in ours + both
        ]
        return [f"`{problem}`", *shown, f"{winners} of {of_all}"]

    head = [
        "problem",
        *names,
        *(f"published {name}" for name in THEIRS.values()),
        "published, won by",
    ]
    return lines(head, [row(problem) for problem in problems])


def tables(records: Sequence[Record]) -> str:
    cells = outcomes(records)
    if not cells:
        return "nothing is complete yet"
    return f"{wins(cells)}\n\n{by_problem(records, cells)}"
