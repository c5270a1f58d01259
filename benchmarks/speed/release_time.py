"""The time of a step during backward(), compared with fused Adam's in the same place.

    python benchmarks/speed/release_time.py --json out.json

One backward pass hands a ready gradient to each parameter, so that its time is that of autograd
and of the steps. That of autograd alone, with a hook that only frees the gradient, is subtracted.
Adam is torch's recipe: an optimizer for each parameter, stepped and zeroed in a hook. Each
contender takes turns with it, and a ratio is the median over the turns. Times are wall clock, from
an idle device to an idle device; with --threads 1 on a CPU they are processor time, which other
work on the machine hardly changes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from math import prod
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import cubegrad

sys.path.append(str(Path(__file__).parents[1]))
from shared.facts import write
from shared.shapes import Shape, gpt2
from shared.timing import WARM_UP, machine, release, timed

FREED = "gradients freed, no step"
ADAM = "torch Adam fused, one for each parameter"
Finish = Callable[[], Any]


class Gradients(torch.autograd.Function):
    """Its backward pass returns the gradients that it was given."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # else autograd would copy each of them
        return None, *grads


def freed(params: list[Tensor]) -> Finish:
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return lambda: None


def adam(params: list[Tensor]) -> Finish:
    optimizers = {param: torch.optim.Adam([param], fused=True) for param in params}

    def hook(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
    return lambda: None


def madgrad(hold: bool = True, **options: Any) -> Callable[[list[Tensor]], Finish]:
    def build(params: list[Tensor]) -> Finish:
        optimizer = cubegrad.MADGRAD(params, **options)
        handle = optimizer.release_gradients()
        if not hold:
            handle.held_bytes = 0
        return optimizer.step

    return build


def ordinary(params: list[Tensor]) -> Finish:
    optimizer = cubegrad.MADGRAD(params)

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return finish


CONTENDERS = {
    FREED: freed,
    ADAM: adam,
    "cubegrad MADGRAD, released": madgrad(),
    "cubegrad MADGRAD compact, released": madgrad(compact=True),
    "cubegrad MADGRAD lr auto, released": madgrad(lr="auto"),
    "cubegrad MADGRAD, released, small ones too": madgrad(hold=False),
    "cubegrad MADGRAD, ordinary step": ordinary,
}


def cases(small: bool) -> dict[str, list[Shape]]:
    if small:
        return {"4 x (256, 256)": [(256, 256)] * 4, "4 x 1,024": [(1024,)] * 4}
    return {
        "300 x (256, 256)": [(256, 256)] * 300,
        "300 x (128, 128)": [(128, 128)] * 300,
        "300 x 1,024": [(1024,)] * 300,
        "GPT-2 small": gpt2(12, 768, 50257, 1024),
    }


class Run:
    """The parameters of one contender, and the seconds of its turns."""

    def __init__(self, build: Callable[[list[Tensor]], Finish], shapes: list[Shape], where: Any):
        torch.manual_seed(0)
        self.params = [torch.randn(s, **where).mul_(0.02).requires_grad_() for s in shapes]
        self.finish = build(self.params)
        self.seconds: list[float] = []

    def turn(self) -> None:
        grads = [torch.randn_like(param).mul_(0.01) for param in self.params]
        root = Gradients.apply(grads, *self.params)
        del grads

        def work() -> None:
            root.backward()
            self.finish()

        if root.is_cpu and torch.get_num_threads() == 1:
            start = time.thread_time()
            work()
            self.seconds.append(time.thread_time() - start)
        else:
            self.seconds.append(timed(work, root.device))


def measure(name: str, shapes: list[Shape], where: dict[str, Any], turns: int) -> dict[str, Any]:
    """One contender, in turns with Adam."""
    names = list(dict.fromkeys((FREED, ADAM, name)))
    runs = {each: Run(CONTENDERS[each], shapes, where) for each in names}
    before = runs[name].params[0].detach().clone()
    for turn in range(WARM_UP + turns):
        for each in names[turn % len(names) :] + names[: turn % len(names)]:
            runs[each].turn()
    if torch.equal(runs[name].params[0], before):
        raise RuntimeError(f"{name} left its parameters where they were")
    base, reference, own = (runs[each].seconds[WARM_UP:] for each in (FREED, ADAM, name))
    step = [mine - free for mine, free in zip(own, base, strict=True)]
    adam_step = [its - free for its, free in zip(reference, base, strict=True)]
    return {
        "optimizer": name,
        "backward_and_step_ms": 1e3 * median(own),
        "step_us_per_parameter": 1e6 * median(step) / len(shapes),
        "adam_us_per_parameter": 1e6 * median(adam_step) / len(shapes),
        "times_adam": median(map(truediv, step, adam_step)),
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in report["machine"].items())]
    for case in report["cases"]:
        lines += ["", f"### {case['case']}, {case['elements']:,} elements, {case['dtype']}", ""]
        lines += ["| | backward + step (ms) | step (us per parameter) | Adam's | ratio |"]
        lines += ["|---|---|---|---|---|"]
        for row in case["rows"]:
            shown = " | ".join(f"{row[name]:.3g}" for name in list(row)[1:])
            lines.append(f"| {row['optimizer']} | {shown} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="toy sizes, to test the script")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    where = {"device": device, "dtype": getattr(torch, args.dtype)}
    report: dict[str, Any] = {"machine": machine(device), "cases": []}
    for name, shapes in cases(args.small).items():
        facts = {"case": name, "elements": sum(map(prod, shapes)), "dtype": args.dtype}
        rows: list[dict[str, Any]] = []
        report["cases"].append({**facts, "rows": rows})
        for contender in list(CONTENDERS)[1:]:
            rows.append(measure(contender, shapes, where, args.turns))
            release(device)
            if args.json:
                write(report, args.json)
    print(markdown(report))


if __name__ == "__main__":
    main()
