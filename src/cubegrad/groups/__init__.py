"""Parameter groups from a model: what decays, layer-wise learning rates, options by name."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from cubegrad.groups.checks import check_numbers, check_patterns, checked_kinds
from cubegrad.groups.places import KINDS, Use, depths_of, kind_of, matches, uses_of

__all__ = ["param_groups"]


class _Part(NamedTuple):
    """What the parameters of a group have in common."""

    depth: int | None  # None without layer_decay, and where a pattern gives the lr
    decays: bool | None  # None where a pattern gives the decay
    patterns: tuple[str, ...]  # those that match

    @property
    def label(self) -> str:
        words = [] if self.depth is None else [f"depth_{self.depth}"]
        if self.decays is not None:
            words.append("decay" if self.decays else "no_decay")
        return "/".join([*words, *self.patterns])

    def order(self, patterns: list[str]) -> tuple[Any, ...]:
        """By depth, with decay first, then as the patterns are given."""
        depth = -1 if self.depth is None else self.depth
        return depth, self.decays is not True, [patterns.index(one) for one in self.patterns]


def param_groups(
    model: nn.Module,
    *,
    lr: float | Tensor | str | None = None,
    weight_decay: float | None = None,
    no_decay: Iterable[str] = KINDS,
    layer_decay: float | None = None,
    patterns: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The trainable parameters of a model, as groups for any torch optimizer.

    The kinds in `no_decay` get a weight_decay of 0: norms, biases, embeddings (also positions and
    class tokens) and scales, which are all others with at most one dimension. What is None is left
    to the optimizer. `layer_decay` multiplies `lr` once for each block between a parameter and the
    head; with lr="auto" build MADGRAD with lr="auto" too. `patterns` sets options by name, as in
    {"head": {"lr": 0.1}, "*.bias": {...}}; a pattern is a glob that the name of a parameter, or of
    a module that it is in, matches as a whole. Patterns override the rest, and later ones earlier
    ones. See docs/param_groups.md.
    """
    uses = uses_of(model)
    patterns = {} if patterns is None else patterns
    check_numbers(lr, weight_decay, layer_decay)
    check_patterns(patterns, uses)
    spared = checked_kinds(no_decay)
    depths = None if layer_decay is None else depths_of(uses)
    members: dict[_Part, list[Tensor]] = {}
    for param, own in _trained(model, uses).items():
        decays = weight_decay != 0 and not any(kind_of(use) in spared for use in own)
        depth = None if depths is None else min(depths[use.name] for use in own)
        part = _part(depth, decays, own, patterns)
        members.setdefault(part, []).append(param)
    top = max(depths.values()) if depths else 0
    groups = []
    for part in sorted(members, key=lambda part: part.order(list(patterns))):
        group: dict[str, Any] = {"params": members[part], "name": part.label}
        if lr is not None:
            group["lr"] = _scaled(lr, layer_decay, top, part.depth)
        if part.decays is not None:
            group["weight_decay"] = weight_decay if part.decays else 0.0
        for pattern in part.patterns:
            group |= patterns[pattern]
        groups.append({name: value for name, value in group.items() if value is not None})
    return groups


def _scaled(
    lr: float | Tensor | str, layer_decay: float | None, top: int, depth: int | None
) -> float | Tensor | str:
    """The lr of a group. With lr="auto" it is a factor, and "auto" itself is the factor 1.

    So an optimizer that is built without lr="auto" refuses the groups instead of training with
    factors as learning rates.
    """
    if layer_decay is None or depth is None or depth == top:
        return lr
    factor = layer_decay ** (top - depth)
    return factor if isinstance(lr, str) else lr * factor


def _part(
    depth: int | None, decays: bool, own: list[Use], patterns: Mapping[str, Mapping[str, Any]]
) -> _Part:
    matched = tuple(p for p in patterns if any(matches(p, use) for use in own))
    overridden = {name for pattern in matched for name in patterns[pattern]}
    return _Part(
        None if "lr" in overridden else depth,
        None if "weight_decay" in overridden else decays,
        matched,
    )


def _trained(model: nn.Module, uses: list[Use]) -> dict[Tensor, list[Use]]:
    found: dict[Tensor, list[Use]] = {}
    for use in uses:
        if use.param.requires_grad:
            found.setdefault(use.param, []).append(use)
    if not found:
        raise ValueError(
            f"all {len(uses)} parameters of the {type(model).__name__} are frozen, and some must "
            "be trained; call requires_grad_(True) on those"
        )
    return found
