"""What docs/results has: its records, and problems whose preset `gpu` has changed since.

    cubegrad compare benchmarks/shared/earlier.py:imagenet --preset gpu
    cubegrad compare benchmarks/shared/earlier.py:fastmri --preset gpu --epochs 4

Runs of these problems have the same settings, and so the same keys, as those records.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cubegrad.study import Preset, Problem
from cubegrad.study.models.resnet import STAGES_50
from cubegrad.study.problem import OWN_DECAYS
from cubegrad.study.problems import fastmri as mri
from cubegrad.study.problems import imagenet as images
from cubegrad.study.records import Record, Runs


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


def known(folder: Path, but: Sequence[str]) -> dict[str, Record]:
    """Records of docs/results, by key, that runs of this machine can be compared with.

    Not those of the folders `but`, nor of fine-tuning: each machine pretrains for itself, so those
    runs began with other weights.
    """
    files = [file.parent for file in folder.glob("*/records.jsonl")]
    found = [Runs(one).load()[0] for one in files if one.name not in but]
    return {
        key: record
        for records in found
        for key, record in records.items()
        if record.settings.problem != "finetune"
    }


def _without(preset: Preset, *names: str) -> Preset:
    options = {name: value for name, value in preset.options.items() if name not in names}
    return replace(preset, options=options)


def _with_gpu(problem: Problem, gpu: Preset) -> Problem:
    return replace(problem, presets={**problem.presets, "gpu": gpu})
