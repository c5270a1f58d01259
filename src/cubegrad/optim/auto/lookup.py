"""`cubegrad.estimated_lr`: the estimate of an optimizer, or of one inside a wrapper."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cubegrad.optim.auto.estimate import lr_of

# Where wrappers keep the optimizer: those of accelerate, Lightning, DeepSpeed, fairscale, skorch
# and torch (its schedulers and ZeroRedundancyOptimizer), and optimizers around another one.
ATTRIBUTES = (
    *("optimizer", "_optimizer", "optimizer_", "optimizers", "optim", "_optim", "opt"),
    *("base_optimizer", "inner_optimizer", "inner", "wrapped_optimizer", "wrapped"),
)


def estimated_lr(optimizer: Any) -> float:
    """The current estimate of lr="auto", without any group's factor; nan before the first step.

    Takes a MADGRAD or what holds one: a wrapper, a scheduler, a list or a dict. Reading it waits
    for the device; `param_groups[0]["estimated_lr"]` is the same number as a tensor, at no cost.
    """
    rows, seen = _estimates(optimizer, {})
    if len(rows) == 1:
        return lr_of(rows[0])
    if rows:
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(rows)} optimizers with lr='auto', and "
            "estimated_lr() needs one of them; pass that one"
        )
    raise TypeError(
        f"estimated_lr() got {', which holds '.join(seen)}; it needs MADGRAD(params, lr='auto') or "
        "a wrapper that holds it. Pass the optimizer itself; for JAX, use "
        "cubegrad.optax.estimated_lr"
    )


def _estimates(thing: Any, visited: dict[int, Any]) -> tuple[list[Tensor], list[str]]:
    """The estimates of the innermost optimizers, and the names of the types that were passed.

    A wrapper's own groups may be older copies of those inside it.
    """
    visited[id(thing)] = thing
    rows: dict[int, Tensor] = {}
    seen = [type(thing).__name__]
    for part in _parts(thing):
        if id(part) not in visited:
            found, names = _estimates(part, visited)
            rows |= {id(row): row for row in found}
            seen += names
    if not rows:
        groups = getattr(thing, "param_groups", None)
        first = groups[0] if isinstance(groups, list) and groups else None
        if isinstance(first, Mapping) and first.get("auto_lr") and "estimate" in first:
            rows[id(first["estimate"])] = first["estimate"]
        elif isinstance(first, Mapping) and "lr" in first:
            seen[0] += f" with lr={first['lr']}"
    return list(rows.values()), seen


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, list | tuple):
        return list(thing)
    parts = (getattr(thing, name, None) for name in ATTRIBUTES)
    return [part for part in parts if part is not None and not callable(part)]
