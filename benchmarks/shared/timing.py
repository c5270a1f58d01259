"""Times work on a device, measures how fast it copies, and says which device and versions."""

import gc
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch
from shared.facts import processor, version
from torch import Tensor

import cubegrad

WARM_UP = 3
REPEATS = 20


@dataclass(frozen=True)
class Rig:
    """Where to time and for how long."""

    device: torch.device
    budget: float
    small: bool
    sweep: Tensor  # read before each step, to evict the caches


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(work: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def bandwidth(rig: Rig, when: str) -> dict[str, float]:
    """GB/s of large transfers, bytes read plus bytes written.

    A CPU also reads the lines that a copy overwrites: with 2 threads a copy reached 18.8 GB/s and
    an in-place addition 31.7. So both are measured.
    """
    release(rig.device)
    on_gpu = rig.device.type == "cuda"
    elements = 2**20 if rig.small else 2**29 if on_gpu else 2**27
    source = torch.randn(elements, device=rig.device)
    target = torch.zeros_like(source)
    transfers = {"copy": (2, lambda: target.copy_(source))}
    if not on_gpu:
        transfers["in-place add"] = (3, lambda: target.add_(source))
    speeds = {}
    for name, (passes, work) in transfers.items():
        times = [timed(work, rig.device) for _ in range(WARM_UP + REPEATS)]
        speeds[f"{name} at the {when}"] = passes * source.nbytes / median(times[WARM_UP:]) / 1e9
    return speeds


def machine(device: torch.device) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    packages = ("triton", "madgrad", "pytorch_optimizer", "torch-optimi", "flashoptim", "torchao")
    packages += ("prodigyopt", "dadaptation", "schedulefree")
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cubegrad": cubegrad.__version__,
        **{package: version(package) for package in packages},
        "date": datetime.now(UTC).date().isoformat(),
    }
