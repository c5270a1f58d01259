"""What was measured, how it compares with the floor, and the report of it."""

import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from workloads import ADAM_FUSED

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import write


@dataclass
class Row:
    """Results of one optimizer in one case; times are None if it did not run."""

    case: str
    optimizer: str
    tensors: int
    parameters: int
    dtype: str
    unavailable: str | None = None
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    repeats: int = 0
    first_step_s: float | None = None
    bytes_per_parameter: float | None = None
    peak_extra_mb: float | None = None
    state_bytes_per_parameter: float | None = None  # allocated by the first step
    gb_per_s: float | None = None
    floor_ms: float | None = None
    percent_of_floor: float | None = None
    adam_beside_ms: float | None = None  # fused Adam's, measured in alternation with this row
    other_beside_ms: float | None = None  # likewise, of the contender in `Contender.beside`
    speed_vs_adam_fused: float | None = None


@dataclass
class Report:
    machine: dict[str, str]
    bandwidth_gb_per_s: dict[str, float]
    rows: list[Row] = field(default_factory=list)


def compare(report: Report) -> None:
    """Fill in how each row's time compares with a copy and with fused Adam."""
    bandwidth = max(report.bandwidth_gb_per_s.values())
    ran = [row for row in report.rows if row.median_ms]
    adam = {(r.case, r.tensors): r.median_ms for r in ran if r.optimizer == ADAM_FUSED}
    for row in ran:
        moved = row.bytes_per_parameter * row.parameters
        row.gb_per_s = moved / row.median_ms / 1e6
        row.floor_ms = moved / bandwidth / 1e6
        row.percent_of_floor = 100 * row.floor_ms / row.median_ms
        reference = row.adam_beside_ms or adam.get((row.case, row.tensors))
        if reference is not None:
            row.speed_vs_adam_fused = reference / row.median_ms


def save(report: Report, path: Path | None) -> None:
    compare(report)
    if path is not None:
        write(asdict(report), path)


HEADER = (
    "optimizer",
    "tensors",
    "ms (quartiles)",
    "floor ms",
    "% of floor",
    "bytes/param",
    "GB/s",
    "speed vs torch Adam fused",
    "extra peak MB",
    "state bytes/param",
)


def cells(row: Row) -> tuple[str, ...]:
    if row.unavailable is not None:
        reason = row.unavailable.replace("|", "\\|")
        return row.optimizer, f"{row.tensors:,}", f"unavailable: {reason}", *[""] * 7
    low, high = row.quartiles_ms
    speed, extra = row.speed_vs_adam_fused, row.peak_extra_mb
    state = row.state_bytes_per_parameter
    return (
        row.optimizer,
        f"{row.tensors:,}",
        f"{row.median_ms:.4g} ({low:.4g}–{high:.4g})",
        f"{row.floor_ms:.3g}",
        f"{row.percent_of_floor:.1f}",
        f"{row.bytes_per_parameter:.3g}",
        f"{row.gb_per_s:,.4g}",
        "" if speed is None else f"{speed:.2f}×",
        "" if extra is None else f"{extra:,.1f}",
        "" if state is None else f"{state:.3g}",
    )


def markdown(report: Report) -> str:
    lines = [f"- {name}: {value}" for name, value in report.machine.items()]
    speeds = [f"{name} {gb:,.4g} GB/s" for name, gb in report.bandwidth_gb_per_s.items()]
    lines.insert(0, f"Bytes read plus written: {', '.join(speeds)}. The largest sets the floor.\n")
    tables: defaultdict[str, list[Row]] = defaultdict(list)
    for row in report.rows:
        tables[row.case].append(row)
    for name, rows in tables.items():
        lines += ["", f"### {name}: {rows[0].parameters:,} parameters, {rows[0].dtype}", ""]
        widths = ["---", *["---:"] * (len(HEADER) - 1)]
        lines += [f"| {' | '.join(line)} |" for line in (HEADER, widths, *map(cells, rows))]
    return "\n".join(lines)
