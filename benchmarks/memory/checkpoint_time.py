"""Time and size of checkpoints of an optimizer over the parameters of GPT-2-large.

Saving ends when the file is on the disk (fsync). Loading reads what was just saved: from the page
cache, as far as memory allows. `torch.load` is followed by `load_state_dict`; `dcp.load` fills the
tensors that the optimizer has. The weights are not saved.
"""

import argparse
import gc
import math
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Optimizer

import cubegrad

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import processor, write
from shared.shapes import Shape, gpt2

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "MADGRAD compact": lambda params: cubegrad.MADGRAD(params, compact=True),
    "MADGRAD, float32 state": cubegrad.MADGRAD,
    "torch AdamW": torch.optim.AdamW,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Row:
    """Medians in seconds; None if it would need more memory than allowed."""

    optimizer: str
    weights: str
    parameters: int
    file_bytes: int = 0
    folder_bytes: int = 0
    torch_save_s: float = 0.0
    torch_load_s: float | None = None
    torch_load_mmap_s: float = 0.0
    dcp_save_s: float = 0.0
    dcp_load_s: float = 0.0


def scaled_shapes(scale: float) -> list[Shape]:
    layers, width, vocabulary, positions = 36, 1280, 50257, 1024
    if scale == 1:
        return gpt2(layers, width, vocabulary, positions)
    return gpt2(
        math.ceil(layers * scale),
        64 * math.ceil(width / 64 * scale),
        math.ceil(vocabulary * scale),
        math.ceil(positions * scale),
    )


def stepped(shapes: list[Shape], dtype: torch.dtype, build: Any) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer after a step, made tensor by tensor.

    So one gradient is there at a time, and all weights can share the memory of the largest: only
    the state is saved.
    """
    room = torch.empty(max(map(math.prod, shapes)), dtype=dtype)
    model = nn.ParameterList(room[: math.prod(shape)].view(shape) for shape in shapes)
    optimizer = build(model.parameters())
    for param in model:
        with torch.no_grad():
            param.uniform_(-0.05, 0.05)
        param.grad = torch.rand_like(param)
        optimizer.step()
        param.grad = None
    return model, optimizer


def timed(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def torch_save(optimizer: Optimizer, path: Path) -> None:
    torch.save(optimizer.state_dict(), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def torch_load(model: nn.Module, build: Any, path: Path, mmap: bool) -> None:
    optimizer = build(model.parameters())
    optimizer.load_state_dict(torch.load(path, weights_only=True, mmap=mmap))


def measure(row: Row, shapes: list[Shape], folder: Path, args: argparse.Namespace) -> None:
    build, path = OPTIMIZERS[row.optimizer], folder / "optimizer.pt"
    model, optimizer = stepped(shapes, DTYPES[row.weights], build)
    measure_dcp(row, model, optimizer, folder / "optimizer", args.repeats)
    row.torch_save_s = timed(partial(torch_save, optimizer, path), args.repeats)
    row.file_bytes = path.stat().st_size
    optimizer = None  # makes room for what is loaded
    row.torch_load_mmap_s = timed(partial(torch_load, model, build, path, True), args.repeats)
    # load_state_dict of ours copies what was read, torch's keeps it.
    copies = 2 if "MADGRAD" in row.optimizer else 1
    if copies * row.file_bytes < args.memory * 1e9:
        row.torch_load_s = timed(partial(torch_load, model, build, path, False), args.repeats)


def measure_dcp(
    row: Row, model: nn.Module, optimizer: Optimizer, place: Path, repeats: int
) -> None:
    def contents() -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(model, optimizer)}

    def save() -> None:
        shutil.rmtree(place, ignore_errors=True)
        dcp.save(contents(), checkpoint_id=place)

    row.dcp_save_s = timed(save, repeats)
    row.dcp_load_s = timed(lambda: dcp.load(contents(), checkpoint_id=place), repeats)
    row.folder_bytes = sum(file.stat().st_size for file in place.iterdir())
    shutil.rmtree(place)


def markdown(rows: list[Row]) -> str:
    header = (
        *("weights", "optimizer", "file", "bytes/param", "torch.save", "torch.load"),
        *("torch.load, mmap", "DCP folder", "dcp.save", "dcp.load"),
    )
    lines = [header, ("---", "---", *["---:"] * (len(header) - 2))]
    for row in rows:
        seconds = [
            "" if value is None else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"
            for value in (
                *(row.torch_save_s, row.torch_load_s, row.torch_load_mmap_s),
                *(row.dcp_save_s, row.dcp_load_s),
            )
        ]
        sizes = [f"{size / 1e9:.3g} GB" for size in (row.file_bytes, row.folder_bytes)]
        per_parameter = f"{row.file_bytes / row.parameters:.3g}"
        names = (row.weights, row.optimizer, sizes[0], per_parameter)
        lines.append((*names, *seconds[:3], sizes[1], *seconds[3:]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--scale", type=float, default=1.0, help="of layers, width and vocabulary, in (0, 1]")
    add("--repeats", type=int, default=3, help="of which the median is taken (%(default)s)")
    add("--memory", type=float, default=12.0, help="GB that loading may take (%(default)s)")
    add("--folder", type=Path, help="on the disk to measure; up to 19 GB (the temporary folder)")
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS], metavar="NAME")
    add("--json", type=Path, help="file to write after every row")
    args = parser.parse_args(arguments)
    if not 0 < args.scale <= 1:
        parser.error(f"--scale {args.scale} must be in (0, 1]; use 1")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    shapes = scaled_shapes(args.scale)
    machine = {
        "device": processor(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cubegrad": cubegrad.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    rows: list[Row] = []
    for weights in DTYPES:
        for name in args.optimizers:
            row = Row(name, weights, sum(map(math.prod, shapes)))
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                measure(row, shapes, Path(folder), args)
            rows.append(row)
            if args.json is not None:
                write({"machine": machine, "rows": [asdict(row) for row in rows]}, args.json)
            print(f"{name}, {weights}: saved in {row.torch_save_s:.3g} s", file=sys.stderr)
    print(*(f"- {fact}: {value}" for fact, value in machine.items()), sep="\n")
    print(f"\n{rows[0].parameters:,} parameters\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
