"""Checks the content of records and checkpoints: with a valid checksum, they may hold anything."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cubegrad.study.problem import StudyError, check_name

if TYPE_CHECKING:
    from cubegrad.study.records import Record, Settings

ABOUT = {"description": str, "metric": str, "higher_is_better": bool, "unit": str, "paper": str}


def check(record: "Record") -> None:
    """Raises ValueError for a record that a report could not use as it is."""
    _check_settings(record.settings)
    if record.status not in ("finished", "diverged", "cut"):
        raise ValueError(f"its status is {record.status!r}")
    if not _is(record.seconds, float) or not isinstance(record.machine, dict):
        raise ValueError(f"its seconds are {record.seconds!r}, its machine {record.machine!r}")
    _check_about(record.about)
    check_curve(record.curve, record.status == "diverged")


def check_curve(curve: Any, diverged: bool) -> None:
    """Only a diverged run may lack a number."""
    if not isinstance(curve, dict) or "train_loss" not in curve:
        raise ValueError("its curve has no train_loss")
    for name, values in curve.items():
        _check_text(name)
        if not isinstance(values, list) or not (values or diverged):
            raise ValueError(f"its {name} is {values!r:.60}")
        if not all(_is(value, float) or (diverged and value is None) for value in values):
            raise ValueError(f"its {name} is not a list of numbers")


def check_progress(state: Mapping[str, Any], epochs: int) -> None:
    """Raises ValueError for a checkpoint that no run of this many epochs has left."""
    epoch, seconds, curve = state["epoch"], state["seconds"], state["curve"]
    start = state.get("start", "")
    if not _is(epoch, int) or not 1 <= epoch <= epochs:
        raise ValueError(f"its epoch is {epoch!r:.60} and must be one of 1 to {epochs}")
    if not _is(seconds, float) or seconds < 0:
        raise ValueError(f"its seconds are {seconds!r:.60} and must be a number >= 0")
    if not isinstance(start, str):
        raise ValueError(f"its start is {start!r:.60} and must be text")
    check_curve(curve, diverged=True)
    check_curve(curve, diverged=any(values[-1:] == [None] for values in curve.values()))
    for name, values in curve.items():
        if len(values) > epoch or (name == "train_loss" and len(values) < epoch):
            raise ValueError(f"its {name} has {len(values)} values for {epoch} epochs")


def _check_settings(settings: "Settings") -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not _is(value, field.type):
            raise ValueError(f"its {field.name} is {value!r:.60}")
        if isinstance(value, str):
            _check_text(value)
    try:
        check_name(settings.problem, "problem")
        check_name(settings.preset, "preset")
    except StudyError as error:
        raise ValueError(str(error)) from None


def _check_about(about: Any) -> None:
    if not isinstance(about, dict):
        raise ValueError(f"its about is {about!r}")
    for name, kind in ABOUT.items():
        if name in about and not _is(about[name], kind):
            raise ValueError(f"its {name} is {about[name]!r}")
    beside = about.get("beside", [])
    if not isinstance(beside, list) or not all(isinstance(name, str) for name in beside):
        raise ValueError(f"its beside is {beside!r}")
    about.get("description", "").encode()  # fails for half a surrogate pair
    for text in (about.get("metric", ""), about.get("unit", ""), *beside):
        _check_text(text)


def _check_text(text: Any) -> None:
    """No control characters: a terminal would obey them, and a spreadsheet begin a cell."""
    if not isinstance(text, str) or not text.isprintable():
        raise ValueError(f"{text!r} is not plain text")


def _is(value: Any, kind: Any) -> bool:
    """Stricter than isinstance: a bool is no number, NaN is no float; but an int is a float.

    Ints have 64 bits, so that they become floats where others need those.
    """
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and _finite(value)
    return isinstance(value, kind) and (kind is not int or abs(value) < 2**63)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int of 400 digits
        return False
