"""Scenarios in several processes: `python ranks.py RANK WORLD FOLDER MODULE...` is one of them.

Starting processes takes longer than most scenarios, so all scenarios share them. The report of a
scenario is `REACHED` if it ran to its end in every process.
"""

import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

SECONDS = 240  # for all scenarios; 30 are usual on 2 cores
REACHED = "reached the end"
# Warnings are errors, as in pytest, except for torch.distributed.optim's use of torch.jit, the
# notice that a checkpoint saved with no_dist=True is that of one process, and what torch 2.10 and
# its Triton do themselves.
WARNINGS = (
    *("-W", "error", "-W", "ignore:`torch.jit.:DeprecationWarning"),
    *("-W", "ignore::RuntimeWarning:triton.runtime.interpreter"),
    *("-W", "ignore:weight_decay=:UserWarning"),  # large ones, to have an effect
    *("-W", "ignore:torch.distributed is disabled:UserWarning"),
    *("-W", "ignore:TypedStorage is deprecated:UserWarning"),
    *("-W", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
    *("-W", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"),
)


Scenario = Callable[[], None]


def scenarios(modules: Iterable[str], world: int) -> dict[str, Scenario]:
    """The functions marked `@on(...)` for this many processes, by name."""
    return {
        name: thing
        for module in modules
        for name, thing in vars(importlib.import_module(module)).items()
        if world in getattr(thing, "worlds", ())
    }


def on(*worlds: int) -> Callable[[Scenario], Scenario]:
    def mark(scenario: Scenario) -> Scenario:
        scenario.worlds = worlds  # type: ignore[attr-defined]
        return scenario

    return mark


def run(modules: Iterable[str], world: int, folder: Path) -> dict[str, str]:
    """Start the processes; a report on each scenario, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(world):
        options = map(str, (__file__, rank, world, folder, *modules))
        command = [sys.executable, *WARNINGS, *options]
        with (folder / f"{world}-{rank}.log").open("wb") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            environment = {**os.environ, "FOLDER": str(folder)}
            processes.append(subprocess.Popen(command, env=environment, **streams))
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reports: dict[str, str] = {}
    for rank in range(world):
        log_text = (folder / f"{world}-{rank}.log").read_text(errors="replace")
        start, *sections = log_text.split("SCENARIO ")
        reports["start"] = reports.get("start", "") + start
        for section in sections:
            name, _, outcome = section.partition("\n")
            if REACHED not in outcome:
                others = reports.get(name, REACHED).removeprefix(REACHED)
                reports[name] = f"{others}rank {rank}: {outcome}"
            reports.setdefault(name, REACHED)
    return reports


def main() -> None:
    """One process: run the scenarios in order and stop at the first that fails."""
    import torch  # here, since the parent only starts processes

    rank, world, folder, *modules = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{world}-store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    for name, scenario in scenarios(modules, world).items():
        print(f"SCENARIO {name}", flush=True)  # noqa: T201
        try:
            scenario()
            torch.distributed.barrier()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            os._exit(1)  # the others may be waiting in a collective
        print(REACHED, flush=True)  # noqa: T201
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
