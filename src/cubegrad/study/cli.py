"""The command `cubegrad`: problems, train, sweep, compare, report, export, memory."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import cubegrad
from cubegrad import memory
from cubegrad.study import config
from cubegrad.study.arguments import (
    Once,
    OnceWithList,
    count,
    natural,
    parameters,
    part,
    seconds,
    seed,
)
from cubegrad.study.problem import StudyError, missing


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", None, Once)
        self.register("action", "list", OnceWithList)

    def error(self, message: str) -> NoReturn:
        """Print one line, without argparse's usage."""
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    main = Parser(prog="cubegrad", description="The MADGRAD paper's comparison of optimizers.")
    main.add_argument("--version", action="version", version=f"cubegrad {cubegrad.__version__}")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("problems", help="list the problems, with sizes, data and presets")
    _train(commands.add_parser("train", help="one run"))
    _sweep(commands.add_parser("sweep", help="a grid of learning rates and decays"))
    compare = commands.add_parser(
        "compare", help="sweep, then the best setting of each method over all seeds, then report"
    )
    _sweep(compare)
    compare.add_argument(
        "--search-seeds",
        type=count,
        default=1,
        metavar="N",
        help="seeds per grid point (%(default)s)",
    )
    report = commands.add_parser("report", help="tables, plots, one page")
    report.add_argument("runs", type=Path, metavar="RUNS_DIR", help="the --out of a sweep")
    report.add_argument("--out", type=Path, metavar="DIR", help="where to write (RUNS_DIR/report)")
    _export(commands.add_parser("export", help="the runs as CSV, or for TensorBoard"))
    _memory(commands.add_parser("memory", help="what a training run keeps, by optimizer"))
    return main


def _export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", type=Path, metavar="RUNS_DIR", help="the --out of a sweep")
    add("--csv", type=Path, metavar="FILE", help="a row for each epoch of each run")
    add("--tensorboard", type=Path, metavar="DIR", help="then: tensorboard --logdir DIR")


def _memory(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--params",
        type=parameters,
        required=True,
        metavar="N",
        help="number of parameters: 7B, 350M, 1.5e9",
    )
    add("--dtype", default="float32", help="of the weights: bf16, fp16, float32 (%(default)s)")
    add(
        "--gpus",
        type=count,
        default=1,
        metavar="N",
        help="that FSDP shards over (%(default)s)",
    )


def _common(parser: argparse.ArgumentParser, **problem: str) -> None:
    add = parser.add_argument
    add(
        "problem",
        metavar="PROBLEM",
        **problem,  # type: ignore[arg-type]
        help="of `cubegrad problems`, or your_module:your_function, or file.py:function",
    )
    add("--preset", help="cpu, gpu or paper (cpu)")
    add("--device", choices=("cpu", "cuda"), help="cuda for gpu and paper, else cpu")
    add("--epochs", type=count, help="overrides the preset's")
    add("--batch", type=count, help="overrides the preset's")
    add("--schedule", help="overrides the preset's: flat, cosine, tenthing:150-225, ...")
    add("--data", type=Path, default=Path("data"), metavar="DIR", help="data sets (%(default)s)")
    add("--download", action="store_true", help="fetch missing data sets into --data")
    add(
        "--save-every",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="minimum time between two checkpoints of a run (%(default)s); 0: after each epoch",
    )
    add("--out", type=Path, metavar="DIR", help="where runs are kept (runs/PROBLEM-PRESET)")


def _train(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    add = parser.add_argument
    add("--method", default="madgrad", help="(%(default)s)")
    add(
        "--lr",
        metavar="LR",
        help="learning rate (the paper's, if it has this problem); for madgrad-auto a factor (1)",
    )
    add("--decay", metavar="DECAY", help="weight decay (the paper's, else 0)")
    add("--seed", type=seed, default=0, help="(%(default)s)")
    parser.set_defaults(ray=None)


def _sweep(parser: argparse.ArgumentParser) -> None:
    _common(parser, nargs="?")  # a --config may name it
    add = parser.add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="options from a config.toml, as every sweep writes one; those given here override it",
    )
    add(
        "--dry-run",
        action="store_true",
        help="list the runs with their epochs and estimated time, and train nothing",
    )
    add("--methods", action="list", metavar="A,B", help="such as madgrad,sgd@flat (the preset's)")
    add("--figure", help="the methods of a figure of the paper: dual-averaging or sqrt-decay")
    _search(parser)
    add(
        "--seeds",
        type=count,
        metavar="N",
        help="sweep: seeds per grid point (1); compare: of each method's best (the preset's)",
    )
    add(
        "--workers",
        type=count,
        metavar="N",
        help="parallel runs (one per core; one on a GPU)",
    )
    _cluster(parser)


def _search(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--lr",
        action="list",
        metavar="LRS",
        help="1e-4..1e-1 or 0.1,0.2 (each method's own range); factors if madgrad-auto is the only "
        "method",
    )
    add("--decay", action="list", metavar="DECAYS", help="0,1e-5..1e-3 (the preset's)")
    add("--grid", metavar="GRID", help="1,2.5,5 (times powers of ten) or powers-of-2")
    add(
        "--search",
        choices=("grid", "halving"),
        default="grid",
        help="run the whole grid, or stop runs early that fall behind (%(default)s)",
    )
    add(
        "--widen",
        type=natural,
        default=6,
        metavar="N",
        help="how many values to add beyond an end of the grid while it is best (%(default)s)",
    )
    add(
        "--select",
        choices=("test", "valid"),
        default="test",
        help="choose by the test set, as the paper does, or a held-out split (%(default)s)",
    )


def _cluster(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto, host:6379, ray://host:10001, or local to start one here",
    )
    add(
        "--gpus-per-run",
        type=part,
        metavar="PART",
        help="with --ray: the fraction of a GPU per run, such as 0.25 (1)",
    )
    add(
        "--retries",
        type=natural,
        default=3,
        metavar="N",
        help="with --ray: how often a run is restarted when its worker or node dies (%(default)s)",
    )


class Stopped(KeyboardInterrupt):
    """The command was stopped by a signal such as SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C: workers end, files are whole, no semaphore leaks."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers
    before = {n: signal.getsignal(n) for n in numbers}
    ours = [n for n in numbers if before[n] is signal.SIG_DFL]  # nohup ignores SIGHUP

    def stop(number: int, _: object) -> NoReturn:
        for n in ours:
            signal.signal(n, signal.SIG_IGN)  # a second signal would interrupt the cleanup
        raise Stopped(number)

    for n in ours:
        signal.signal(n, stop)
    try:
        yield
    finally:
        for n in ours:
            signal.signal(n, before[n])


def _print_memory(options: argparse.Namespace) -> None:
    try:
        result = memory.estimate(options.params, options.dtype, options.gpus)
    except ValueError as error:
        raise StudyError(str(error)) from None
    sys.stdout.write(f"{memory.table(result)}\n")


def _parse(words: list[str]) -> argparse.Namespace:
    options = parser().parse_args(words)
    if getattr(options, "config", None) is not None:
        words = [words[0], *config.words(options.config, options), *words[1:]]
        options = parser().parse_args(words)
    if getattr(options, "problem", "") is None:
        raise StudyError("PROBLEM is missing; name one of `cubegrad problems`, or give --config")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parse(words)
        options.words = words
        if options.command == "memory":  # needs no extra
            _print_memory(options)
            return 0
        try:
            from cubegrad.study import commands
        except ImportError as error:
            raise StudyError(missing(error.name or str(error), "study")) from None
        with _stoppable():
            commands.COMMANDS[options.command](options)
    except StudyError as error:
        sys.stderr.write(f"cubegrad: error: {error}\n")
        return 2
    except KeyboardInterrupt as stop:
        sys.stderr.write("\ncubegrad: stopped; run the same command again to resume\n")
        return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)
    except BrokenPipeError:  # `cubegrad problems | head`
        sys.stderr.close()
    return 0
