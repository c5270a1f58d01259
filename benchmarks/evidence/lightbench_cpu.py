"""lightbench on a CPU: stand-ins for its calls of CUDA and for its slow early stopping.

lightbench 0.1.1 names the device "cuda" throughout. `stand_ins()` gives it the CPU instead, while
it lasts. What decides a run stays the package's: problems, search, budget, and who has won.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

# The functions that lightbench calls with device="cuda".
MAKERS = (
    "arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "tensor",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
RULES = {"warmup": 256, "ema_patience": 2, "ema_start": 0, "ema_index": 4}


class Validator:
    """When a trial is given up: the decisions of lightbench's Validator, in numpy.

    Of the newest losses there are 20 exponential means, from fast to slow. A trial ends once some
    faster mean has been above a slower one, by a factor, for so many steps in a row. The original
    also compares each step with all earlier trials, in arrays as long as a trial, which takes 3 ms
    a step on a CPU. That part never stops a trial of fewer than 409,600 steps: its counters grow by
    1 a step, and its lowest threshold is 1,600 * 256.
    """

    def __init__(self, patience: dict[int, float], overall: dict[int, float], steps: int) -> None:
        threshold = min(factor * RULES["warmup"] ** power for factor, power in overall.items())
        if steps >= threshold:
            raise ValueError(f"steps={steps} must be below {threshold:g}; use fewer")
        self.limits = np.array(list(patience)) * RULES["ema_patience"]
        self.factors = 1 - np.array(list(patience.values()))[:, None]
        self.rates = 0.5 ** np.arange(1.0, 21.0)
        self.logs = np.log1p(-self.rates)
        self._start()

    def _start(self) -> None:
        self.step = 0
        self.ema_states = np.zeros(20)
        self.failures = np.zeros(len(self.limits), dtype=np.int64)

    def new(self) -> "Validator":
        """Before each trial. The package keeps the first one and asks it for copies."""
        other = object.__new__(Validator)
        other.__dict__.update(self.__dict__)
        other._start()
        return other

    def __call__(self, loss: Any) -> np.bool_:
        self.step += 1
        means = self.ema_states
        means += self.rates / -np.expm1(self.step * self.logs) * (float(loss) - means)
        worse = np.maximum.accumulate(means)[:-1] > means[1:] * self.factors
        self.failures = np.where(worse.any(1), self.failures + 1, 0)
        return np.bool_(self.step >= RULES["warmup"] and (self.failures >= self.limits).any())


def _on_the_cpu(make: Any) -> Any:
    def made(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*args, **options)

    return made


def _itself(one: Any, *_: Any, **__: Any) -> Any:
    return one


def _nothing(*_: Any, **__: Any) -> int:
    return 0


@contextlib.contextmanager
def stand_ins(utils: Any) -> Iterator[None]:
    """Inside, lightbench runs on the CPU; `utils` is its module of that name."""
    found = {name: getattr(utils.Validator, name, None) for name in RULES}
    if found != RULES:
        raise SystemExit(f"lightbench's Validator has {found}, and {RULES} was expected")
    with contextlib.ExitStack() as stack:
        for name in MAKERS:
            made = _on_the_cpu(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, made))
        for owner in (torch.Tensor, torch.nn.Module):
            stack.enter_context(mock.patch.object(owner, "cuda", _itself))
        for name in ("synchronize", "empty_cache", "memory_allocated"):
            stack.enter_context(mock.patch.object(torch.cuda, name, _nothing))
        stack.enter_context(mock.patch.object(torch.cuda, "device", contextlib.nullcontext))
        stack.enter_context(mock.patch.dict(utils.trial.__kwdefaults__, {"device": "cpu"}))
        stack.enter_context(mock.patch.object(utils, "Validator", Validator))
        yield
