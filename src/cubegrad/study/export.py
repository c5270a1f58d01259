"""Records for other tools: one CSV table, or TensorBoard's event files."""

import csv
import io
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cubegrad.study import logs
from cubegrad.study.files import replacing, writing
from cubegrad.study.problem import optional
from cubegrad.study.records import ESTIMATED_LR, Record, Settings

Curve = list[float | None]
# A cell that begins with one of these may be a formula to a spreadsheet, in quotes too.
FORMULA = tuple("=+-@＝＋－＠\t\r\n")


def by_epoch(record: Record) -> dict[str, Curve]:
    """The curve with a value or None for each epoch.

    A metric that was not measured after every epoch counts for the last ones, as in the tables; a
    run that diverged has no metrics for its last epoch.
    """
    epochs = max(len(values) for values in record.curve.values())
    result: dict[str, Curve] = {}
    for name, values in record.curve.items():
        missing: Curve = [None] * (epochs - len(values))
        result[name] = values + missing if record.diverged else missing + values
    return result


def write_csv(records: Iterable[Record], path: Path) -> None:
    """One row for each epoch of each run; an empty cell is a value that is not there.

    Text that a spreadsheet might run as a formula begins with an apostrophe; numbers never do.
    """
    records = list(records)
    names = list(dict.fromkeys(name for record in records for name in record.curve))
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    heads = ["key", *(field.name for field in fields(Settings)), "status", "seconds", "epoch"]
    titles = [*heads, *(f"metric {name}" if name in heads else name for name in names)]
    table.writerow(map(_inert, titles))
    for record in records:
        table.writerows(map(_inert, row) for row in _rows(record, names))
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def _inert(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def _rows(record: Record, names: Sequence[str]) -> Iterator[list[object]]:
    run = [record.settings.key, *asdict(record.settings).values(), record.status, record.seconds]
    curve = by_epoch(record)
    for index in range(max(map(len, curve.values()))):
        yield [*run, index + 1, *(curve[name][index] if name in curve else None for name in names)]


def write_tensorboard(records: Iterable[Record], folder: Path) -> int:
    """One folder of events for each run that has none in `folder` yet; returns how many are new."""
    writer = optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
    new = 0
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for record in records:
            s = record.settings
            target = folder / f"{s.problem}-{s.preset}" / logs.name(s)
            if target.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            # Renamed when complete: a run that is there is whole.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".") as draft:
                with writer(log_dir=f"{draft}/run") as events:
                    _write_events(record, events)
                Path(draft, "run").rename(target)
            new += 1
    return new


def _write_events(record: Record, events: Any) -> None:
    s, curve = record.settings, by_epoch(record)
    split = "valid" if s.hold_out else "test"
    tags = {name: f"{split}/{name}" for name in curve}
    tags |= {"train_loss": "train/loss", ESTIMATED_LR: ESTIMATED_LR}
    begun = _timestamp(str(record.machine.get("date")))
    for name, values in curve.items():
        for epoch, value in enumerate(values, 1):
            if value is not None:
                when = begun + record.seconds * epoch / len(values)
                events.add_scalar(tags[name], value, epoch, walltime=when)
    final = {f"final/{name}": last for name in curve if (last := record.last(name)) is not None}
    chosen = ("problem", "preset", "method", "schedule", "lr", "decay", "seed", "epochs", "batch")
    settings = {name: getattr(s, name) for name in chosen}
    events.add_hparams(settings, final, run_name=".")


def _timestamp(date: str) -> float:
    """Of a record's date, so that exporting twice gives the same times; 0 if it has none."""
    try:
        return datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
