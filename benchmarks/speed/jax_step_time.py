"""The time of one compiled optax step in JAX, compared with the limit set by memory bandwidth.

    python benchmarks/speed/jax_step_time.py --json out.json

A step is `update` and `apply_updates` in one jitted function, with parameters and state donated; of
the rows that end in "kernel" it is `cubegrad.optax.apply_gradients(kernel=True)`, which has kernels
on an NVIDIA GPU alone. There these rows belong to the default.
Its floor is the bytes it must move, divided by the highest bandwidth measured in the same run:
parameter, gradient and state are read once, what changed is written once. Times are wall-clock
times, from an idle device to an idle device. Before each step the gradients change and the caches
are flushed. Optimizers take turns, so that a slow minute of the machine affects all of them.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
import optax

import cubegrad.optax

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import processor, version, write
from shared.shapes import Shape, gpt2, resnet50

ADAMW, PEER = "optax.adamw", "optax.contrib.madgrad"
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "cubegrad madgrad": lambda: cubegrad.optax.madgrad(1e-2),
    "cubegrad madgrad momentum=0": lambda: cubegrad.optax.madgrad(1e-2, momentum=0.0),
    "cubegrad madgrad auto": lambda: cubegrad.optax.madgrad("auto"),
    "cubegrad madgrad auto decay": lambda: cubegrad.optax.madgrad("auto", weight_decay=1e-4),
    "cubegrad mirror_madgrad": lambda: cubegrad.optax.mirror_madgrad(1e-2),
    "cubegrad madgrad compact": lambda: cubegrad.optax.madgrad(1e-2, compact=True),
    "cubegrad madgrad momentum=0 compact": lambda: cubegrad.optax.madgrad(
        1e-2, momentum=0.0, compact=True
    ),
    "cubegrad madgrad auto compact": lambda: cubegrad.optax.madgrad("auto", compact=True),
    "cubegrad mirror_madgrad compact": lambda: cubegrad.optax.mirror_madgrad(1e-2, compact=True),
    "cubegrad madgradw": lambda: cubegrad.optax.madgradw(1e-3),
    "cubegrad madgradw compact": lambda: cubegrad.optax.madgradw(1e-3, compact=True),
    PEER: lambda: optax.contrib.madgrad(1e-2),
    ADAMW: lambda: optax.adamw(1e-3),
}
KERNEL = " kernel"
OPTIMIZERS |= {f"{n}{KERNEL}": tx for n, tx in OPTIMIZERS.items() if n.startswith("cubegrad")}
MODELS = {
    "resnet50": lambda: resnet50(64, 1000),
    "gpt2-large": lambda: gpt2(36, 1280, 50257, 1024),
}
# Not written; all other state is read and written.
READ_ONLY = (".initial_param", ".initial_code", ".initial_scale", ".x0")
ROW = 1024  # of a single leaf; one with a single dimension would keep no codes
ROUNDS = 4
WARM_UP = 3


@dataclass
class Row:
    """One optimizer in one case."""

    case: str
    optimizer: str
    dtype: str
    leaves: int
    parameters: int
    bytes_per_parameter: float
    temporary_mb: float  # memory of the compiled step besides its arguments and results
    compile_s: float  # tracing and compiling the step
    median_ms: float
    quartiles_ms: tuple[float, float]
    repeats: int
    floor_ms: float = 0.0
    percent_of_floor: float = 0.0
    speed_vs_contrib_madgrad: float | None = None
    speed_per_byte_vs_adamw: float | None = None


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(work(*arguments))
    return time.perf_counter() - start, result


def bandwidth(elements: int, when: str) -> dict[str, float]:
    """GB/s of large transfers, bytes read plus bytes written.

    On a CPU a copy also reads the cache lines it overwrites and allocates new pages, so an addition
    in place is measured as well.
    """
    source = jax.random.normal(jax.random.key(0), (elements,))
    copy = jax.jit(jnp.copy)
    add = jax.jit(lambda target, source: target + source, donate_argnums=0)
    copies, adds, target = [], [], copy(source)
    for _ in range(WARM_UP + 20):
        copies.append(timed(copy, source)[0])
        seconds, target = timed(add, target, source)
        adds.append(seconds)
    return {
        f"copy at the {when}": 2 * source.nbytes / median(copies[WARM_UP:]) / 1e9,
        f"in-place add at the {when}": 3 * source.nbytes / median(adds[WARM_UP:]) / 1e9,
    }


def random_arrays(shapes: list[Shape], dtype: str, scale: float, seed: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        (scale * jax.random.normal(key, shape)).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def bytes_per_parameter(params: list[jax.Array], state: Any) -> float:
    """The fewest bytes that a step must move, given the optimizer's state."""
    moved = sum(3 * param.nbytes for param in params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if leaf.ndim > 0:
            read_only = any(name in jax.tree_util.keystr(path) for name in READ_ONLY)
            moved += leaf.nbytes * (1 if read_only else 2)
    return moved / sum(param.size for param in params)


class Contender:
    """One optimizer on one set of parameters: compiled once, timed in several rounds."""

    def __init__(self, name: str, shapes: list[Shape], dtype: str) -> None:
        self.name, self.shapes, self.dtype = name, shapes, dtype
        self.tx = OPTIMIZERS[name]()
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.times: list[float] = []

    def _step(self, params: Any, state: Any, grads: Any) -> Any:
        kernel = self.name.endswith(KERNEL)
        return cubegrad.optax.apply_gradients(self.tx, grads, state, params, kernel=kernel)

    def initial(self) -> tuple[Any, Any]:
        params = random_arrays(self.shapes, self.dtype, 2e-2, 0)
        # optax.contrib.madgrad keeps the arrays it is given, and none can be donated twice.
        return params, self.tx.init([jnp.array(param, copy=True) for param in params])

    def memory(self, grads: Any) -> dict[str, float]:
        params, state = self.initial()
        start = time.perf_counter()
        memory = self.step.lower(params, state, grads).compile().memory_analysis()
        return {
            "compile_s": time.perf_counter() - start,
            "bytes_per_parameter": bytes_per_parameter(params, state),
            "temporary_mb": memory.temp_size_in_bytes / 1e6,
        }

    def round(self, gradients: list[Any], flush: Callable[[], Any], budget: float) -> None:
        params, state = self.initial()
        before = jnp.stack([param.ravel()[0] for param in params])
        for number in range(WARM_UP):
            params, state = self.step(params, state, gradients[number % 2])
        after = jnp.stack([param.ravel()[0] for param in params])
        if not jnp.isfinite(after).all() or (after == before).mean() > 0.5:
            raise RuntimeError(f"{self.name} did not step: {before[:3]} became {after[:3]}")
        jax.block_until_ready((params, state))
        start, done = time.perf_counter(), 0
        while done < 5 or time.perf_counter() - start < budget:
            jax.block_until_ready(flush())
            seconds, (params, state) = timed(self.step, params, state, gradients[done % 2])
            self.times.append(1e3 * seconds)
            done += 1


def measure(
    case: str, shapes: list[Shape], dtype: str, args: argparse.Namespace, flush: Callable[[], Any]
) -> list[Row]:
    gradients = [random_arrays(shapes, dtype, 1e-2, seed) for seed in (1, 2)]
    contenders = [Contender(name, shapes, dtype) for name in args.optimizers]
    memory = [contender.memory(gradients[0]) for contender in contenders]
    for _ in range(ROUNDS):
        for contender in contenders:
            contender.round(gradients, flush, args.budget / ROUNDS)
    rows = []
    for contender, usage in zip(contenders, memory, strict=True):
        low, middle, high = quantiles(contender.times, n=4, method="inclusive")
        counts = {"leaves": len(shapes), "parameters": sum(map(prod, shapes))}
        measured = {
            "median_ms": middle,
            "quartiles_ms": (low, high),
            "repeats": len(contender.times),
        }
        rows.append(Row(case, contender.name, dtype, **counts, **usage, **measured))
    return rows


def compare(rows: list[Row], speeds: dict[str, float]) -> None:
    """Fill in a row's time relative to the floor and to other optimizers in the same case."""
    times = {(row.case, row.dtype, row.optimizer): row for row in rows}
    for row in rows:
        moved = row.bytes_per_parameter * row.parameters
        row.floor_ms = moved / max(speeds.values()) / 1e6
        row.percent_of_floor = 100 * row.floor_ms / row.median_ms
        if peer := times.get((row.case, row.dtype, PEER)):
            row.speed_vs_contrib_madgrad = peer.median_ms / row.median_ms
        if adamw := times.get((row.case, row.dtype, ADAMW)):
            per_byte = row.bytes_per_parameter / adamw.bytes_per_parameter
            row.speed_per_byte_vs_adamw = per_byte * adamw.median_ms / row.median_ms


def machine() -> dict[str, str]:
    device = jax.devices()[0]
    return {
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "jaxlib", "optax")},
        "cubegrad": cubegrad.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


HEADER = (
    "case",
    "optimizer",
    "ms (quartiles)",
    "% of floor",
    "bytes/param",
    f"speed vs {PEER}",
    f"speed per byte vs {ADAMW}",
    "temporaries MB",
    "compile s",
)


def table(rows: list[Row]) -> str:
    lines = [HEADER, ["---"] * 2 + ["---:"] * (len(HEADER) - 2)]
    for row in rows:
        low, high = row.quartiles_ms
        ratios = (row.speed_vs_contrib_madgrad, row.speed_per_byte_vs_adamw)
        lines.append(
            (
                f"{row.case}, {row.dtype}",
                row.optimizer,
                f"{row.median_ms:.4g} ({low:.4g}–{high:.4g})",
                f"{row.percent_of_floor:.1f}",
                f"{row.bytes_per_parameter:.3g}",
                *("" if ratio is None else f"{ratio:.2f}×" for ratio in ratios),
                f"{row.temporary_mb:,.1f}",
                f"{row.compile_s:.1f}",
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def options(arguments: list[str] | None) -> argparse.Namespace:
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    sizes = [2**12, 2**18, 2**24] if on_cpu else [2**20, 2**29]
    add("--size", type=int, nargs="*", default=sizes, help="single leaves to time (%(default)s)")
    models = ["resnet50"] if on_cpu else list(MODELS)
    add("--model", nargs="*", choices=MODELS, default=models, help="shapes to time (%(default)s)")
    add("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    available = [name for name in OPTIMIZERS if name != PEER or hasattr(optax.contrib, "madgrad")]
    usual = [name for name in available if not (on_cpu and name.endswith(KERNEL))]
    add("--optimizers", nargs="+", choices=available, default=usual, help="%(default)s")
    add("--budget", type=float, default=2.0, help="seconds per row (%(default)s)")
    add("--sweep", type=int, default=2**27, help="numbers read to flush caches (%(default)s)")
    add("--json", type=Path, help="file to write after every case")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    elements = min(args.sweep, 2**27) * (1 if jax.default_backend() == "cpu" else 4)
    ballast, total = jnp.ones(args.sweep), jax.jit(jnp.sum)
    speeds, rows = bandwidth(elements, "start"), []
    cases = [(f"one leaf of {n:,}", [(n // ROW, ROW) if n % ROW == 0 else (n,)]) for n in args.size]
    for name in args.model:
        shapes = MODELS[name]()
        cases.append((f"{name}, {sum(map(prod, shapes)):,} in {len(shapes)} leaves", shapes))
    for name, shapes in cases:
        for dtype in args.dtype:
            rows += measure(name, shapes, dtype, args, lambda: total(ballast))
            compare(rows, speeds)
            for row in rows[-len(args.optimizers) :]:
                result = f"{row.median_ms:.4g} ms, {row.percent_of_floor:.1f} %"
                print(f"{name} {dtype} {row.optimizer}: {result}", file=sys.stderr, flush=True)
            if args.json:
                write(report(speeds, rows), args.json)
    speeds |= bandwidth(elements, "end")
    compare(rows, speeds)
    if args.json:
        write(report(speeds, rows), args.json)
    for name, value in (machine() | {k: f"{v:,.4g} GB/s" for k, v in speeds.items()}).items():
        print(f"- {name}: {value}")
    print(f"\n{table(rows)}")


def report(speeds: dict[str, float], rows: list[Row]) -> dict[str, Any]:
    return {
        "machine": machine(),
        "bandwidth_gb_per_s": speeds,
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
