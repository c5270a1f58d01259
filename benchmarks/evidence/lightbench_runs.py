"""How often does each optimizer win in lightbench, a benchmark that nobody here wrote?

    python benchmarks/evidence/lightbench_runs.py --out docs/results/lightbench
    ... --problems xor_digit --difficulties trivial easy --optimizers AdamW MADGRADW
    ... --table              only print the tables of what is in --out

A run is one optimizer on one problem at one difficulty. The package draws a learning rate and two
betas, trains a copy of the model, and takes the loss at its end to draw the next ones, until a
trial reaches the problem's goal (a win) or the trials or the time are used up. The budget is its
own: 1,000 trials of 100,000 steps, 3,600 seconds. Who loses does not run the harder difficulties
of that problem; they count as lost.

lightbench has to be on PYTHONPATH; docs/results/lightbench/README.md says what that takes. Runs
that are in --out are not repeated. Without a GPU, `lightbench_cpu.py` stands in for it.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import itertools
import json
import logging
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightbench_cpu import stand_ins
from lightbench_table import LADDER, Record, known, published, tables
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor

import cubegrad
from cubegrad.state.blocks import is_coded

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import processor, version

# Those with cheap steps (0.3 to 0.6 ms on a CPU), three difficulties and published results. Each
# costs minutes an optimizer, so the first ones are the first to be complete.
PROBLEMS = (
    "saddle_point", "dynamic_landscape", "batch_size_scaling", "quadratic_varying_scale",
    "scale_invariant", "layer_wise_scale", "plateau_navigation", "momentum_utilization",
    "gradient_delay", "quadratic_varying_target", "parameter_scale", "sparse_gradient",
)  # fmt: skip
SAME = {"MADGRADW, compact": "MADGRADW"}  # where nothing is coded


class SameRun(Exception):  # noqa: N818  no error: the other optimizer's result is this one's
    """No tensor of the model is large enough for codes."""


def ours(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """The first beta is the momentum."""

    def build(
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        params = list(params)
        if options.get("compact") and not any(map(is_coded, params)):
            raise SameRun
        values: Record = {"lr": lr, "momentum": betas[0], "eps": eps, "weight_decay": weight_decay}
        return kind(params, **values, **options)

    return build


# lightbench gives each the values that its signature names: all of them lr, betas, eps = 1e-8 and
# weight_decay = 0, and schedule-free AdamW a warm-up of 100 steps. It also calls its train() and
# eval().
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "schedule-free AdamW": AdamWScheduleFree,
    "MADGRAD": ours(cubegrad.MADGRAD),
    "MADGRADW": ours(cubegrad.MADGRADW),
    "MADGRADW, compact": ours(cubegrad.MADGRADW, compact=True),
}


def watched(utils: Any, seen: Record) -> Any:
    """lightbench's Objective, which notes what becomes of its trials: no function returns that."""

    class Watched(utils.Objective):  # type: ignore[misc]
        def _inner(self, params: Any, *args: Any, **options: Any) -> Any:
            value, model, loss = super()._inner(params, *args, **options)
            seen["trials"] += 1
            if math.isfinite(loss) and (seen["best_loss"] is None or loss < seen["best_loss"]):
                seen["best_loss"] = float(f"{loss:.4g}")
            seen["last"] = [float(f"{value:.4g}") for value in params[:3]]
            return value, model, loss

        def win_condition(self, loss: float | None = None) -> bool:
            seen["won"] = won = bool(super().win_condition(loss))
            return won

    return Watched


def call(module: Any, options: dict[str, Any]) -> None:
    """The problem's command; some take a list of dtypes, and the others just one."""
    wanted = inspect.signature(module.main).parameters["dtype"].annotation
    dtype = "float32" if wanted is str else ["float32"]
    module.main(dtype=dtype, weight_decay=0, win_condition_multiplier=1.0, **options)


def run(problem: str, difficulty: str, name: str, limits: dict[str, int], seed: int) -> Record:
    """One run, as lightbench's runner makes it."""
    utils = importlib.import_module("lightbench.utils")
    logging.getLogger("optuna").setLevel(logging.CRITICAL)  # it tells of every trial
    seen: Record = {"won": False, "trials": 0, "best_loss": None, "last": None}
    started, end = time.monotonic(), "trials"
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(stand_ins(utils))
        module = importlib.import_module(f"lightbench.{problem}")
        stack.enter_context(mock.patch.object(utils, "Objective", watched(utils, seen)))
        timeout = {"HEAVYBALL_BENCHMARK_TIMEOUT": str(limits["timeout"])}
        stack.enter_context(mock.patch.dict(os.environ, timeout))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(seed)
        options = {"steps": limits["steps"], "trials": limits["trials"], "config": difficulty}
        try:
            call(module, {**options, "opt": [OPTIMIZERS[name]]})
            end = "won" if seen["won"] else "trials"
        except SameRun:
            end = "same"
        except utils.SkipConfig:
            end = "skipped"
        except utils.Stop:  # the package has no win where the time ran out in the trial that won
            end = "time"
        except Exception as error:  # the runner goes on to the next problem, too
            end = f"{type(error).__name__}: {error}"
    seen["won"] = end == "won"
    last = seen.pop("last")
    if seen["won"]:
        seen["lr"], seen["1-beta1"], seen["1-beta2"] = last
    return {**seen, "end": end, "seconds": round(time.monotonic() - started, 1)}


def load(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def sweep(options: argparse.Namespace, path: Path, facts: Record) -> None:
    """Problem by problem, from easy to hard, and all optimizers on one before the next."""
    limits = {name: getattr(options, name) for name in ("trials", "steps", "timeout")}
    difficulties = sorted(options.difficulties, key=LADDER.index)
    facts = {"seed": options.seed, "limits": limits, **facts}
    results = published()
    for key in itertools.product(options.problems, difficulties, options.optimizers):
        records = load(path)
        if known(records, *key):
            continue
        record = run(*key, limits, options.seed)
        if record["end"] == "same":
            other = known(records, key[0], key[1], SAME[key[2]])
            if other is None:  # not among --optimizers
                continue
            record = {**other, "same_as": SAME[key[2]]}
        record |= dict(zip(("problem", "difficulty", "optimizer"), key, strict=True))
        append(path, {**record, "published": results.get(key[:2]), **facts})
        told = f"{record['end']}, {record['trials']} trials, {record['seconds']:.0f} s"
        print(f"{', '.join(key)}: {told}", file=sys.stderr)


def benchmarks() -> list[str]:
    """The problems that lightbench's runner names; it has no list of them to import."""
    runner = importlib.import_module("lightbench.run_all_benchmarks")
    return re.findall(r'"(\w+)\.py"', inspect.getsource(runner.main))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of runs.jsonl")
    add("--problems", nargs="+", default=list(PROBLEMS), help="names, or `all`")
    add("--difficulties", nargs="+", choices=LADDER, default=list(LADDER[:3]))
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    add("--trials", type=int, default=1000, help="at most so many a run")
    add("--steps", type=int, default=100_000, help="at most so many a trial")
    add("--timeout", type=int, default=3600, help="seconds a run; it ends with the trial")
    add("--threads", type=int, default=1, help="of torch")
    add("--seed", type=int, default=0)
    add("--table", action="store_true", help="print the tables and run nothing")
    options = parser.parse_args(words)
    path = options.out / "runs.jsonl"
    if not options.table:
        if options.problems == ["all"]:
            options.problems = benchmarks()
        torch.set_num_threads(options.threads)
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
            **{name: version(name) for name in ("torch", "lightbench", "heavyball", "optuna")},
            "date": time.strftime("%Y-%m-%d"),
        }
        sweep(options, path, facts)
    print(tables(load(path)))


if __name__ == "__main__":
    main()
