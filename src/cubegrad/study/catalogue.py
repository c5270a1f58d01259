"""Problems by name: those of `problems/`, and a user's own as `module:function`."""

import importlib
import sys
from pathlib import Path

from cubegrad.study.problem import Problem, StudyError

NAMES = ("digits", "cifar10", "fastmri")


def find(name: str) -> Problem:
    module, colon, function = name.partition(":")
    if not colon:
        if name not in NAMES:
            raise StudyError(
                f"unknown problem {name!r}; use {', '.join(NAMES)}, or your_module:your_function"
            )
        module, function = f"cubegrad.study.problems.{name}", "problem"
    elif str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it, and a console script has not
    problem = _call(name, module, function)
    if not isinstance(problem, Problem):
        raise StudyError(f"{name} returned {problem!r}; return a cubegrad.study.Problem")
    if not problem.presets:
        raise StudyError(f'problem {problem.name!r} has no presets; give it {{"cpu": Preset(...)}}')
    return problem


def _call(name: str, module: str, function: str) -> object:
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        ours = module.startswith("cubegrad.study.")
        remedy = (
            "pip install 'cubegrad[problems]'" if ours else "run from its folder, or install it"
        )
        raise StudyError(
            f"cannot import {error.name or module} for problem {name!r} ({error}); {remedy}"
        ) from None
    made = getattr(loaded, function, None)
    if not callable(made):
        raise StudyError(f"{module} has no function {function!r}; define it, returning a Problem")
    result: object = made()
    return result
