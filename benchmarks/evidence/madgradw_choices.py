"""Which choices make MADGRADW: each made differently, at AdamW's best rate and decay.

    python benchmarks/evidence/madgradw_choices.py --preset gpu --data data --out runs/choices
    ... --problems cifar10 --variants q3,m0.8 --seeds 0,6 --workers 8 --minutes 9
    ... --table

Nothing is searched: rate and decay are the best that docs/results has for AdamW. The runs of
`TRIALS` are shorter than those of docs/results, but for fine-tuning. Each variant is compared with
MADGRADW seed for seed. Runs that are in --out are not repeated.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from madgradw_variants import BASE, CHANGES, COMBINED, PREFIX

from cubegrad.study import StudyError, catalogue, methods, statistics
from cubegrad.study.plan import Plan
from cubegrad.study.records import Record, Runs, Settings

sys.path.append(str(Path(__file__).parents[1]))
from shared import shared_device
from shared.shared_device import Job, Wanted

CHOOSING = (0, 6)  # not among the seeds of docs/results
OTHERS = ("adamw", BASE)


class Trial(NamedTuple):
    """One problem at AdamW's best setting; what is None is the preset's."""

    problem: str
    lr: float
    decay: float
    seconds: float  # expected for a run, beside others
    epochs: int | None = None
    schedule: str | None = None
    at_once: int | None = None


TRIALS = {
    "gpu": (
        Trial("finetune", 2.5e-3, 0.05, 20),
        Trial("bookwiki", 2.5e-3, 0.05, 60, 10, "polynomial:1000", 4),
        Trial("cifar10", 5e-4, 0.5, 100, 18),
        Trial("imagenet", 1e-3, 2.5, 120, 20),
        Trial("iwslt14", 2.5e-2, 0.1, 100, 10),
        Trial("fastmri", 2.5e-3, 2.5e-2, 100, 2),
        Trial("digits", 5e-3, 0.01, 5),
    ),
    "cpu": (Trial("digits", 5e-3, 0.01, 10),),
}


def settings(trial: Trial, method: str, seed: int, preset_name: str) -> Settings:
    problem = catalogue.find(trial.problem)
    changes = {"epochs": trial.epochs, "schedule": trial.schedule}
    given = {name: value for name, value in changes.items() if value}
    preset = replace(problem.presets[preset_name], **given)
    plan = Plan(problem, preset_name, preset, (), "cpu" if preset_name == "cpu" else "cuda")
    entry = methods.entry(method, preset)
    return plan.settings(entry, (trial.lr, trial.decay), seed, hold_out=False)


def wanted(options: argparse.Namespace) -> Iterator[tuple[Trial, Settings]]:
    trials = shared_device.chosen(TRIALS[options.preset], options.problems)
    for seed in options.seeds:
        for name in options.variants:
            for trial in trials:
                one = settings(trial, name, seed, options.preset)
                yield trial, replace(one, epochs=options.epochs or one.epochs)


def jobs(options: argparse.Namespace, runs: Runs) -> list[Job]:
    done = runs.load()[0]
    todo = [
        Wanted(trial.problem, one, trial.seconds, trial.at_once)
        for trial, one in wanted(options)
        if one.key not in done
    ]
    return shared_device.jobs(todo, options.data, runs)


Gains = dict[int, float]  # by seed


def gains(records: Iterable[Record]) -> dict[str, dict[str, Gains]]:
    """By problem and method: by how much each seed is better than MADGRADW's."""
    results: dict[Settings, dict[str, Record]] = defaultdict(dict)
    for record in records:
        results[replace(record.settings, method=BASE)][record.settings.method] = record
    found: dict[str, dict[str, Gains]] = defaultdict(lambda: defaultdict(dict))
    for one, by_method in results.items():
        if (base := by_method.get(BASE)) is None:
            continue
        metric, sign = base.about["metric"], 1 if base.about["higher_is_better"] else -1
        for method, record in by_method.items():
            ours, theirs = base.last(metric), record.last(metric)
            worst = float("-inf")
            gain = worst if theirs is None or ours is None else sign * (theirs - ours)
            found[one.problem][method][one.seed] = gain
    return found


def table(records: Iterable[Record]) -> str:
    """Markdown: by how much each variant is better than MADGRADW, seed for seed."""
    records = list(records)
    found = gains(records)
    problems = [problem for problem in catalogue.NAMES if problem in found]
    units = {record.settings.problem: record.about["unit"] for record in records}
    names = [f"{problem}, {units[problem] or 'SSIM'}" for problem in problems]
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    methods_of = dict.fromkeys(method for problem in problems for method in found[problem])
    for method in sorted(methods_of, key=_order):
        cells = [_cell(found[problem].get(method, {})) for problem in problems]
        lines.append(f"| {_label(method)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _order(method: str) -> tuple[int, str]:
    known = [*OTHERS, *(PREFIX + name for name in (*CHANGES, *COMBINED))]
    return known.index(method) if method in known else len(known), method


def _label(method: str) -> str:
    return methods.METHODS[method].label if method in methods.METHODS else method


def _cell(by_seed: Gains) -> str:
    if not by_seed:
        return "–"
    each = [f"{by_seed[seed]:+.3f}" for seed in sorted(by_seed)]
    mean = statistics.estimate(list(by_seed.values())).mean
    text = each[0] if len(each) == 1 else f"{mean:+.3f} ({', '.join(each)})"
    return text.replace("-", "−")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").splitlines()[0]
    parser = shared_device.parser(description, tuple(TRIALS), "runs/choices")
    add: Any = parser.add_argument
    add("--variants", type=_methods, default=",".join((*OTHERS, *CHANGES)), metavar="A,B")
    add("--seeds", type=_seeds, default=CHOOSING, metavar="A,B")
    return parser.parse_args(words)


def _methods(text: str) -> list[str]:
    known = methods.METHODS
    return [PREFIX + name if PREFIX + name in known else name for name in text.split(",")]


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main(words: Sequence[str] | None = None) -> None:
    shared_device.run_and_print(parse(words), jobs, table)


if __name__ == "__main__":
    import madgradw_choices  # by the name that workers import, so that it is loaded only once

    try:
        madgradw_choices.main()
    except StudyError as error:
        sys.exit(str(error))
