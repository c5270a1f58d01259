"""What each command of `cubegrad` does, from its parsed options."""

import contextlib
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

import cubegrad
from cubegrad.study import (
    catalogue,
    config,
    dry_run,
    export,
    methods,
    report,
    request,
    workers,
)
from cubegrad.study.cluster import Cluster
from cubegrad.study.methods import FIGURES, METHODS
from cubegrad.study.plan import Plan
from cubegrad.study.problem import Setup, StudyError, optional
from cubegrad.study.progress import Progress
from cubegrad.study.records import ESTIMATED_LR, Record, Runs, existing
from cubegrad.study.sweep import Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine


def say(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # may lack ±, no reason to fail after the runs
    sys.stdout.write(f"{text.encode(encoding, 'replace').decode(encoding)}\n")
    sys.stdout.flush()


def problems(_: Namespace) -> None:
    for name in catalogue.NAMES:
        problem = catalogue.find(name)
        say(f"{problem.name}: {problem.description}; data: {problem.data}")
        for preset_name, preset in problem.presets.items():
            about = f"{preset.epochs} epochs, batch {preset.batch}, {preset.schedule}"
            size = f", {preset.size}" if preset.size else ""
            say(f"    --preset {preset_name:<8} {about}{size}; {preset.seeds} seeds")
    say(f"\nyour own: your_module:your_function\nmethods: {', '.join(METHODS)}")
    say(f"figures: {', '.join(FIGURES)}")


def train(options: Namespace) -> None:
    problem, name, preset = request.find_problem(options)
    entry = methods.entry(options.method, preset)
    lr, decay = request.one_setting(options, problem, preset, entry)
    plan = Plan(problem, name, preset, [entry], request.find_device(options, name))
    with _sweeping(options, plan, Machine(options.problem, _place(options, plan))) as sweep:
        settings = plan.settings(entry, (lr, decay), options.seed, hold_out=False)
        known = settings.key in sweep.records
        (record,) = sweep.do([settings])
    say(f"{_result(record)}{' (run before)' if known else ''}")
    say(f"Record: {sweep.runs.path}")


def sweep(options: Namespace) -> None:
    _search(options, replace(request.make_plan(options), search_seeds=options.seeds or 1))


def compare(options: Namespace) -> None:
    plan = request.make_plan(options)
    seeds = options.seeds or plan.preset.seeds
    _search(options, replace(plan, search_seeds=options.search_seeds, final_seeds=seeds))


def _search(options: Namespace, plan: Plan) -> None:
    machine = _executor(options, plan)
    if options.dry_run:
        place = replace(_place(options, plan), download=False)
        at_a_time = machine.workers if isinstance(machine, Machine) else machine.limit
        say(dry_run.text(plan, _runs(options, plan), place, at_a_time))
        return
    if plan.search == "halving":
        optional("optuna", "search")  # refused before anything is written
    with _sweeping(options, plan, machine, reports=True) as running:
        config.keep(running.runs.folder, _config(options, plan))
        running.repeat(running.search(), plan.final_seeds)


def _config(options: Namespace, plan: Plan) -> str:
    """Everything that determines the results, with the preset's values filled in."""
    values = {
        "command": options.command,
        "problem": options.problem,
        "preset": plan.preset_name,
        "device": plan.device,
        "epochs": plan.preset.epochs,
        "batch": plan.preset.batch,
        "methods": [str(entry) for entry in plan.entries],
        "lr": options.lr,
        "decay": options.decay,
        "grid": options.grid or plan.preset.grid,
        "search": plan.search,
        "widen": plan.widen,
        "select": options.select,
        "seeds": plan.final_seeds or plan.search_seeds,
        "search_seeds": plan.search_seeds if plan.final_seeds else None,
    }
    return f"# cubegrad {cubegrad.__version__}\n{config.text(values)}"


def make_report(options: Namespace) -> None:
    _report(existing(options.runs), options.out)


def export_records(options: Namespace) -> None:
    if options.csv is None and options.tensorboard is None:
        raise StudyError("nothing to export; give --csv FILE or --tensorboard DIR")
    records = _readable(existing(options.runs))
    if options.csv is not None:
        export.write_csv(records, options.csv)
        say(f"{len(records)} runs: {options.csv}")
    if options.tensorboard is not None:
        new = export.write_tensorboard(records, options.tensorboard)
        say(f"{new} new runs: tensorboard --logdir {shlex.quote(str(options.tensorboard))}")


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "problems": problems,
    "train": train,
    "sweep": sweep,
    "compare": compare,
    "report": make_report,
    "export": export_records,
}


@contextlib.contextmanager
def _sweeping(
    options: Namespace, plan: Plan, machine: Machine | Cluster, reports: bool = False
) -> Iterator[Sweep]:
    """Lock the directory, report broken records, yield the sweep, and close the bar at the end.

    With `reports`, a sweep that succeeds writes its report while the directory is still locked.
    """
    device, place = torch.device(plan.device), _place(options, plan)
    setup = Setup(plan.preset, 0, device, place.data, plan.hold_out, place.download)
    with contextlib.closing(machine):
        machine.check(plan.problem, setup)
        runs = _runs(options, plan)
        with runs.locked():
            progress = Progress()
            for line in runs.repair():
                progress.say(line)
            runs.log(shlex.join(["cubegrad", *options.words]))
            try:
                yield Sweep(plan, runs, machine, progress)
            finally:
                machine.close()  # before the lock is released: runs write into the directory
                runs.remove_drafts()  # a worker may have been stopped while it saved
                progress.close()
            if reports:
                _report(runs)


def _runs(options: Namespace, plan: Plan) -> Runs:
    return Runs(options.out or Path("runs") / f"{plan.problem.name}-{plan.preset_name}")


def _place(options: Namespace, plan: Plan) -> Place:
    logs = _runs(options, plan).folder / "logs"
    return Place(options.data, options.download, options.save_every, logs)


def _executor(options: Namespace, plan: Plan) -> Machine | Cluster:
    gpus, threads = options.gpus_per_run, plan.preset.threads
    if gpus is not None and (options.ray is None or plan.device != "cuda"):
        raise StudyError("--gpus-per-run is for runs on GPUs with --ray; leave it out")
    if options.ray is not None:
        share = (gpus or 1.0) if plan.device == "cuda" else 0.0
        return Cluster(
            options.problem,
            _place(options, plan),
            options.ray,
            threads,
            share,
            options.workers,
            options.retries,
        )
    default = workers.default_workers(torch.device(plan.device), threads)
    return Machine(options.problem, _place(options, plan), options.workers or default)


def _result(record: Record) -> str:
    s, metric, unit = record.settings, record.about["metric"], record.about["unit"]
    value = record.last(metric)
    space = "" if unit in ("", "%") else " "
    result = "diverged" if value is None else f"test {metric} {value:.6g}{space}{unit}"
    estimate = record.last(ESTIMATED_LR)
    lr = methods.lr_text(s.method, s.lr, None if estimate is None else s.lr * estimate)
    where = f"{s.problem}, {s.method}, lr {lr}, decay {s.decay:g}, seed {s.seed}"
    return (
        f"{where}: {result} after {len(record.curve['train_loss'])} epochs, {record.seconds:.1f} s"
    )


def _readable(runs: Runs) -> list[Record]:
    records, broken = runs.load()
    for line in broken:
        sys.stderr.write(f"{line}: left out; rerun the command that wrote it\n")
    if not records:
        raise StudyError(f"{runs.folder} has no finished run yet; run the sweep again first")
    return list(records.values())


def _report(runs: Runs, out: Path | None = None) -> None:
    folder = out or runs.folder / "report"
    say(report.write([*_readable(runs), *runs.cut().values()], folder, runs.commands()))
    say(
        f"\nPage: {folder / 'index.html'}\nReport: {folder / 'report.md'}, with its plots beside it"
    )
    say(f"Records: {runs.path}")
