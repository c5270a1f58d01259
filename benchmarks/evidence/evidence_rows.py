"""The committed records -> one comparison per problem, with a row for each method."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from cubegrad.study import comparison, experiments, statistics
from cubegrad.study.comparison import Difference, Rate
from cubegrad.study.methods import METHODS, estimates
from cubegrad.study.records import Record, Runs, Settings
from cubegrad.study.statistics import Estimate, Judge, Summary

MADGRAD, COMPACT = "madgrad", "-compact"
# The columns of the first table; the peers have a page of their own.
MAIN = (
    "madgrad", "sgd", "adam", "adamw", "adagrad", "mirror-madgrad", "madgrad-compact",
    "madgrad-auto",
)  # fmt: skip
# What a record does not know: imagenet's images are whatever its folder has, here photographs.
TITLES = {
    "cifar10": "CIFAR-10, ResNet-18",
    "imagenet": "photographs, ResNet-18",
    "fastmri": "MR images, VarNet",
    "iwslt14": "translation, LSTM",
    "bookwiki": "novels, RoBERTa",
    "finetune": "fine-tuning, RoBERTa",
    "digits": "digits, two convolutions",
}
TEXT = ("iwslt14", "bookwiki", "finetune")
OLDER_ESTIMATE = "auto"  # the folder whose runs of lr="auto" have an older rule than today's


@dataclass(frozen=True)
class Row:
    """One method on one problem."""

    label: str
    folder: str  # that its runs are from
    records: list[Record]
    summary: Summary
    gain: Difference  # over MADGRAD, seed for seed

    @property
    def method(self) -> str:
        return self.summary.method

    @property
    def searched_lr(self) -> bool:
        return len({record.settings.lr for record in self.records}) > 1

    @property
    def chosen_by_its_seeds(self) -> bool:
        """Whether the reported seeds also chose the setting, which flatters the result."""
        searched = len(self.records) > len(self.summary.seeds)
        return searched and {r.settings.seed for r in self.records} == {*self.summary.seeds}

    @property
    def seconds(self) -> list[float]:
        return [record.seconds for record in self.records]


@dataclass(frozen=True)
class Comparison:
    """One problem, run in one way, with the methods that can be compared; the best one first."""

    settings: Settings
    judge: Judge
    unit: str
    rows: list[Row]
    left_out: list[str] = field(default_factory=list)
    others: list["Comparison"] = field(default_factory=list)  # of the problem, run in other ways

    @property
    def title(self) -> str:
        return TITLES.get(self.settings.problem, self.settings.problem)

    @property
    def short_title(self) -> str:
        """For a plot or a sentence."""
        return self.title.partition(",")[0]

    @property
    def name(self) -> str:
        one = self.settings
        return f"`{one.problem}`, preset `{one.preset}`, {one.epochs} epochs"

    @property
    def kind(self) -> str:
        return "text" if self.settings.problem in TEXT else "images"

    def row(self, *methods: str) -> Row | None:
        """Of the first of these methods that was run."""
        found = (row for method in methods for row in self.rows if row.method == method)
        return next(found, None)

    def final(self, row: Row) -> Estimate:
        return row.summary.final[self.judge.metric]


def load(results: Path) -> dict[str, list[Record]]:
    """By folder; folders inside these have runs of older versions and of other machines."""
    folders = {}
    for path in sorted(results.glob("*/records.jsonl")):
        runs, broken = Runs(path.parent).load()
        if broken:
            raise SystemExit(broken[0])
        name = path.parent.name
        folders[name] = [
            record
            for record in (*runs.values(), *Runs(path.parent).cut().values())
            if name != OLDER_ESTIMATE or not estimates(record.settings.method)
        ]
    return folders


def profile(one: Comparison, row: Row) -> list[Rate]:
    """The learning rates of its search, at the best decay."""
    chosen = row.summary.best[0] if row.summary.best else 0.0
    return comparison.lr_profile(row.summary.lr_curve, chosen, one.judge.higher_is_better)


def repeats(folders: dict[str, list[Record]]) -> dict[str, tuple[float, int, str]]:
    """By problem, the largest difference of two runs of the same settings, how many, the unit.

    A record that was copied into another folder is no second run.
    """
    runs: dict[tuple[Settings, str], list[float]] = defaultdict(list)
    units = {}
    for record in (record for records in folders.values() for record in records):
        value = record.last(record.about["metric"])
        units[record.settings.problem] = record.about["unit"]
        begun = runs[record.settings, start_of(record)]
        if value is not None and not record.cut and value not in begun:
            begun.append(value)
    gaps: dict[str, tuple[float, int, str]] = {}
    for (settings, _), values in runs.items():
        if len(values) > 1:
            problem = settings.problem
            gap, n, unit = gaps.get(problem, (0.0, 0, units[problem]))
            gaps[problem] = max(gap, max(values) - min(values)), n + 1, unit
    return gaps


Group = tuple[str, str, int, int, str, str, str]
Way = tuple[str, int, int, str]  # preset, epochs, batch, options


def start_of(record: Record) -> str:
    """The weights it began with: fine-tuning from other weights is another comparison."""
    return str(record.machine.get("start"))


def comparisons(folders: dict[str, list[Record]]) -> tuple[list[Comparison], list[str]]:
    """One for each problem on a GPU, and what was left out.

    Of several lengths, the longest at which MADGRAD, SGD and Adam have seeds beyond the search's,
    and of several of that length the one with more methods, or with more runs. The others come
    after it.
    """
    groups: dict[Group, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for folder, records in folders.items():
        for record in records:
            s = record.settings
            kind = (s.problem, s.preset, s.epochs, s.batch, s.device, s.options)
            group: Group = (*kind, start_of(record))
            groups[group][folder].append(record)
    of_problem: dict[str, list[Comparison]] = defaultdict(list)
    left_out = []
    for one in map(_compare, groups.values()):
        if one.settings.device != "cuda":
            left_out.append(f"{one.name}: on a CPU")
        elif not one.row(MADGRAD) or not one.row("sgd", "adam", "adamw"):
            left_out.append(f"{one.name}: no SGD, Adam or AdamW beside MADGRAD yet")
        else:
            of_problem[one.settings.problem].append(one)
    found = []
    for problem in [*TITLES, *sorted(of_problem.keys() - TITLES.keys())]:
        if problem not in of_problem:
            continue
        ways: dict[Way, list[Comparison]] = defaultdict(list)
        for one in sorted(of_problem[problem], key=_priority, reverse=True):
            ways[_way(one)].append(one)
        shown = [first for first, *_ in ways.values()]
        again = [one for _, *rest in ways.values() for one in rest]
        left_out += [f"{one.name}: other weights have more methods" for one in again]
        left_out += [line for one in shown for line in one.left_out]
        found.append(replace(shown[0], others=shown[1:]))
    return found, sorted(left_out)


def _way(one: Comparison) -> Way:
    s = one.settings
    return s.preset, s.epochs, s.batch, s.options


def _priority(one: Comparison) -> tuple[bool, int, int, int]:
    """Sort key: of a problem's comparisons, the one with the highest key is the first."""
    rows = [one.row(method) for method in (MADGRAD, "sgd", "adam")]
    finished = all(row is not None and not row.chosen_by_its_seeds for row in rows)
    methods = sum(one.row(method) is not None for method in MAIN)
    return finished, one.settings.epochs, methods, sum(len(row.records) for row in one.rows)


def _compare(places: dict[str, list[Record]]) -> Comparison:
    first = next(iter(places.values()))[0]
    about = experiments.UNKNOWN | first.about
    judge = Judge(about["metric"], about["higher_is_better"])
    home = _homes(places)
    summaries = {entry: statistics.summarise(runs, judge) for entry, (_, runs) in home.items()}
    base = next((entry for entry in home if entry.partition("@")[0] == MADGRAD), None)
    empty = Comparison(first.settings, judge, about["unit"], [])
    rows, left_out = [], []
    for entry, (folder, runs) in home.items():
        method, _, schedule = entry.partition("@")
        label = METHODS[method].label if method in METHODS else method
        if sum(other.partition("@")[0] == method for other in home) > 1:
            label += f", {schedule}"
        summary = summaries[entry]
        name = f"{empty.name}, {label}"
        if judge.metric not in summary.final:
            left_out.append(f"{name}: no run finished")
        elif _with_another_rate(entry, summaries):
            left_out.append(f"{name}: only at another rate than MADGRAD's best")
        else:
            against = _madgrad(places, home, summaries[base], folder, judge) if base else {}
            gain = comparison.difference(_finals(runs, summary, judge), against, judge)
            rows.append(Row(label, folder, runs, summary, gain))
    way = -1 if judge.higher_is_better else 1
    rows.sort(key=lambda row: way * row.summary.final[judge.metric].mean)
    return replace(empty, rows=rows, left_out=left_out)


def _homes(places: dict[str, list[Record]]) -> dict[str, tuple[str, list[Record]]]:
    """For each entry the folder that its row is from: the problem's own, else that with most runs.

    Repeated runs are in other folders; a mean over both would mix days and versions.
    """
    homes: dict[str, tuple[str, list[Record]]] = {}
    problem = next(iter(places.values()))[0].settings.problem

    def value(folder: str, runs: list[Record]) -> tuple[bool, int, str]:
        return folder == problem, len(runs), max(str(run.machine.get("date")) for run in runs)

    for folder, records in places.items():
        for entry, runs in statistics.by_entry(records).items():
            if entry not in homes or value(folder, runs) > value(*homes[entry]):
                homes[entry] = folder, runs
    return homes


def _with_another_rate(entry: str, summaries: dict[str, Summary]) -> bool:
    """Whether a state in codes was run, without a search, at another rate than float32's best."""
    method, _, schedule = entry.partition("@")
    base = summaries.get(f"{method.removesuffix(COMPACT)}@{schedule}")
    lone = not summaries[entry].searched and not estimates(method)
    return method.endswith(COMPACT) and lone and (not base or base.best != summaries[entry].best)


def _finals(runs: Iterable[Record], summary: Summary, judge: Judge) -> dict[int, float | None]:
    reported = comparison.reported(runs, summary)
    return {seed: record.last(judge.metric) for seed, record in reported.items()}


def _madgrad(
    places: dict[str, list[Record]],
    home: dict[str, tuple[str, list[Record]]],
    base: Summary,
    folder: str,
    judge: Judge,
) -> dict[int, float | None]:
    """MADGRAD's final results at its best setting, by seed: those of the same folder if it has any.

    fastmri does not repeat from day to day, so pairs of one day are the better pairs.
    """
    own = home[base.entry][1]
    # A seed that chose MADGRAD's setting favours MADGRAD.
    chose = {run.settings.seed for runs in statistics.searched(own).values() for run in runs}
    beside = {
        run.settings.seed: run.last(judge.metric)
        for run in places[folder]
        if run.settings.entry == base.entry
        and (run.settings.lr, run.settings.decay) == base.best
        and run.settings.seed not in chose - {*base.seeds}
        and not run.settings.hold_out
        and not run.cut
    }
    return beside or _finals(own, base, judge)
