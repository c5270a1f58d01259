"""Problems by name: those in `problems/`, and users', as module:function or file.py:function."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from cubegrad.study import faults
from cubegrad.study.problem import Problem, StudyError, missing

# What a report's title calls them. The data of `imagenet` may be anyone's, for example.
TITLES = {
    "digits": "handwritten digits",
    "cifar10": "CIFAR-10",
    "imagenet": "image classification",
    "fastmri": "MR image reconstruction",
    "iwslt14": "German to English translation",
    "bookwiki": "masked language modelling",
    "finetune": "fine-tuning a language model",
}
NAMES = tuple(TITLES)


def find(name: str) -> Problem:
    if ":" in name:
        module, function, loaded = load(name)
    elif name in NAMES:
        module, function = f"cubegrad.study.problems.{name}", "problem"
        loaded = _import(name, module)
    else:
        raise StudyError(f"unknown problem {name!r}; {_meant(name)}")
    make = getattr(loaded, function, None)
    if not callable(make):
        raise StudyError(f"{module} has no function {function!r}; define it, returning a Problem")
    with faults.reported():
        problem = make()
    if not isinstance(problem, Problem):
        raise StudyError(f"{name} returned {problem!r}; return a cubegrad.study.Problem")
    if not problem.presets:
        raise StudyError(f'problem {problem.name!r} has no presets; give it {{"cpu": Preset(...)}}')
    return problem


def _meant(name: str) -> str:
    """How to write it: perhaps it is a file or a module here whose function was left out."""
    module, _, function = name.rpartition(".")
    if name.endswith(".py") and Path(name).is_file():
        file, meant = name, f"{name}:problem"
    elif file := _file_of(name):
        meant = f"{name if name == Path(name).name else file}:problem"
    elif file := _file_of(module):  # a dot instead of the colon
        meant = f"{module}:{function}"
    else:
        return f"use {', '.join(NAMES)}, or your_module:your_function"
    return f"for the function of {file} that returns a Problem, write {meant}"


def _file_of(module: str) -> str:
    """The file here of a module, perhaps of a package, or of a path without its end; else ""."""
    names = [f"{module}.py"]
    if module and not set(module) & set("/\\"):
        place = module.replace(".", "/")
        names += [f"{place}.py", f"{place}/__init__.py"]
    return next((name for name in names if Path(name).is_file()), "")


def load(name: str) -> tuple[str, str, ModuleType]:
    """The names of the module and function of a user's problem, and the imported module."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).resolve()
        module, folder = file.stem, file.parent
        if not file.is_file() or "." in module:
            fault = "has a dot in its name" if file.is_file() else "is not a file"
            raise StudyError(f"{place} {fault}; use your_module:your_function or file.py:function")
    elif all(place.split(".")) and not set(place) & set("/\\"):
        file, module, folder = None, place, Path.cwd()
    else:
        raise StudyError(
            f"{place!r} of problem {name!r} is not a module; "
            "use your_module:your_function or file.py:function"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # Python does this for scripts, not for console scripts
    loaded = _import(name, module)
    if file is not None and Path(loaded.__file__ or "").resolve() != file:
        raise StudyError(
            f"{place} has the name of a module that Python finds first "
            f"({loaded.__file__ or 'built in'}); rename it"
        )
    return module, function, loaded


def _import(name: str, module: str) -> ModuleType:
    with faults.reported():
        try:
            return importlib.import_module(module)
        except ImportError as error:
            absent = error.name or module
            if name in NAMES:
                raise StudyError(missing(absent.partition(".")[0], "study")) from None
            raise StudyError(
                f"cannot import {absent} for problem {name!r} ({error}); "
                "run from its folder, or install it"
            ) from None
