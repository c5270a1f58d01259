"""Memory and time of training the model of examples/one_gpu_7b.py with several optimizers.

    python benchmarks/memory/one_gpu.py --text book.txt --json out.json

Each optimizer trains the same weights on the same tokens, in a process of its own, so that its peak
memory is its own. The file is written after each of them; one that fails leaves the reason in it.
The time of an optimizer is that of a whole step less that of a forward and backward pass that
drops its gradients, measured in the same process: with released gradients the update happens
during the backward pass.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR

from cubegrad import MADGRAD

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import version, write
from shared.timing import machine

EXAMPLES = Path(__file__).parents[2] / "examples"


class MasterWeights:
    """AdamW on float32 copies of the weights, with float32 gradients; the common recipe."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        self.params = list(params)
        self.copies = [param.detach().float() for param in self.params]
        self.optimizer = AdamW(self.copies, lr, fused=True)
        self.state, self.gradients = self.optimizer.state, 0

    @torch.no_grad()
    def step(self) -> None:
        for param, copy in zip(self.params, self.copies, strict=True):
            copy.grad, param.grad = param.grad.float(), None
        self.gradients = sum(copy.grad.nbytes for copy in self.copies)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.params, self.copies)

    def zero_grad(self) -> None:
        """`step` has done it."""


def madgrad(model: nn.Module, lr: float, compact: bool, release: bool) -> MADGRAD:
    optimizer = MADGRAD(model.parameters(), lr, compact=compact)
    if release:
        optimizer.release_gradients()
    return optimizer


def flash_adamw(model: nn.Module, lr: float) -> Any:
    flashoptim = importlib.import_module("flashoptim")
    optimizer = flashoptim.FlashAdamW(model.parameters(), lr)
    flashoptim.enable_gradient_release(model, optimizer)
    # The loop calls step() and zero_grad(), which then do nothing but say so.
    warnings.filterwarnings("ignore", ".* is a no-op while enable_gradient_release")
    return optimizer


@dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[[nn.Module, float], Any]
    family: str  # has one learning rate


CONTENDERS = {
    "madgrad-compact-release": Contender(
        "MADGRAD compact, gradients released",
        lambda model, lr: madgrad(model, lr, compact=True, release=True),
        "madgrad",
    ),
    "flashadamw-release": Contender("flashoptim AdamW, gradients released", flash_adamw, "adamw"),
    "madgrad-compact": Contender(
        "MADGRAD compact",
        lambda model, lr: madgrad(model, lr, compact=True, release=False),
        "madgrad",
    ),
    "adamw-bf16": Contender(
        "AdamW fused, bfloat16 state",
        lambda model, lr: AdamW(model.parameters(), lr, fused=True),
        "adamw",
    ),
    "madgrad-float32": Contender(
        "MADGRAD, float32 state",
        lambda model, lr: madgrad(model, lr, compact=False, release=False),
        "madgrad",
    ),
    "adamw-master": Contender(
        "AdamW fused, float32 master weights",
        lambda model, lr: MasterWeights(model.parameters(), lr),
        "adamw",
    ),
}


def seconds_without_optimizer(model: nn.Module, data: Iterable[Tensor]) -> list[float]:
    """Of each forward and backward pass, with gradients dropped as soon as they are complete."""

    def drop(param: Tensor) -> None:
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(drop) for param in model.parameters()]
    seconds = []
    for tokens in data:
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    for hook in hooks:
        hook.remove()
    return seconds


def kept(optimizer: Any) -> tuple[int, int]:
    """Bytes of the state, and of what is kept to make the weights more precise."""
    state, master = 0, sum(copy.nbytes for copy in getattr(optimizer, "copies", ()))
    for entries in optimizer.state.values():
        for name, value in entries.items():
            # flashoptim keeps pairs of codes and scales, and extra bits of the weights.
            parts = (value,) if isinstance(value, Tensor) else vars(value).values()
            size = sum(part.nbytes for part in parts if isinstance(part, Tensor))
            if name == "error_bits":
                master += size
            else:
                state += size
    return state, master


def measure(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("one_gpu_7b")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    model = example.build(options.size, device, options.seed)
    parameters = sum(param.numel() for param in model.parameters())
    print(f"{parameters:,} parameters built in {time.perf_counter() - start:.1f} s", flush=True)

    def data(steps: int) -> Iterable[Tensor]:
        return example.batches(options.text, options.tokens, steps, options.seed, device)

    passes = seconds_without_optimizer(model, data(options.passes))
    without = median(passes[len(passes) // 2 :])  # the others warm up
    lr = getattr(options, f"{contender.family}_lr")
    optimizer = contender.make(model, lr)
    schedule = LinearLR(
        getattr(optimizer, "optimizer", optimizer),
        1 / example.WARM_UP,
        total_iters=example.WARM_UP,
    )
    run = example.train(model, optimizer, schedule, data(options.steps))
    state, master = kept(optimizer)
    memory = example.memory_parts(
        device,
        weights=example.size_of(model.parameters()),
        gradients=max(run["gradients"], getattr(optimizer, "gradients", 0)),
        state=state,
        master_weights=master,
    )
    print(f"\n{example.table(memory, parameters)}\n", flush=True)
    seconds = median(run["seconds"][len(run["seconds"]) // 2 :])
    on_gpu = device.type == "cuda"
    return {
        "parameters": parameters,
        "lr": lr,
        "losses": run["losses"],
        "step_ms": 1e3 * seconds,
        "first_step_ms": 1e3 * run["seconds"][0],
        "forward_backward_ms": 1e3 * without,
        "optimizer_ms": 1e3 * (seconds - without),
        "tokens_per_second": options.tokens / seconds,
        "memory": memory,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
    }


def run_apart(key: str, arguments: list[str], limit: float) -> dict[str, Any]:
    """Measure one contender in a process of its own. Returns its numbers or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        result, errors = Path(folder) / "result.json", Path(folder) / "errors"
        command = [sys.executable, __file__, *arguments, "--child", key, "--json", str(result)]
        with errors.open("w") as stream:
            try:
                subprocess.run(command, stderr=stream, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                return {"unavailable": f"it took more than --limit {limit:g} seconds"}
        if result.exists():
            return json.loads(result.read_text())
        lines = errors.read_text(errors="replace").strip().splitlines()
        return {"unavailable": lines[-1] if lines else "the process ended without a message"}


def markdown(rows: list[dict[str, Any]]) -> str:
    parts = ("weights", "gradients", "state", "master_weights", "activations and the rest", "peak")
    heads = [f"{part.replace('_', ' ')}, GB" for part in parts]
    heads += ["step, ms", "optimizer, ms", "tokens/s", "loss, first to last step"]
    lines = [f"| optimizer | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for row in rows:
        if "unavailable" in row:
            reason = row["unavailable"].replace("|", "\\|")
            cells = [f"unavailable: {reason}", *[""] * (len(heads) - 1)]
            lines.append(f"| {row['optimizer']} | {' | '.join(cells)} |")
            continue
        cells = [f"{row['memory'][part] / 1e9:.1f}" for part in parts]
        cells += [f"{row[name]:,.0f}" for name in ("step_ms", "optimizer_ms", "tokens_per_second")]
        cells.append(f"{row['losses'][0]:.2f} to {row['losses'][-1]:.2f}")
        lines.append(f"| {row['optimizer']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a file to learn; longer than --tokens")
    add("--json", type=Path, required=True, help="file to write after each optimizer")
    add("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    add("--size", default="7b", help="one of the example's (%(default)s)")
    add("--steps", type=int, default=30, help="(%(default)s)")
    add("--tokens", type=int, default=2048, help="in a step (%(default)s)")
    add("--passes", type=int, default=8, help="without an optimizer (%(default)s)")
    add("--madgrad-lr", type=float, default=1e-5, help="(%(default)s)")
    add("--adamw-lr", type=float, default=2e-5, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--limit", type=float, default=90.0, help="seconds for an optimizer (%(default)s)")
    add("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parsed(arguments)
    if options.child:
        write(measure(CONTENDERS[options.child], options), options.json)
        return
    facts = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    facts["transformers"] = version("transformers")
    names = ("size", "tokens", "steps", "seed")
    settings = {name: getattr(options, name) for name in names} | {"text": options.text.name}
    rows: list[dict[str, Any]] = []
    for key in options.only:
        name = CONTENDERS[key].name
        print(f"\n{name}", flush=True)
        rows.append({"optimizer": name, **run_apart(key, arguments, options.limit)})
        if "unavailable" in rows[-1]:
            print(f"unavailable: {rows[-1]['unavailable']}", flush=True)
        write({"machine": facts, "settings": settings, "rows": rows}, options.json)
    print(f"\n{markdown(rows)}")


if __name__ == "__main__":
    main()
