"""Do bfloat16 weights learn? A GPT on bytes, with bfloat16 weights and with float32 ones.

    python benchmarks/memory/bf16_training.py --text novels.txt --out runs/bf16 --workers 6
    ... --minutes 5          start no run that would probably end later
    ... --table              only print the table of what is in --out
    ... --preset cpu --text README.md --out /tmp/bf16   a smoke test

The learning rates are small on purpose: most moves are then below half a unit in the last place of
a bfloat16 weight, and rounding to nearest loses them. Activations are bfloat16 in every run, so
only the weights differ: bfloat16 throughout, or float32 under autocast. Runs with one seed have
the same initial weights and batches. Runs that are in --out are not repeated.
"""

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cubegrad import MADGRAD
from cubegrad.study.graphs import GraphedStep

sys.path.append(str(Path(__file__).parents[1]))
from shared.byte_gpt import GPT, Preset, Record, Text, load, run_all, say
from shared.facts import processor, version

SGD, ADAMW, AT_RANDOM = torch.optim.SGD, torch.optim.AdamW, {"stochastic_rounding": True}
CURVE = 20  # points
LAST = 0.1  # of the run, in which it is counted how many weights move


PRESETS = {
    "gpu": Preset(320, 6, 5, 256, 32, 2500, 3, 50),  # 7.6M parameters
    "cpu": Preset(32, 1, 2, 32, 4, 40, 2, 2),
}


class Method(NamedTuple):
    name: str
    family: str  # methods of one family are compared with the one of it that has float32 weights
    weights: str
    lr: float
    build: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]

    def __hash__(self) -> int:
        return hash(self.name)


ALL = (
    Method("MADGRAD, float32 weights", "MADGRAD", "float32", 5e-4, MADGRAD, {}),
    Method("MADGRAD, to nearest", "MADGRAD", "bfloat16", 5e-4, MADGRAD, {}),
    Method("MADGRAD, stochastic_rounding", "MADGRAD", "bfloat16", 5e-4, MADGRAD, AT_RANDOM),
    Method("MADGRAD, compact", "MADGRAD", "bfloat16", 5e-4, MADGRAD, {"compact": True}),
    Method("AdamW, float32 weights", "AdamW", "float32", 1e-4, ADAMW, {"weight_decay": 0.0}),
    Method("AdamW", "AdamW", "bfloat16", 1e-4, ADAMW, {"weight_decay": 0.0}),
    Method("SGD, float32 weights", "SGD", "float32", 0.02, SGD, {"momentum": 0.9}),
    Method("SGD", "SGD", "bfloat16", 0.02, SGD, {"momentum": 0.9}),
)
METHODS = {method.name: method for method in ALL}


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    # Without the cache, which would keep weights of the step before in a CUDA graph.
    with torch.autocast(windows.device.type, torch.bfloat16, cache_enabled=False):
        logits = model(windows[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def factor(step: int, steps: int) -> float:
    """Of the learning rate: a short warm-up, then down to a tenth in a straight line."""
    return min(1.0, (step + 1) / (0.04 * steps), 1 - 0.9 * step / steps)


def train(name: str, lr: float, seed: int, preset_name: str, text: Path, device: str) -> Record:
    method, preset = METHODS[name], PRESETS[preset_name]
    torch.manual_seed(seed)
    model = GPT(preset).to(device, getattr(torch, method.weights))
    optimizer = method.build(model.parameters(), lr=lr, fused=True, **method.options)
    words, started = Text(text, preset, device), time.monotonic()
    graphed = GraphedStep(model, loss_of, preset.batch) if device == "cuda" else None
    curve, total, since = [], torch.zeros((), device=device), 0
    every, early = max(1, preset.steps // CURVE), list[Tensor]()
    for step, batch in enumerate(words.windows("train", seed, preset.steps, preset.batch)):
        if step == int(preset.steps * (1 - LAST)):
            early = [param.detach().clone() for param in model.parameters()]
        for group in optimizer.param_groups:
            group["lr"] = lr * factor(step, preset.steps)
        if graphed is not None:
            loss = graphed(optimizer, (batch,))
        else:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
        total, since = total + loss.detach(), since + 1
        if since == every or step + 1 == preset.steps:
            curve.append((step + 1, round(total.item() / since, 5)))
            total, since = torch.zeros((), device=device), 0
    pairs = zip(model.parameters(), early, strict=True)
    moved = sum(int((param != old).sum()) for param, old in pairs)
    with torch.no_grad():
        held_out = words.windows("validation", 0, preset.validation_batches, preset.batch)
        validation = statistics.fmean(loss_of(model, batch).item() for batch in held_out)
    return {
        "method": name,
        "lr": lr,
        "seed": seed,
        "preset": preset_name,
        "steps": preset.steps,
        "parameters": sum(param.numel() for param in model.parameters()),
        "validation": validation,
        "moved": moved / sum(old.numel() for old in early),
        "curve": curve,
        "seconds": round(time.monotonic() - started, 1),
        "text": text.name,
        "machine": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "torch": version("torch"),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(records: Sequence[Record]) -> str:
    """Means over the seeds with two standard errors; differences are seed for seed."""
    found: dict[tuple[Method, float], dict[int, Record]] = defaultdict(dict)
    for record in records:
        found[METHODS[record["method"]], record["lr"]][record["seed"]] = record
    head = "weights,optimizer,lr,seeds,validation loss,above float32 weights,moved in last tenth"
    lines = [head.split(",")]
    for method, rate in sorted(found, key=lambda pair: (ALL.index(pair[0]), pair[1])):
        runs = found[method, rate]
        full = [m for m in ALL if (m.family, m.weights) == (method.family, "float32")]
        exact = found.get((full[0], rate), {})
        shared = sorted(runs.keys() & exact.keys())
        above = [runs[seed]["validation"] - exact[seed]["validation"] for seed in shared]
        share = statistics.fmean(run["moved"] for run in runs.values())
        result = _mean([run["validation"] for run in runs.values()])
        more = "" if method is full[0] or not above else _mean(above, sign="+")
        cells = [method.weights, method.name, f"{rate:g}", str(len(runs)), result, more]
        lines.append([*cells, f"{100 * share:.1f} %"])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _mean(values: Sequence[float], sign: str = "") -> str:
    mean = f"{statistics.fmean(values):{sign}.4f}"
    errors = [2 * statistics.stdev(values) / math.sqrt(len(values))] if len(values) > 1 else []
    return " ± ".join([mean, *(f"{error:.4f}" for error in errors)])


def result(record: Record) -> str:
    reached = f"validation loss {record['validation']:.4f} in {record['seconds']} s"
    return f"{record['method']}, seed {record['seed']}: {reached}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="a plain text file")
    parser.add_argument("--out", type=Path, required=True, help="the folder of records.jsonl")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lr", nargs=2, action="append", default=[], metavar=("FAMILY", "LR"))
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    options = parser.parse_args(words)
    file = options.out / "records.jsonl"
    device = "cpu" if options.preset == "cpu" else "cuda"
    rates = {family: float(lr) for family, lr in options.lr}
    names = ("method", "lr", "seed", "preset")
    known = {tuple(record[name] for name in names) for record in load(file)}
    if not options.table:
        if options.text is None or not options.text.is_file():
            parser.error(f"--text {options.text} must be a file; give a plain text of some MB")
        options.out.mkdir(parents=True, exist_ok=True)
        wanted = [
            (name, rates.get(METHODS[name].family, METHODS[name].lr), seed, options.preset)
            for seed in range(PRESETS[options.preset].seeds)
            for name in options.methods
        ]
        jobs = [(*one, options.text.resolve(), device) for one in wanted if one not in known]
        run_all(train, jobs, result, file, options.workers, options.minutes)
    say(table([record for record in load(file) if record["preset"] == options.preset]))


if __name__ == "__main__":
    main()
