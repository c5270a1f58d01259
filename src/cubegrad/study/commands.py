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
from cubegrad.study import catalogue, config, dry_run, methods, report, schedules, workers
from cubegrad.study.cluster import Cluster
from cubegrad.study.grid import parse_grid, parse_values
from cubegrad.study.methods import FIGURES, METHODS, PAPER, Entry
from cubegrad.study.plan import Plan
from cubegrad.study.problem import Preset, Problem, Setup, StudyError, optional
from cubegrad.study.progress import Progress
from cubegrad.study.records import ESTIMATED_LR, Record, Runs, existing
from cubegrad.study.sweep import Sweep
from cubegrad.study.train import Place
from cubegrad.study.workers import Machine

GPU_PRESETS = ("gpu", "gpu-lora", "paper")


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
    problem, name, preset = _problem(options)
    entry = methods.entry(options.method, preset)
    lr, decay = _setting(options, problem, preset, entry)
    plan = Plan(problem, name, preset, [entry], _device(options, name))
    with _sweeping(options, plan, Machine(options.problem, _place(options, plan))) as sweep:
        settings = plan.settings(entry, (lr, decay), options.seed, hold_out=False)
        known = settings.key in sweep.records
        (record,) = sweep.do([settings])
    say(f"{_result(record)}{' (run before)' if known else ''}")
    say(f"Record: {sweep.runs.path}")


def sweep(options: Namespace) -> None:
    _search(options, replace(_plan(options), search_seeds=options.seeds or 1))


def compare(options: Namespace) -> None:
    plan = _plan(options)
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
    _report(existing(options.runs))


COMMANDS: dict[str, Callable[[Namespace], None]] = {
    "problems": problems,
    "train": train,
    "sweep": sweep,
    "compare": compare,
    "report": make_report,
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
                progress.close()
            if reports:
                _report(runs)


def _runs(options: Namespace, plan: Plan) -> Runs:
    return Runs(options.out or Path("runs") / f"{plan.problem.name}-{plan.preset_name}")


def _place(options: Namespace, plan: Plan) -> Place:
    logs = _runs(options, plan).folder / "logs"
    return Place(options.data, options.download, options.save_every, logs)


def _problem(options: Namespace) -> tuple[Problem, str, Preset]:
    problem = catalogue.find(options.problem)
    default = "cpu" if "cpu" in problem.presets else next(iter(problem.presets))
    name = default if options.preset is None else options.preset
    if name not in problem.presets:
        raise StudyError(
            f"problem {problem.name!r} has no preset {name!r}; use {', '.join(problem.presets)}"
        )
    preset = problem.presets[name]
    preset = replace(
        preset,
        epochs=options.epochs or preset.epochs,
        batch=options.batch or preset.batch,
        schedule=preset.schedule if options.schedule is None else options.schedule,
    )
    schedules.check(preset.schedule)
    return problem, name, preset


def _device(options: Namespace, preset: str) -> str:
    device: str = options.device or ("cuda" if preset in GPU_PRESETS else "cpu")
    here = not options.ray and not getattr(options, "dry_run", False)
    if device == "cuda" and here and not torch.cuda.is_available():
        asked = "--device cuda" if options.device else f"preset {preset!r}"
        raise StudyError(
            f"{asked} needs a GPU and torch sees none; use --preset cpu, or --device cpu"
        )
    return device


def _plan(options: Namespace) -> Plan:
    problem, name, preset = _problem(options)
    grid = parse_grid(preset.grid if options.grid is None else options.grid)
    lrs = () if options.lr is None else parse_values(options.lr, grid, "lr")
    if 0.0 in lrs:
        raise StudyError("--lr 0 moves nothing; use values > 0, such as 1e-4..1e-1")
    decays = () if options.decay is None else parse_values(options.decay, grid, "decay")
    return Plan(
        problem,
        name,
        preset,
        _entries(options, preset),
        _device(options, name),
        lrs,
        decays,
        grid,
        options.widen,
        search=options.search,
        hold_out=options.select == "valid",
    )


def _entries(options: Namespace, preset: Preset) -> list[Entry]:
    if options.figure is None:
        texts = preset.methods if options.methods is None else options.methods.split(",")
    elif options.figure in FIGURES:
        texts = [text for row in FIGURES[options.figure] for text in row]
    else:
        raise StudyError(f"unknown figure {options.figure!r}; use {' or '.join(FIGURES)}")
    if options.figure is not None and options.methods is not None:
        raise StudyError("--figure has methods of its own; leave out --methods")
    return list(dict.fromkeys(methods.entry(text, preset) for text in texts))


def _setting(
    options: Namespace, problem: Problem, preset: Preset, entry: Entry
) -> tuple[float, float]:
    table, auto = PAPER.get(problem.paper), methods.estimates(entry.method)
    paper = table.best.get("madgrad" if auto else entry.method) if table else None
    lr = entry.lrs(preset)[0] if auto else paper.lr if paper else None
    if options.lr is None and lr is None:
        raise StudyError(f"no lr is known for {entry.method} on {problem.name}; give --lr")
    values = []
    for name, text, known in (
        ("lr", options.lr, lr or 0.0),
        ("decay", options.decay, paper.decay if paper else 0.0),
    ):
        given = parse_values(text, parse_grid("1"), name) if text is not None else (known,)
        if len(given) != 1 or (text is not None and ".." in text):
            raise StudyError(f"--{name} {text}: train takes one value; use cubegrad sweep for more")
        values.append(given[0])
    if values[0] == 0:
        raise StudyError("--lr 0 moves nothing; use a value > 0, such as 1e-3")
    return values[0], values[1]


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


def _report(runs: Runs) -> None:
    records, broken = runs.load()
    for line in broken:
        sys.stderr.write(f"{line}: left out; rerun the command that wrote it\n")
    folder = runs.folder / "report"
    say(report.write([*records.values(), *runs.cut().values()], folder, runs.commands()))
    say(
        f"\nPage: {folder / 'index.html'}\nReport: {folder / 'report.md'}, with its plots beside it"
    )
    say(f"Records: {runs.path}")
