"""Which learning rate? The best one of MADGRAD and of Adam on each problem of docs/results.

    python benchmarks/evidence/which_lr.py

docs/learning_rate.md has the first table. A row has the best lr of the search at its best decay,
its ratio to the best of Adam (or AdamW), the same ratio in the paper's tables, and how flat the
optimum is: what the result changes at the next values of the grid.

docs/coming_from.md has the second one: MADGRAD's best settings here and in the paper.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cubegrad.study import report
from cubegrad.study.experiments import Experiment
from cubegrad.study.records import Runs
from cubegrad.study.statistics import Summary

RESULTS = Path(__file__).parents[2] / "docs" / "results"


class Kind(NamedTuple):
    folder: str
    model: str
    preset: str


KINDS = (
    Kind("cifar10", "convolutional: PreAct ResNet-18 on CIFAR-10", "gpu"),
    Kind("imagenet", "convolutional: ResNet-18 on photographs, 64 px", "gpu"),
    Kind("bookwiki", "transformer from scratch: RoBERTa of 5.4M on novels", "gpu"),
    Kind("finetune", "transformer, fine-tuned: RoBERTa of 5.4M on WikiText-2", "gpu"),
    Kind("finetune", "transformer, fine-tuned: RoBERTa of 0.2M on WikiText-2", "cpu"),
    Kind("finetune", "the same of 0.2M by LoRA, rank 8", "cpu-lora"),
    Kind("iwslt14", "recurrent: LSTMs with attention, German to English", "gpu"),
    Kind("fastmri", "MR images: VarNet of 5.1M", "gpu"),
)


def neighbours(summary: Summary, higher_is_better: bool) -> Iterator[str]:
    """What is lost one value of the grid below the best lr, and one above."""
    assert summary.best is not None
    curve = sorted(summary.lr_curve)
    place = [lr for lr, _ in curve].index(summary.best[0])
    best = curve[place][1]
    sign = 1 if higher_is_better else -1
    for other in (place - 1, place + 1):
        if not 0 <= other < len(curve):
            yield "not run"
            continue
        lr, value = curve[other]
        factor = lr / summary.best[0]
        change = "diverged" if value is None else f"{sign * (value - best):+.3g}".replace("-", "−")
        yield f"×{factor:.2g}: {change}"


def search(kind: Kind) -> tuple[Experiment, Summary, Summary]:
    """The longest runs of a problem; MADGRAD and Adam, or else AdamW, among them."""
    records = Runs(RESULTS / kind.folder).load()[0].values()
    own = [record for record in records if record.settings.preset == kind.preset]
    longest = max(record.settings.epochs for record in own)
    (experiment,) = report.experiments(r for r in own if r.settings.epochs == longest)
    found = {summary.method: summary for summary in experiment.summaries}
    return experiment, found["madgrad"], found.get("adam") or found["adamw"]


def row(kind: Kind) -> list[str]:
    experiment, madgrad, adam = search(kind)
    assert madgrad.best is not None
    assert adam.best is not None
    published = experiment.paper.best if experiment.paper else {}
    papers = published["madgrad"].lr / published["adam"].lr if "adam" in published else None
    better = experiment.judge.higher_is_better
    metric = experiment.judge.metric
    return [
        kind.model,
        f"**{madgrad.best[0]:g}**",
        f"{adam.best[0]:g}",
        f"{madgrad.best[0] / adam.best[0]:.2g}×",
        "–" if papers is None else f"{papers:.2g}×",
        f"{madgrad.best[1]:g}, {adam.best[1]:g}",
        f"{metric}; {', '.join(neighbours(madgrad, better))}",
        ", ".join(neighbours(adam, better)),
    ]


def start(kind: Kind) -> list[str]:
    """From which learning rate and decay to which, in the paper and here; and what they were."""
    experiment, madgrad, adam = search(kind)
    assert madgrad.best is not None
    assert adam.best is not None
    paper = experiment.paper
    if paper is None:  # sizes of models differ too much for more than a ratio
        lr = f"{madgrad.best[0] / adam.best[0]:.2g}× Adam's"
        return [kind.model, lr, f"{madgrad.best[1]:g}", "–", text(madgrad.best)]
    own, theirs = madgrad.best, paper.best["madgrad"]
    lr, decay = (span(own[axis], theirs[axis]) for axis in (0, 1))
    length = f"{paper.architecture.partition(',')[0].strip('.')}, {paper.length}"
    return [kind.model, lr, decay, f"{text(theirs)} ({length})", text(own)]


def text(setting: Sequence[float]) -> str:
    return f"{setting[0]:g}, {setting[1]:g}"


def span(one: float, other: float) -> str:
    low, high = sorted((one, other))
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def starts() -> str:
    heads = ["model", "start from lr", "decay", "the paper's lr, decay", "ours"]
    return markdown([heads, ["---"] * len(heads), *map(start, KINDS)])


def table() -> str:
    heads = ["model", "MADGRAD's best lr", "Adam's", "ratio", "the paper's ratio"]
    heads += ["decay: MADGRAD, Adam", "MADGRAD at the next lr", "Adam at the next lr"]
    return markdown([heads, ["---"] * len(heads), *map(row, KINDS)])


def markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n\n{starts()}\n")
