"""Records -> experiments: the runs that share a table."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cubegrad.study import statistics
from cubegrad.study.methods import METHODS, PAPER, PaperProblem
from cubegrad.study.records import Record, Settings
from cubegrad.study.statistics import Judge, Summary

# Defaults for records that do not describe their problem.
UNKNOWN: dict[str, Any] = {
    "description": "",
    "metric": "loss",
    "higher_is_better": False,
    "unit": "",
    "paper": "",
}


@dataclass(frozen=True)
class Experiment:
    """One problem at one length on one kind of device."""

    settings: Settings
    about: dict[str, Any]
    records: list[Record]
    summaries: list[Summary]  # schedules together, methods in the order of METHODS

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

    @property
    def ranked(self) -> list[Summary]:
        """The best result first; methods without a result last."""
        return statistics.ranked(self.summaries, self.judge)


def experiments(records: Iterable[Record]) -> list[Experiment]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        s = record.settings
        group = (s.problem, s.preset, s.epochs, s.batch, s.device, s.options)
        groups.setdefault(group, []).append(record)
    result = []
    for members in groups.values():
        about = UNKNOWN | members[0].about
        judge = Judge(about["metric"], about["higher_is_better"])
        entries = statistics.by_entry(members)
        ordered = sorted(entries, key=_sort_key)
        summaries = [statistics.summarise(entries[entry], judge) for entry in ordered]
        result.append(Experiment(members[0].settings, about, members, summaries))
    return result


def _sort_key(entry: str) -> tuple[str, int]:
    method, _, schedule = entry.partition("@")
    return schedule, list(METHODS).index(method) if method in METHODS else len(METHODS)


def file_stems(experiments: Iterable[Experiment]) -> list[str]:
    """A file name for each; duplicates, such as one problem at two lengths, are numbered."""
    taken: dict[str, str] = {}  # by casefolded name: file systems may ignore case
    for experiment in experiments:
        name, number = experiment.name, 1
        while name.casefold() in taken:
            number += 1
            name = f"{experiment.name}-{number}"
        taken[name.casefold()] = name
    return list(taken.values())
