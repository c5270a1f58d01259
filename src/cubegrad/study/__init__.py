"""The paper's comparison of optimizers, for its problems and for your own.

A problem of your own is a function that returns a `Problem`; see `cubegrad.study.problem`.
"""

from cubegrad.study.problem import Preset, Problem, Setup, StudyError, Task

__all__ = ["Preset", "Problem", "Setup", "StudyError", "Task"]
