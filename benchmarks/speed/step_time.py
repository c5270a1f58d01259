"""The time of one `opt.step()`, compared with the minimum that the memory allows.

    python benchmarks/speed/step_time.py --json out.json

An optimizer step does little arithmetic, so its floor is the bytes it must move divided by the
speed at which this machine copies: parameter, gradient and state are read once, and what changed
is written once. Times are wall clock, from an idle device to an idle device, so they include the
host's work. Before each step the gradients change and the caches are swept, as by a backward
pass. A row can slightly exceed 100 % of its floor, since a step reads more than it writes and a
copy does both equally.
"""

import argparse
import contextlib
import gc
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from step_report import Report, Row, markdown, save
from torch import Tensor
from torch.optim import Optimizer
from workloads import ADAM_FUSED, GPU_ONLY, NAMES, Case, Contender, cases

sys.path.append(str(Path(__file__).parents[1]))
from shared.timing import REPEATS, WARM_UP, Rig, bandwidth, machine, release, synchronize, timed

# State that is read and not written; all other state counts twice.
READ_ONLY = ("initial_param", "initial_code", "initial_scale", "x0")
# 512 MiB: the largest last-level cache met so far has 260. Read, not written, as writing dirty
# lines back would slow the step.
SWEPT = 2**27


def settle(contenders: list[Contender]) -> None:
    """Import what will be timed, and exempt its objects from later collections: 0.2 s each."""
    for module in {contender.module for contender in contenders}:
        with contextlib.suppress(Exception):  # the row will give the reason
            importlib.import_module(module)
    gc.collect()
    gc.freeze()


def random_tensors(case: Case, device: torch.device, scale: float) -> list[Tensor]:
    return [torch.randn(s, device=device).mul_(scale).to(case.dtype) for s in case.shapes]


def bytes_per_parameter(opt: Optimizer, params: list[Tensor]) -> float:
    """The fewest bytes that a step must move, given the optimizer's state."""
    moved = 0
    for param in params:
        moved += 2 * param.nbytes + param.grad.nbytes
        for name, value in opt.state[param].items():
            if name != "step":
                moved += size(value) * (1 if name in READ_ONLY else 2)
    return moved / sum(param.numel() for param in params)


def size(value: Any) -> int:
    """The bytes of what an optimizer keeps: a tensor, or one that is made of others."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) else 0


def allocated(device: torch.device, opt: Optimizer) -> int:
    """Bytes of GPU memory in use; of other memory, those of the optimizer's state."""
    if device.type == "cuda":
        synchronize(device)
        return torch.cuda.memory_allocated(device)
    return sum(size(value) for entries in opt.state.values() for value in entries.values())


def peak_extra(work: Callable[[], Any], device: torch.device) -> float | None:
    """Peak MB of GPU memory that `work` needs above what was allocated before."""
    if device.type != "cuda":
        work()
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def captured(opt: Optimizer, device: torch.device) -> tuple[Callable[[], None], float | None]:
    """A step as a CUDA graph: its replay, and the memory that the capture took."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            opt.step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            opt.step()

    extra = peak_extra(capture, device)
    return graph.replay, extra


def gradient_feed(
    case: Case, params: list[Tensor], device: torch.device, static: bool
) -> Callable[[int], None]:
    """A function of the step's number that sets new gradients."""
    sets = [random_tensors(case, device, 1e-2) for _ in range(2)]
    if static:  # a graph reads the addresses it was captured with, so refill them
        for param in params:
            param.grad = torch.empty_like(param)

    def feed(step: int) -> None:
        grads = sets[step % 2]
        if static:
            torch._foreach_copy_([param.grad for param in params], grads)
        else:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad

    return feed


def check_it_steps(step: Callable[[], Any], params: list[Tensor]) -> None:
    """Raise if a step does nothing or writes NaN: it would win the table."""
    before = torch.stack([param.detach().flatten()[0] for param in params])
    step()
    after = torch.stack([param.detach().flatten()[0] for param in params])
    if not after.isfinite().all():
        raise RuntimeError("the step made parameters that are not finite")
    # Most, not all: rounding to bfloat16 may undo a small change.
    if (after != before).float().mean() < 0.5:
        raise RuntimeError("the step left most parameters where they were")


@dataclass
class Ready:
    """An optimizer over its own parameters that has taken its first steps."""

    opt: Optimizer
    params: list[Tensor]
    step: Callable[[], Any]
    feed: Callable[[int], None]
    first_step_s: float
    peak_extra_mb: float | None
    state_bytes: float  # for a parameter


def ready(case: Case, contender: Contender, device: torch.device) -> Ready:
    torch.manual_seed(0)
    params = [p.requires_grad_() for p in random_tensors(case, device, 2e-2)]
    opt = contender.build(params)
    feed = gradient_feed(case, params, device, contender.graph)
    feed(0)
    before = allocated(device, opt)
    first_step = timed(opt.step, device)
    state_bytes = (allocated(device, opt) - before) / case.parameters
    step: Callable[[], Any] = opt.step
    if contender.graph:
        step, extra = captured(opt, device)
        check_it_steps(step, params)
    else:
        check_it_steps(step, params)
        extra = peak_extra(step, device)
    for number in range(WARM_UP - 1):
        feed(number)
        step()
    return Ready(opt, params, step, feed, first_step, extra, state_bytes)


def repeated(contestants: list[Ready], rig: Rig) -> list[list[float]]:
    """Seconds of each one's steps, in alternation.

    As many as fit into the budget, which is doubled until there are 20.
    """
    times: list[list[float]] = [[] for _ in contestants]
    start = time.perf_counter()
    spent = 0.0
    while len(times[0]) < 3 or spent < rig.budget * (2 if len(times[0]) < REPEATS else 1):
        for contestant, own in zip(contestants, times, strict=True):
            contestant.feed(len(own))
            rig.sweep.sum()
            own.append(timed(contestant.step, rig.device))
        spent = time.perf_counter() - start
    return times


def measure(case: Case, contender: Contender, rig: Rig) -> dict[str, Any]:
    """The measured fields of a Row. On a CPU, whose load varies, Adam is timed in alternation."""
    if contender.graph and rig.device.type != "cuda":
        raise RuntimeError("a CUDA graph needs a GPU")
    contestants = [ready(case, contender, rig.device)]
    by_name = {c.name: c for c in case.contenders}
    if rig.device.type == "cpu":
        others = [ADAM_FUSED, contender.beside] if contender.name != ADAM_FUSED else []
        contestants += [ready(case, by_name[name], rig.device) for name in others if name]
    times, *beside = repeated(contestants, rig)
    low, middle, high = (1e3 * t for t in quantiles(times, n=4, method="inclusive"))
    own = contestants[0]
    return {
        "median_ms": middle,
        "quartiles_ms": (low, high),
        "repeats": len(times),
        "first_step_s": own.first_step_s,
        "bytes_per_parameter": bytes_per_parameter(own.opt, own.params),
        "peak_extra_mb": own.peak_extra_mb,
        "state_bytes_per_parameter": own.state_bytes,
        "adam_beside_ms": 1e3 * median(beside[0]) if beside else None,
        "other_beside_ms": 1e3 * median(beside[1]) if len(beside) > 1 else None,
    }


def time_row(case: Case, contender: Contender, rig: Rig) -> Row:
    dtype = str(case.dtype).removeprefix("torch.")
    row = Row(case.name, contender.name, len(case.shapes), case.parameters, dtype)
    try:
        release(rig.device)
        vars(row).update(measure(case, contender, rig))
    except Exception as error:  # of a peer or a missing backend: the other rows still count
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        row.unavailable = reason if len(reason) <= 90 else reason[:87] + "..."
    return row


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=NAMES, help="default: all that fit the device")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--budget", type=float, help="seconds per row: 1 on a GPU, 3 on a CPU")
    parser.add_argument("--json", type=Path, help="file to write after every row")
    parser.add_argument(
        "--optimizers", nargs="+", default=[""], help="only rows whose name has one of these"
    )
    parser.add_argument(
        "--level", help="instructions of our CPU kernel: baseline, avx2, avx512; default: the best"
    )
    parser.add_argument("--small", action="store_true", help="toy sizes, to test the script")
    args = parser.parse_args(arguments)
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = args.device.type == "cuda"
    too_large = () if on_gpu or args.small else GPU_ONLY
    if set(too_large) & set(args.case or ()):
        parser.error(f"{' and '.join(too_large)} need a GPU; with --small they run anywhere")
    args.case = args.case or [name for name in NAMES if name not in too_large]
    if args.budget is None:
        args.budget = 1.0 if on_gpu else 3.0
    return args


def level(name: str | None) -> dict[str, str]:
    """Set the instructions of our CPU kernel; torch's stay as they are."""
    if name is None:
        return {}
    from cubegrad.backends.native import launch

    known = launch.LEVELS[: launch.LEVEL + 1]
    if name not in known:
        raise SystemExit(f"--level {name}: this machine has {', '.join(known)}")
    launch.LEVEL = known.index(name)
    return {"level": name}


def main(arguments: list[str] | None = None) -> None:
    args = options(arguments)
    on_gpu = args.device.type == "cuda"
    sweep = torch.randn(2**16 if args.small else SWEPT, device=args.device)
    rig = Rig(args.device, args.budget, args.small, sweep)
    report = Report(machine(args.device) | level(args.level), bandwidth(rig, "start"))
    for name, speed in report.bandwidth_gb_per_s.items():
        print(f"{name}: {speed:,.4g} GB/s", file=sys.stderr, flush=True)
    pairs = [
        (case, contender)
        for name in args.case
        for case in cases(name, on_gpu, args.small)
        for contender in case.contenders
        if any(part.lower() in contender.name.lower() for part in args.optimizers)
    ]
    settle([contender for _, contender in pairs])
    for case, contender in pairs:
        row = time_row(case, contender, rig)
        report.rows.append(row)
        save(report, args.json)
        result = row.unavailable or f"{row.median_ms:.4g} ms, {row.percent_of_floor:.1f} %"
        label = f"{row.case} ({row.tensors:,}) {row.optimizer}"
        print(f"{label}: {result}", file=sys.stderr, flush=True)
    try:
        report.bandwidth_gb_per_s |= bandwidth(rig, "end")
    except RuntimeError as error:  # print the table even if a bad kernel broke the GPU
        print(f"no bandwidth at the end: {error}", file=sys.stderr)
    save(report, args.json)
    print(markdown(report))


if __name__ == "__main__":
    main()
