"""GPU hours of the paper's problems at full size, from the time of an update on this GPU.

    PYTHONPATH=src python3 benchmarks/paper_cost.py --json paper_cost.json

Trains on random data of the real shapes with MADGRAD, as preset `paper` does. Evaluation is not
included, nor the wait for data that is read more slowly than the GPU trains.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import facts
import torch
from cifar10_busy import random_images

from cubegrad import MADGRAD
from cubegrad.study import Setup, catalogue
from cubegrad.study.data import cifar10 as cifar10_data
from cubegrad.study.data.masking import masked
from cubegrad.study.data.translation import Batch
from cubegrad.study.graphs import GraphedStep
from cubegrad.study.models.kspace import Slices
from cubegrad.study.models.lstm_attention import Translator
from cubegrad.study.models.resnet import ResNet
from cubegrad.study.models.varnet import VarNet
from cubegrad.study.problem import Preset
from cubegrad.study.problems import bookwiki, cifar10, fastmri, imagenet, iwslt14
from cubegrad.study.records import machine

Update = Callable[[], object]
IMAGENET = 1_281_167  # training images
KNEES = 34_742  # training slices of fastMRI's multi-coil knees
KNEE = (15, 640, 368)  # coils, height, width: the most common shape
SENTENCE = 24  # about the mean number of subwords in a sentence of IWSLT14
TYPES = (8848, 6632)  # vocabulary sizes, German and English


@dataclass(frozen=True)
class Cost:
    problem: str
    updates: int  # per run
    seconds: float  # per update, median
    hours: float  # per run
    compared: int  # runs: four methods, the paper's seeds
    searched: int  # runs: the preset's first grids


def cifar10_update(preset: Preset, device: torch.device) -> tuple[Update, int]:
    cifar10_data.cifar10 = random_images
    preset = replace(preset, options={**preset.options, "compile": False})
    task = cifar10.build(Setup(preset, 0, device, Path()))
    optimizer = MADGRAD(task.model.parameters(), lr=1e-6)
    batches = iter(list(task.batches(0))[:-1])
    step = task.step or (lambda *_: None)
    return lambda: step(optimizer, next(batches)), task.steps_per_epoch * preset.epochs


def imagenet_update(preset: Preset, device: torch.device) -> tuple[Update, int]:
    side, batch = preset.options["side"], preset.batch
    model = ResNet(preset.options["stages"], preset.options["width"], 1000)
    model = model.to(device, memory_format=torch.channels_last)
    images = torch.randint(256, (batch, 3, side, side), device=device, dtype=torch.uint8)
    labels = torch.randint(1000, (batch,), device=device)
    step = GraphedStep(model, imagenet.mean_loss, batch)
    optimizer = MADGRAD(model.parameters(), lr=1e-6)
    updates = math.ceil(IMAGENET / batch) * preset.epochs
    return lambda: step(optimizer, (images, labels)), updates


def fastmri_update(preset: Preset, device: torch.device) -> tuple[Update, int]:
    coils, height, width = KNEE
    model = VarNet(*preset.options["network"], mixed=False).to(device)
    kspace = torch.randn((1, coils, height, width), dtype=torch.complex64, device=device)
    one = Slices(kspace, torch.rand((1, 320, 320), device=device), torch.ones(1, device=device))
    step = fastmri.Step(model, preset.options["low"])
    optimizer = MADGRAD(model.parameters(), lr=1e-6)
    updates = math.ceil(KNEES / preset.batch) * preset.epochs
    return lambda: step(optimizer, [one] * preset.batch), updates


def iwslt14_update(preset: Preset, device: torch.device) -> tuple[Update, int]:
    width, dropout = preset.options["width"], preset.options["dropout"]
    model = Translator(*TYPES, width, dropout, iwslt14.PAD).to(device)
    count = preset.batch // SENTENCE
    source, target = (torch.randint(4, types, (count, SENTENCE), device=device) for types in TYPES)
    batch = Batch(source, torch.full((count,), SENTENCE), target)
    step = iwslt14.make_step(model)
    optimizer = MADGRAD(model.parameters(), lr=1e-6)
    return lambda: step(optimizer, batch), preset.epochs * preset.options["steps"]


def bookwiki_update(preset: Preset, device: torch.device) -> tuple[Update, int]:
    options = dict(preset.options)
    model = bookwiki.network(options, options["vocabulary"]).to(device)
    shape = preset.batch, options["length"]
    rows = torch.randint(5, options["vocabulary"], shape, device=device)
    update = masked(rows, options["vocabulary"], torch.Generator(device).manual_seed(0))
    step = bookwiki.make_step(model, options["at_once"], options["clip"])
    optimizer = MADGRAD(model.parameters(), lr=1e-6)
    return lambda: step(optimizer, update), preset.epochs * options["updates"]


UPDATES = {
    "cifar10": cifar10_update,
    "imagenet": imagenet_update,
    "fastmri": fastmri_update,
    "iwslt14": iwslt14_update,
    "bookwiki": bookwiki_update,
}


def timed(update: Update, budget: float) -> float:
    """The median time of an update, without the first two."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - start < budget and len(times) < 100):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        update()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times[2:])[len(times[2:]) // 2]


def cost(name: str, device: torch.device, budget: float) -> Cost:
    preset = catalogue.find(name).presets["paper"]
    torch.manual_seed(0)
    update, updates = UPDATES[name](preset, device)
    seconds = timed(update, budget)
    grid = 3 * len(preset.decays) * len(preset.methods)  # each range has three values
    runs = len(preset.methods) * preset.seeds
    return Cost(name, updates, seconds, updates * seconds / 3600, runs, grid)


def table(costs: Sequence[Cost]) -> str:
    lines = [
        "| problem | updates | ms each | GPU hours a run | 4 methods, all seeds | the search |",
        "|---|---|---|---|---|---|",
    ]
    for c in costs:
        all_seeds = f"{c.compared} runs, {c.compared * c.hours:,.0f} h"
        search = f"{c.searched} runs, {c.searched * c.hours:,.0f} h"
        cells = (f"{c.updates:,}", f"{1000 * c.seconds:,.1f}", f"{c.hours:.2f}", all_seeds, search)
        lines.append(f"| {c.problem} | {' | '.join(cells)} |")
    total = sum((c.compared + c.searched) * c.hours for c in costs)
    return "\n".join([*lines, f"\nIn all {total:,.0f} GPU hours."])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", nargs="+", choices=list(UPDATES), default=list(UPDATES))
    parser.add_argument("--seconds", type=float, default=5.0, help="to time each problem")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("paper_cost: torch sees no GPU, and these sizes need one")
    device = torch.device("cuda")
    costs = []
    for name in options.problems:
        costs.append(cost(name, device, options.seconds))
        print(table(costs[-1:]).splitlines()[2], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    print(table(costs))
    if options.json is not None:
        rows = [asdict(one) for one in costs]
        facts.write({"machine": machine(device), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
