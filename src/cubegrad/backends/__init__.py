"""How a step is executed. `choose` is the only decision about hardware.

A backend has one function, `step(method, h, params, grads, steps, buffers)`. The lists run in
parallel: real dense tensors, the step counters, and for each name of the method's layout
(`states.LAYOUTS`) a list of buffers, left out at the end when the method runs without it. The
backend updates params, buffers and steps in place, and nothing else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cubegrad.backends import eager, foreach
from cubegrad.options import Hyper

Step = Callable[
    [str, Hyper, list[Tensor], list[Tensor], list[Tensor], Sequence[list[Tensor]]], None
]

NATIVE = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def available() -> dict[str, str]:
    """Each backend, and "available" or the reason why it is not."""
    return {
        "eager": "available",
        "foreach": "available",
        "fused": "not part of this version",
    }


def choose(
    params: list[Tensor],
    *,
    foreach_wanted: bool | None,
    fused_wanted: bool | None,
    differentiable: bool,
) -> Step:
    """The backend asked for, else the fastest one that fits."""
    if fused_wanted:
        raise RuntimeError(
            f"fused=True, but the fused backend is {available()['fused']}; "
            "leave fused unset to get the fastest backend there is"
        )
    if differentiable or foreach_wanted is False:
        return eager.step
    # The compiler fuses the plain rule itself; tensor subclasses may lack list operations.
    plain = torch.compiler.is_compiling() or any(type(p) not in NATIVE for p in params)
    return eager.step if plain and not foreach_wanted else foreach.step
