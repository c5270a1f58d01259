"""What the options of a command ask for: a problem and its preset, a plan, or a single setting."""

from argparse import Namespace
from dataclasses import replace

import torch

from cubegrad.study import catalogue, methods, schedules
from cubegrad.study.grid import parse_grid, parse_values
from cubegrad.study.methods import FIGURES, PAPER, Entry
from cubegrad.study.plan import Plan
from cubegrad.study.problem import Preset, Problem, StudyError

GPU_PRESETS = ("gpu", "gpu-lora", "paper")


def find_problem(options: Namespace) -> tuple[Problem, str, Preset]:
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


def find_device(options: Namespace, preset: str) -> str:
    device: str = options.device or ("cuda" if preset in GPU_PRESETS else "cpu")
    here = not options.ray and not getattr(options, "dry_run", False)
    if device == "cuda" and here and not torch.cuda.is_available():
        asked = "--device cuda" if options.device else f"preset {preset!r}"
        raise StudyError(
            f"{asked} needs a GPU and torch sees none; use --preset cpu, or --device cpu"
        )
    return device


def make_plan(options: Namespace) -> Plan:
    problem, name, preset = find_problem(options)
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
        find_device(options, name),
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


def one_setting(
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
