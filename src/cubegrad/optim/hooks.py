"""What torch puts around an optimizer's `step`, and the way past it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module


def straight(step: Callable[..., Any]) -> Callable[..., Any]:
    """Bypass the profiler range and hooks that torch puts around `step`, when there are none.

    To a host that comes out of a wait for the device they are tens of microseconds, as much as all
    that a fused step itself asks of it.
    """
    around = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def either(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        watched = (
            getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or optimizer_module._global_optimizer_pre_hooks
            or optimizer_module._global_optimizer_post_hooks
        )
        return (around if watched else step)(self, *args, **kwargs)

    either.hooked = True  # type: ignore[attr-defined]
    return either
