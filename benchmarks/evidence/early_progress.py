"""Why is MADGRAD behind Adam early in a run on text? A GPT on bytes, one cause changed at a time.

    python benchmarks/evidence/early_progress.py --text novels.txt --out runs --workers 2
    ... --only warm-up       one experiment of several
    ... --plot early.png     the figure of what is in --out as well
    ... --table              only print the tables of what is in --out
    ... --preset tiny --text README.md --out /tmp/early   a smoke test

Each experiment is a list of (method, schedule) with learning rates a factor 2 apart. The first seed
runs them all, and the others the one that was best at the end (in the main experiment, all). Runs
with one seed have the same initial weights and batches. Runs that are in --out are not repeated.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from early_methods import METHODS, factors
from early_report import AS_ADAM, MAIN, best, draw, loss_at, lr_table, step_table, table
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).parents[1]))
from shared.byte_gpt import GPT, Preset, Record, Text, load, run_all, say
from shared.facts import processor, version

PRESETS = {
    "small": Preset(64, 2, 4, 64, 8, 1000, 3, 25),  # 120k parameters
    "tiny": Preset(16, 1, 2, 16, 4, 40, 2, 1),
}
POINTS = 40  # of a curve
VALIDATED = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # of the run
EARLY = 0.1


class Trial(NamedTuple):
    method: str
    schedule: str
    lrs: tuple[float, ...]
    seeds: int = 3
    all_lrs: bool = False  # the other seeds run all learning rates, not the best one only


EXPERIMENTS = {
    "main": [
        Trial("Adam", MAIN, (0.002, 0.004, 0.008), all_lrs=True),
        Trial("MADGRAD", MAIN, (0.00125, 0.0025, 0.005, 0.01), all_lrs=True),
    ],
    "one change": [
        Trial("MirrorMADGRAD", MAIN, (0.015, 0.03, 0.06)),
        Trial("MADGRAD, square root", MAIN, (2e-4, 4e-4, 8e-4)),
        Trial("MADGRAD, square root", AS_ADAM, (4e-4, 8e-4, 16e-4)),
        Trial("Adam, cube root", MAIN, (0.008, 0.016, 0.032)),
        Trial("Adam, cube root inside tensors", MAIN, (0.001, 0.002, 0.004)),
        Trial("Adam, cube root between tensors", MAIN, (0.016, 0.032, 0.064)),
        Trial("Adam, whole-run mean", MAIN, (0.004,)),
        Trial("MADGRAD", AS_ADAM, (0.0025, 0.005, 0.01, 0.02)),
    ],
    "warm-up": [
        Trial("Adam", "50% linear", (0.004, 0.008, 0.016, 0.032)),
        Trial("MADGRAD", "50% linear", (0.0025, 0.005, 0.01)),
        Trial("Adam", "0% linear", (0.001, 0.002, 0.004)),
        Trial("MADGRAD", "0% linear", (0.0025, 0.005, 0.01)),
        Trial("Adam", "2% linear", (0.001, 0.002, 0.004)),
        Trial("MADGRAD", "2% linear", (0.00125, 0.0025, 0.005)),
        Trial("Adam", "30% linear", (0.004, 0.008, 0.016)),
        Trial("MADGRAD", "30% linear", (0.005, 0.01, 0.02)),
    ],
    "others": [
        Trial("Adam", f"{MAIN}, as in MADGRAD", (0.004,)),
        Trial("MADGRAD, constant λ", MAIN, (0.04, 0.08)),
        Trial("MADGRAD, momentum 0.8", MAIN, (0.0025, 0.005)),
        Trial("MADGRAD, momentum 0.97", MAIN, (0.005, 0.01)),
        Trial("MADGRAD, starting over", MAIN, (0.0025, 0.005)),
        Trial("Adam", "10% flat", (0.002, 0.004)),
        Trial("MADGRAD", "10% flat", (0.0025, 0.005)),
        Trial("Adam, cube root inside the embedding", MAIN, (0.002, 0.004)),
        Trial("Adam, cube root inside attention's inputs", MAIN, (0.002, 0.004)),
    ],
}


class Float32GPT(GPT):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.bytes(x) + self.places))
        return hidden @ self.bytes.weight.T


def bits(model: GPT, windows: Tensor) -> Tensor:
    """The loss in bits a byte."""
    logits = model(windows[:, :-1]).flatten(0, 1)
    return cross_entropy(logits, windows[:, 1:].flatten()) / math.log(2)


def snapshot(model: GPT) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def step_size(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The root mean square over all weights."""
    moves = torch.cat([(after[name] - before[name]).flatten() for name in before])
    return float(f"{moves.square().mean().sqrt().item():.4g}")


def validate(model: GPT, text: Text, preset: Preset) -> float:
    with torch.no_grad():
        batches = text.windows("validation", 0, preset.validation_batches, 2 * preset.batch)
        return statistics.fmean(bits(model, batch).item() for batch in batches)


def train(job: tuple[str, str, float, int], preset_name: str, path: Path) -> Record:
    torch.set_num_threads(1)
    (name, schedule, lr, seed), preset = job, PRESETS[preset_name]
    torch.manual_seed(seed)
    model = Float32GPT(preset)
    optimizer = METHODS[name](model.named_parameters(), lr=lr)
    text, started = Text(path, preset, "cpu"), time.monotonic()
    factor = factors(schedule, preset.steps)
    every = max(1, preset.steps // POINTS)
    due = {max(1, round(share * preset.steps)): share for share in VALIDATED}
    curve, moves, validation, seen = [], [], {}, list[float]()
    for step, batch in enumerate(text.windows("train", seed, preset.steps, preset.batch)):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor[step]
        if "starting over" in name and factor[step] == 1.0 and max(factor[:step], default=1) < 1:
            optimizer.restart()
        optimizer.zero_grad()
        loss = bits(model, batch)
        loss.backward()
        seen.append(loss.item())
        measured = (step + 1) % every == 0
        before = snapshot(model) if measured else {}
        optimizer.step()
        if measured:
            moves.append(step_size(before, snapshot(model)))
            curve.append(round(statistics.fmean(seen), 4))
            seen = []
        if step + 1 in due:
            validation[f"{due[step + 1]:g}"] = round(validate(model, text, preset), 5)
            if not math.isfinite(loss.item()):
                break
    return {
        "method": name,
        "schedule": schedule,
        "lr": lr,
        "seed": seed,
        "preset": preset_name,
        "steps": preset.steps,
        "parameters": sum(param.numel() for param in model.parameters()),
        "validation": validation,
        "curve": curve,
        "moves": moves,
        "seconds": round(time.monotonic() - started, 1),
        "text": path.name,
        "machine": processor(),
        "torch": version("torch"),
        "date": time.strftime("%Y-%m-%d"),
    }


def missing(records: Sequence[Record], name: str, preset: str) -> list[tuple[Any, ...]]:
    """What is to be run next: all learning rates with the first seed, then the best with others."""
    known = {
        tuple(record[key] for key in ("method", "schedule", "lr", "seed")) for record in records
    }
    pairs = EXPERIMENTS[name]
    first = [(t.method, t.schedule, lr, 0) for t in pairs for lr in t.lrs]
    if left := [job for job in dict.fromkeys(first) if job not in known]:
        return left
    more = []
    for trial in pairs:
        mine = [r for r in records if (r["method"], r["schedule"], r["seed"]) == (*trial[:2], 0)]
        lrs = trial.lrs if trial.all_lrs else (best(mine, 1.0),)
        seeds = range(1, min(trial.seeds, PRESETS[preset].seeds))
        more += [(trial.method, trial.schedule, lr, seed) for lr in lrs for seed in seeds]
    return [job for job in dict.fromkeys(more) if job not in known]


def result(record: Record) -> str:
    name = f"{record['method']}, {record['schedule']}, lr {record['lr']:g}, seed {record['seed']}"
    early, last = (f"{loss_at(record, share):.3f}" for share in (EARLY, 1.0))
    return f"{name}: {early} early, {last} at last"


def tables(records: Sequence[Record]) -> str:
    pairs = {name: [trial[:2] for trial in trials] for name, trials in EXPERIMENTS.items()}
    each = [f"{name}\n\n{table(records, some)}" for name, some in pairs.items()]
    rest = {"learning rates": lr_table(records), "step sizes": step_table(records)}
    return "\n\n".join([*each, *(f"{name}\n\n{text}" for name, text in rest.items())])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, help="a plain text file")
    parser.add_argument("--out", type=Path, required=True, help="the folder of records.jsonl")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--workers", type=int, default=1, help="processes, with a thread each")
    parser.add_argument("--table", action="store_true", help="print the tables and run nothing")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    options = parser.parse_args(words)
    file = options.out / "records.jsonl"
    if not options.table:
        if options.text is None or not options.text.is_file():
            parser.error(f"--text {options.text} must be a file; give a plain text of some MB")
        options.out.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            while jobs := missing(load(file), name, options.preset):
                work = [(job, options.preset, options.text.resolve()) for job in jobs]
                run_all(train, work, result, file, options.workers)
    say(tables([record for record in load(file) if record["preset"] == options.preset]))
    if options.plot:
        draw(load(file), options.plot)


if __name__ == "__main__":
    main()
