"""What `update` cannot go on from is refused while it is traced: a compiled step costs the same."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_flatten_with_path

from cubegrad.optax import codes, mean
from cubegrad.optax.auto import kind_of
from cubegrad.optax.checks import Settings, Tree

MAKERS = {
    "MadgradState": "madgrad",
    "AutoMadgradState": 'madgrad("auto")',
    "CompactMadgradState": "madgrad(compact=True)",
    "CompactAutoMadgradState": 'madgrad("auto", compact=True)',
    "MirrorMadgradState": "mirror_madgrad",
    "CompactMirrorMadgradState": "mirror_madgrad(compact=True)",
    "MadgradwState": "madgradw",
    "CompactMadgradwState": "madgradw(compact=True)",
    "ScheduleFreeMadgradwState": "madgradw(schedule_free=True)",
    "CompactScheduleFreeMadgradwState": "madgradw(schedule_free=True, compact=True)",
    "AutoMadgradwState": 'madgradw("auto")',
    "CompactAutoMadgradwState": 'madgradw("auto", compact=True)',
    "AutoScheduleFreeMadgradwState": 'madgradw("auto", schedule_free=True)',
    "CompactAutoScheduleFreeMadgradwState": 'madgradw("auto", schedule_free=True, compact=True)',
}
START_OVER = "start over from the weights as they are: state = tx.init(params)"
SHOWN = 3  # paths in a message


def as_type(state_type: Any, state: Any) -> Any:
    """The state as a `state_type`; a checkpoint may restore a plain tuple."""
    fields, own = state_type._fields, getattr(state, "_fields", None)
    name, needed = type(state).__name__, state_type.__name__
    fits = own in (None, fields) and (name == needed or name not in MAKERS)
    if isinstance(state, tuple | list) and fits and len(state) == len(fields):
        state = _with_count(state_type(*state))
        if "estimate" in fields:
            state = state._replace(estimate=_estimate(kind_of(state_type), state.estimate))
        return _with_numbers(state) if set(mean.NUMBERS) <= set(fields) else state
    found = f"of type {name}"
    remedy = "pass what its own init() or update() returned; to a chain's update, the whole chain's"
    if maker := MAKERS.get(name):
        found = f"the {name} of {maker}"
        remedy = f"go on with {maker}, or {START_OVER}"
    elif isinstance(state, Mapping) and set(state) == set(fields):
        remedy = f"pass {needed}(**state)"
    elif isinstance(state, tuple | list) and own is None:
        found += f" with {len(state)} members"
    raise TypeError(
        f"the state is {found}, and {MAKERS[needed]} needs its own {needed} of {len(fields)} "
        f"fields; {remedy}"
    )


def _with_count(state: Any) -> Any:
    """With an array of JAX as its count; a checkpoint may restore another number."""
    count = state.count
    if getattr(count, "shape", None) == () and jnp.issubdtype(count.dtype, jnp.integer):
        if isinstance(count, jax.Array):
            return state
        count = int(count)
    if type(count) is int and 0 <= count < 2**31:
        return state._replace(count=jnp.asarray(count, jnp.int32))
    raise ValueError(
        f"the state's count is {count!r:.60}, and must be one whole number >= 0 and < 2^31; pass "
        f"the state as init() or update() returned it, or {START_OVER}"
    )


def _estimate(kind: Any, found: Any) -> Any:
    """With arrays; this too may be restored as a plain tuple, or with plain numbers."""
    name, count = kind.__name__, len(kind._fields)
    if not isinstance(found, tuple | list) or len(found) != count:
        raise TypeError(
            f"the state's estimate is of type {type(found).__name__}, and must be the {count} "
            f"numbers of {name}; pass {name}(...) of them, or {START_OVER}"
        )
    dtype = jnp.result_type(float)
    return kind(*(x if hasattr(x, "dtype") else jnp.asarray(x, dtype) for x in found))


def _with_numbers(state: Any) -> Any:
    """With arrays as the numbers of its mean."""
    found = {name: getattr(state, name) for name in mean.NUMBERS}
    for name, value in found.items():
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain and getattr(value, "shape", None) != ():
            raise ValueError(
                f"the state's {name} is {value!r:.60}, and must be one number; pass the state as "
                f"init() or update() returned it, or {START_OVER}"
            )
    arrays = mean.numbers(*found.values())
    kept = {n: x if isinstance(x, jax.Array) else arrays[n] for n, x in found.items()}
    return state._replace(**kept)


def flattened(params: Tree, trees: Mapping[str, Tree]) -> list[tuple[Any, ...]]:
    """A row for each parameter, with its part of each tree; the names are for messages."""
    treedef: Any = jax.tree.structure(params)
    columns = [treedef.flatten_up_to(params)]
    for name, tree in trees.items():
        try:
            columns.append(treedef.flatten_up_to(tree))
        except (TypeError, ValueError) as error:
            _refuse_tree(name, params, tree, error)
    return list(zip(*columns, strict=True))


def _refuse_tree(name: str, params: Tree, tree: Tree, error: Exception) -> NoReturn:
    wanted, found = (
        [keystr(path) for path, _ in tree_flatten_with_path(one, lambda node: node is None)[0]]
        for one in (params, tree)
    )
    missing = [path for path in wanted if path not in found]
    others = [path for path in found if path not in wanted]
    parts = [
        f"{word} {', '.join(paths[:SHOWN])}{', …' if len(paths) > SHOWN else ''}"
        for word, paths in (("lacks", missing), ("has", others))
        if paths
    ]
    difference = " and ".join(parts) or f"has other containers ({error})"
    raise ValueError(
        f"{name} is not a tree like params: it {difference}; pass params, gradients and state of "
        f"one model, or {START_OVER}"
    ) from error


def check_buffers(
    params: Tree, settings: Settings, names: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> None:
    """Refuse state of another shape, or without a buffer that the step needs.

    `rows` has the values of `names` for each parameter.
    """
    for (path, param), values in zip(tree_flatten_with_path(params)[0], rows, strict=True):
        held = {name: v for name, v in zip(names, values, strict=True) if v is not None}
        in_codes = "root_code" in held
        wanted = [name for name in names if name.endswith(("_code", "_scale")) is in_codes]
        at_rest = {"offset_code", "offset_scale"}  # not kept at momentum 0
        if not {"initial_param", "dual_offset"} <= set(names):  # an estimate asks for both
            at_rest |= {"initial_param", "z", "dual_offset"}
        lacks = [n for n in wanted if n not in held and not (settings.no_momentum and n in at_rest)]
        if lacks:
            why = ""
            if set(lacks) <= at_rest:
                why = f", which momentum=0 does not keep and momentum={settings.momentum} needs"
            raise ValueError(
                f"the state of params{keystr(path)} lacks {', '.join(lacks)}{why}; go on with the "
                f"options it was made with, or {START_OVER}"
            )
        _check_forms(f"params{keystr(path)}", param, held)


@cache
def _forms_of_codes(shape: Any, dtype: Any, names: tuple[str, ...]) -> dict[str, Any]:
    param = jax.ShapeDtypeStruct(shape, dtype)
    forms: dict[str, Any] = jax.eval_shape(partial(codes.initial_codes, names=names), param)
    return forms


def _check_forms(name: str, param: Any, held: Mapping[str, Any]) -> None:
    shape, coded = jnp.shape(param), tuple(n for n in held if n in codes.BUFFERS)
    forms = _forms_of_codes(shape, jnp.result_type(param), coded) if coded else {}
    for buffer, value in held.items():
        expected = forms[buffer].shape if buffer in forms else shape
        found = getattr(value, "shape", type(value).__name__)
        if found != expected:
            raise ValueError(
                f"the state's {buffer} of {name} has shape {found}, and must have {expected}; pass "
                f"params and state of one model, or {START_OVER}"
            )
        # That of x_0's codes says with which parameters they were made; the step compares it.
        if buffer in forms and buffer != "initial_code" and value.dtype != forms[buffer].dtype:
            raise ValueError(
                f"the state's {buffer} of {name} is {value.dtype}, and must be "
                f"{forms[buffer].dtype}; load it without a conversion, or {START_OVER}"
            )
