"""How long `edit_weights()` takes, in fused steps of the same weights.

`python benchmarks/speed/edit_time.py` prints the table of docs/editing_weights.md, for one thread
of a CPU; `--device cuda` one for a GPU.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor

from cubegrad import MADGRAD, MirrorMADGRAD

sys.path.append(str(Path(__file__).parents[1]))
from shared.timing import timed

FORMS: dict[str, tuple[type, dict[str, Any]]] = {
    "MADGRAD": (MADGRAD, {}),
    'MADGRAD, `lr="auto"`': (MADGRAD, {"lr": "auto"}),
    "MADGRAD, `compact=True`": (MADGRAD, {"compact": True}),
    "MirrorMADGRAD": (MirrorMADGRAD, {}),
    "MirrorMADGRAD, `compact=True`": (MirrorMADGRAD, {"compact": True}),
}
EDITS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "nothing changes": (lambda _: None, True),
    "all weights change": (lambda param: param.mul_(0.999), True),
    "the same, `keep_momentum=False`": (lambda param: param.mul_(0.999), False),
}
REPEATS = 15


def steps_per_edit(cls: type, options: dict[str, Any], device: torch.device) -> list[float]:
    params = [torch.nn.Parameter(torch.randn(1024, 1024, device=device)) for _ in range(4)]
    optimizer = cls(params, **{"lr": 1e-3, **options})
    for param in params:
        param.grad = torch.randn_like(param)

    def edit(change: Callable[[Tensor], Any], keep_momentum: bool) -> None:
        with optimizer.edit_weights(keep_momentum=keep_momentum):
            for param in params:
                change(param)

    times: list[list[float]] = []
    for _ in range(REPEATS):  # one after the other, so that a busy machine slows all alike
        steps = median(spent(optimizer.step, device) for _ in range(3))
        edits = (spent(lambda own=own: edit(*own), device) for own in EDITS.values())
        times.append([each / steps for each in edits])
    return [median(column) for column in zip(*times, strict=True)]


def spent(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds; on a CPU those of the processor, so that other programs do not count."""
    if device.type != "cpu":
        return timed(call, device)
    start = process_time()
    call()
    return process_time() - start


def table(device: torch.device) -> str:
    lines = [f"| steps that an edit takes | {' | '.join(EDITS)} |", "|---|" + "---:|" * len(EDITS)]
    for name, (cls, options) in FORMS.items():
        cells = (f"{ratio:.1f}" for ratio in steps_per_edit(cls, options, device))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", type=torch.device)
    torch.set_num_threads(1)
    print(table(parser.parse_args().device))
