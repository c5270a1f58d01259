"""How fast the study trains on CIFAR-10, and what share of the time the GPU is busy.

    PYTHONPATH=src python3 benchmarks/cifar10_busy.py --data DIR --json out.json
    PYTHONPATH=src python3 benchmarks/cifar10_busy.py --synthetic      # random images

Trains as `cubegrad train cifar10` does, each epoch with its evaluation. The first epoch compiles
and captures; the next ones are timed; the last is profiled. The GPU counts as busy while a kernel
or copy runs. The profiler slows the host, so the share is, if anything, too low.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from cubegrad.study import StudyError, methods
from cubegrad.study.data import cifar10 as data
from cubegrad.study.data.cifar10 import Images
from cubegrad.study.problems import cifar10
from cubegrad.study.records import Settings, machine
from cubegrad.study.train import Place, run

SETTINGS = methods.PAPER["CIFAR10"].best


@dataclass(frozen=True)
class Speed:
    method: str
    compiled: bool
    first_epoch_s: float  # includes compilation and capture
    epoch_s: float  # median of the timed epochs
    images_per_s: float
    busy_percent: float  # of the profiled epoch
    profiled_epoch_s: float
    peak_memory_gb: float
    accuracy: float  # on the test set at the end, to see that it learned


def random_images(folder: Path, download: bool) -> tuple[Images, Images]:  # noqa: ARG001
    """Replaces `data.cifar10`: the time of a step does not depend on pixels and labels."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Images:
        images = torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return Images(images, torch.randint(10, (count,), generator=generator))

    return draw(50_000), draw(10_000)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of spans, each a start and an end."""
    total, reached = 0, -1
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(end, reached)
    return total


def busy_seconds(profiler: profile, device: torch.device) -> float:
    """Seconds in which the device was working."""
    # Raw events: converting all kernels of an epoch to Python objects takes minutes.
    events = profiler.profiler.kineto_results.events()
    kind = (
        torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    )
    spans = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == kind and not event.is_user_annotation()
    ]
    return covered(spans) / 1e9


class Watch:
    """`tick` of a run: records the time of each epoch, and profiles the last."""

    def __init__(self, epochs: int, device: torch.device) -> None:
        self.epochs, self.device = epochs, device
        activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
        self.profiler = profile(activities=activities, acc_events=True)
        self.seconds: list[float] = []
        self.begun = time.perf_counter()

    def __call__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.begun)
        if len(self.seconds) == self.epochs - 1:
            self.profiler.start()
        if len(self.seconds) == self.epochs:
            self.profiler.stop()
        self.begun = time.perf_counter()


def measure(options: argparse.Namespace, method: str, compiled: bool) -> Speed:
    problem = cifar10.problem()
    preset = problem.presets[options.preset]
    limits = {"train": options.images, "test": options.images} if options.images else {}
    preset = replace(preset, options={**preset.options, **limits, "compile": compiled})
    problem = replace(problem, presets={options.preset: preset})
    lr, decay, _ = SETTINGS[method]
    device = torch.device(options.device)
    settings = Settings(
        problem=problem.name,
        preset=options.preset,
        epochs=options.epochs + 2,
        batch=preset.batch,
        method=method,
        schedule="flat",
        lr=lr,
        decay=decay,
        seed=0,
        device=options.device,
    )
    watch = Watch(settings.epochs, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    record = run(problem, settings, Place(options.data), tick=watch)
    if record.diverged:
        sys.exit(f"{method} diverged at lr {lr}: its times mean nothing")
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    first, *timed, profiled = watch.seconds
    return Speed(
        method=method,
        compiled=compiled and device.type == "cuda",
        first_epoch_s=first,
        epoch_s=median(timed),
        images_per_s=preset.options["train"] / median(timed),
        busy_percent=100 * busy_seconds(watch.profiler, device) / profiled,
        profiled_epoch_s=profiled,
        peak_memory_gb=peak,
        accuracy=record.curve["accuracy"][-1],
    )


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--synthetic", action="store_true", help="random images, no data set")
    parser.add_argument("--preset", choices=("cpu", "gpu", "paper"), default="gpu")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--epochs", type=int, default=3, help="how many to time")
    parser.add_argument("--images", type=int, help="train and test with only this many")
    parser.add_argument("--methods", nargs="+", choices=list(SETTINGS), default=["madgrad"])
    parser.add_argument("--compile", choices=("yes", "no", "both"), default="yes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if options.synthetic:
        data.cifar10 = random_images
    report = {"machine": machine(torch.device(options.device)), "preset": options.preset}
    speeds: list[Speed] = []
    print("| method | compiled | first epoch s | epoch s | images/s | busy % | GB | test % |")
    print("|---|---|---|---|---|---|---|---|")
    for compiled in {"yes": [True], "no": [False], "both": [False, True]}[options.compile]:
        for method in options.methods:
            speed = measure(options, method, compiled)
            speeds.append(speed)
            print(
                f"| {speed.method} | {'yes' if speed.compiled else 'no'} "
                f"| {speed.first_epoch_s:.1f} | {speed.epoch_s:.2f} | {speed.images_per_s:,.0f} "
                f"| {speed.busy_percent:.0f} | {speed.peak_memory_gb:.1f} | {speed.accuracy:.1f} |",
                flush=True,
            )
            if options.json:
                rows = [asdict(row) for row in speeds]
                options.json.write_text(json.dumps({**report, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except StudyError as error:
        sys.exit(str(error))
