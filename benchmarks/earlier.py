"""Problems whose preset `gpu` has changed since the records in docs/results, as they were then.

    cubegrad compare benchmarks/earlier.py:imagenet --preset gpu --epochs 9 --schedule tenthing:3-6
    cubegrad compare benchmarks/earlier.py:fastmri --preset gpu --epochs 4

Their runs have the same settings, and so the same keys, as those records.
"""

from dataclasses import replace

from cubegrad.study import Preset, Problem
from cubegrad.study.models.resnet import STAGES_50
from cubegrad.study.problem import OWN_DECAYS
from cubegrad.study.problems import fastmri as mri
from cubegrad.study.problems import imagenet as images


def imagenet() -> Problem:
    """ResNet-50 with the stem of 224 px, not compiled, 12 epochs, one decay."""
    gpu = replace(
        images.problem().presets["gpu"],
        epochs=12,
        schedule="tenthing:4-8",
        decays=(1e-4,),
        own_decays=OWN_DECAYS,
        lrs={
            "madgrad": (5e-4, 2.5e-3),
            "sgd": (5e-2, 2.5e-1),
            "adam": (2.5e-4, 1e-3),
            "adagrad": (5e-3, 2.5e-2),
        },
    )
    gpu = _without(gpu, "stem", "bottleneck", "compile")
    return _with_gpu(images.problem(), replace(gpu, options={**gpu.options, "stages": STAGES_50}))


def fastmri() -> Problem:
    """The same two heads are tested with every seed."""
    gpu = replace(
        mri.problem().presets["gpu"],
        lrs={
            "madgrad": (5e-3, 2.5e-2),
            "sgd": (1e-1, 5e-1),
            "adam": (1e-3, 5e-3),
            "adagrad": (1e-2, 5e-2),
        },
    )
    return _with_gpu(mri.problem(), _without(gpu, "cross_validate"))


def _without(preset: Preset, *names: str) -> Preset:
    options = {name: value for name, value in preset.options.items() if name not in names}
    return replace(preset, options=options)


def _with_gpu(problem: Problem, gpu: Preset) -> Problem:
    return replace(problem, presets={**problem.presets, "gpu": gpu})
