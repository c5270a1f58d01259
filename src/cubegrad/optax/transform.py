"""`init` and `update`: a rule applied to every parameter of a tree."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from cubegrad import codec, options
from cubegrad import rule as rules
from cubegrad.codec import Codes
from cubegrad.optax import auto, codes, kernel, mean, rounding, state_checks, xla
from cubegrad.optax.apply import Place, Request, Written
from cubegrad.optax.checks import Settings, Tree, check_gradient, check_param, is_zero
from cubegrad.optax.layout import (
    SUMS,
    buffer_names,
    compute_dtype,
    from_real_parts,
    initial_buffers,
    real_parts,
)
from cubegrad.options import Hyper
from cubegrad.rule import Rule


class Leaf(NamedTuple):
    """One parameter and what its step needs."""

    param: Array
    grad: Array
    buffers: dict[str, Array | None]  # None: not kept
    decays: bool

    def hyper(self, h: Hyper) -> Hyper:
        return h if self.decays else h._replace(weight_decay=0.0, shrink=None)


class Step(NamedTuple):
    """The result of one parameter's step."""

    move: Array | Written  # to be added to the parameter
    buffers: dict[str, Array | None]
    sums: list[xla.Sums]  # of each real part; empty unless the learning rate is estimated


def transformation(
    rule: Rule, state_type: Any, settings: Settings
) -> optax.GradientTransformationExtraArgs:
    """The rule as an optax transformation whose state is a `state_type`."""
    names = buffer_names(state_type)

    def init(params: Tree) -> Any:
        jax.tree_util.tree_map_with_path(check_param, params)
        if settings.compact:
            codes.warn_of_uncoded(params)
        leaves, treedef = jax.tree.flatten(params)
        buffers = [initial_buffers(settings, names, param) for param in leaves]
        fields = _trees(treedef, names, buffers)
        if settings.auto:
            fields["estimate"] = auto.initial_estimate(auto.kind_of(state_type))
        if rule.averages:
            fields |= mean.numbers(0.0, 0.0, settings.momentum)
        return state_type(count=jnp.zeros([], jnp.int32), **fields)

    def update(
        updates: Tree,
        state: Any,
        params: Tree = None,
        *,
        write: Request | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, Any]:
        del extra_args  # meant for other members of a chain
        if params is None:
            raise ValueError(
                "params=None, but a step needs them; call update(grads, state, params)"
            )
        state = state_checks.as_type(state_type, state)
        leaves = _leaves(settings, params, updates, {n: getattr(state, n) for n in names})
        now, started = settings.at(state.count), None
        h, fields = _hyper(now), dict[str, Any]()
        if settings.auto:
            size = auto.coordinates(params)
            first = [(leaf.hyper(h), leaf.param, leaf.grad) for leaf in leaves]
            estimate = auto.start(state.estimate, first, size)
            h = _hyper(now, auto.learning_rate(estimate))
            started = auto.has_started(estimate)
            h = _unless_waiting(h, started)
        if rule.averages:
            h, fields = mean.advance(state, h)
        places = [write.place(p) if write else None for p in jax.tree.leaves(params)]
        steps = _steps(rule, h, state.count, started, leaves, settings, places)
        if settings.auto:
            pairs = zip(leaves, steps, strict=True)
            sums = [(leaf.decays, part) for leaf, step in pairs for part in step.sums]
            fields["estimate"] = auto.advance(estimate, h, state.count, sums, size)
        treedef = jax.tree.structure(params)
        fields |= _trees(treedef, names, [step.buffers for step in steps])
        moves = jax.tree.unflatten(treedef, [step.move for step in steps])
        if write:
            write.answered = True
        return moves, state_type(count=optax.safe_increment(state.count), **fields)

    return optax.GradientTransformationExtraArgs(init, update)


def _trees(
    treedef: Any, names: Iterable[str], buffers: list[dict[str, Array | None]]
) -> dict[str, Tree]:
    """One tree for each name, from the buffers of each parameter."""
    return {name: jax.tree.unflatten(treedef, [own[name] for own in buffers]) for name in names}


def _leaves(settings: Settings, params: Tree, grads: Tree, buffers: dict[str, Tree]) -> list[Leaf]:
    """The trees, parameter by parameter, checked."""
    trees = {f"the state's {name}": tree for name, tree in buffers.items()}
    rows = state_checks.flattened(params, {"the tree of gradients": grads, **trees})
    for index, (param, grad, *_) in enumerate(rows):
        check_gradient(params, index, param, grad)
    state_checks.check_buffers(params, settings, [*buffers], [row[2:] for row in rows])
    return [
        Leaf(jnp.asarray(param), jnp.asarray(grad), dict(zip(buffers, own, strict=True)), decays)
        for (param, grad, *own), decays in zip(rows, _decays(settings.mask, params), strict=True)
    ]


def _decays(mask: Any, params: Tree) -> list[bool]:
    """Whether each parameter decays; one boolean of the mask may cover a whole subtree."""
    if mask is None:
        return [True] * len(jax.tree.leaves(params))
    if callable(mask) and jax.tree_util.all_leaves([mask]):  # a module is callable, and a tree
        mask = mask(params)
    full = jax.tree.map(lambda m, subtree: jax.tree.map(lambda _: bool(m), subtree), mask, params)
    return jax.tree.leaves(full)


def _hyper(now: Any, estimated_lr: ArrayLike = 1.0) -> Hyper:
    """The numbers of a step, from the settings at that step (`Settings.at`)."""
    given = now.lr_factor if now.auto else now.learning_rate
    lr = given * estimated_lr if now.auto else given
    shrink = None
    if now.decoupled and not is_zero(now.weight_decay):
        # With "auto", decoupled_lr decays by lr_factor: its reference_lr is 1.
        factor = options.decay_factor(now._asdict(), given if now.decoupled_lr else lr)
        shrink = factor if isinstance(factor, float) else jnp.maximum(factor, 0.0)
    return Hyper(
        lr=lr,
        momentum=now.momentum,
        eps=now.eps,
        weight_decay=0.0 if now.decoupled else now.weight_decay,
        shrink=shrink,
        maximize=now.maximize,
    )


def _unless_waiting(h: Hyper, started: Array) -> Hyper:
    """Without decay until there is an estimate: nothing moves then."""
    if h.shrink is not None:
        h = h._replace(shrink=jnp.where(started, h.shrink, 1.0))
    if not is_zero(h.weight_decay):
        decay: Any = jnp.where(started, h.weight_decay, 0.0)
        h = h._replace(weight_decay=decay)
    return h


def _steps(
    rule: Rule,
    h: Hyper,
    count: Array,
    started: Array | None,
    leaves: list[Leaf],
    settings: Settings,
    places: list[Place | None],
) -> list[Step]:
    """The step of each parameter, by a kernel where there is a place for one."""
    with_sums, rounds = settings.auto, settings.rounds_at_random
    steps, numbers = list[Step](), dict[bool, Any]()
    for leaf, place in zip(leaves, places, strict=True):
        kept = {name: buffer for name, buffer in leaf.buffers.items() if buffer is not None}
        if place is None or not kernel.fits(leaf.param, leaf.grad, kept, rounds, place.sharding):
            steps.append(_step(rule, h, count, started, leaf, with_sums, rounds))
            continue
        if leaf.decays not in numbers:
            own = _cast(leaf.hyper(h), jnp.float32)
            numbers[leaf.decays] = kernel.numbers(rule, own, count, started)
        fixed, values = numbers[leaf.decays]
        form = kernel.Form(rule, fixed, with_sums, rounds, place.sharding, kernel.INTERPRET)
        param, new, sums = kernel.step(_plain, form, values, count, leaf.param, leaf.grad, kept)
        buffers = {name: new.get(name) for name in leaf.buffers}
        steps.append(Step(Written(param), buffers, [sums] if with_sums else []))
    return steps


def _plain(
    form: kernel.Form,
    values: Array,
    count: Array,
    param: Array,
    grad: Array,
    old: dict[str, Array],
) -> tuple[Array, dict[str, Any], xla.Sums]:
    """What a kernel does, where there is none."""
    leaf, started = Leaf(param, grad, dict(old), True), values[1] > 0 if form.with_sums else None
    h = form.hyper(values)
    step = _step(form.rule, h, count, started, leaf, form.with_sums, form.rounds)
    sums = step.sums[0] if form.with_sums else ()
    return optax.apply_updates(param, step.move), step.buffers, sums


def _step(
    rule: Rule,
    h: Hyper,
    count: Array,
    started: Array | None,
    leaf: Leaf,
    with_sums: bool,
    rounds: bool,
) -> Step:
    """One parameter's step. The real and the imaginary part of a complex one take a step each."""
    if started is not None:
        # Until there is an estimate, all gradients are 0, or some are not finite and none is used.
        leaf = leaf._replace(grad=jnp.where(started, leaf.grad, 0))
    if leaf.buffers.get("root_code") is not None:
        return _coded_step(rule, h, count, leaf, with_sums)
    kept = {name: buffer for name, buffer in leaf.buffers.items() if buffer is not None}
    dtype = compute_dtype(leaf.param, *kept.values())
    real = jnp.finfo(dtype).dtype
    h, step = _cast(leaf.hyper(h), real), count.astype(real)
    arrays = {"param": leaf.param, "grad": leaf.grad, **kept}
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    results, sums = [], []
    for old in real_parts(arrays):
        buffers = {name: old[name] for name in kept}
        new_param, new = rules.step(xla, rule, h, step, old["param"], old["grad"], buffers)
        new["param"] = new_param
        if with_sums:
            sums.append(auto.step_sums(rule, h, step, old, new))
            new["param"] = xla.compute_after(sums[-1][0], new["param"], old["param"])
            if rule.pulls:
                new |= zip(SUMS, auto.stored_sums(h, step, old, new), strict=True)
        results.append(new)
    new = from_real_parts(results)
    move_dtype, exact = leaf.param.dtype, new["param"]
    if rounds and move_dtype.name in codec.ROUND:
        new["param"] = rounding.rounded(h, count, move_dtype.name, new["param"])
        move_dtype = jnp.float32  # as of codes: no move in half precision leads to every number
    # Where nothing moves, x - x is 0 and this is -0, which changes no bit when it is added.
    move = -(arrays["param"] - new["param"])
    if rule.relative and leaf.param.dtype.name in codec.ROUND:
        half = leaf.param.dtype.name
        move = move.astype(jnp.float32)
        move = move if move_dtype == jnp.float32 else xla.nearest(move, half)
        # What `optax.apply_updates` makes of it.
        moved = xla.nearest(leaf.param.astype(jnp.float32) + move, half)
        rules.take_rounding(new, exact, moved.astype(dtype))
    move = move.astype(move_dtype)
    stored = {name: new[name].astype(buffer.dtype) for name, buffer in kept.items()}
    return Step(move, {name: stored.get(name) for name in leaf.buffers}, sums)


def _coded_step(rule: Rule, h: Hyper, count: Array, leaf: Leaf, with_sums: bool) -> Step:
    old = Codes(*map(leaf.buffers.get, codes.BUFFERS))
    h = _cast(leaf.hyper(h), jnp.float32)
    run = partial(codec.step, xla.CODEC, rule, h)
    move, new, sums = codes.step(run, count, leaf.param, leaf.grad, old, with_sums)
    stored = dict(zip(codes.BUFFERS, new, strict=True))
    return Step(move, {n: stored.get(n) for n in leaf.buffers}, [] if sums is None else [sums])


def _cast(h: Hyper, dtype: Any) -> Hyper:
    """With arrays in the dtype of the step."""
    cast: Any = [v.astype(dtype) if isinstance(v, Array) else v for v in h]
    return Hyper(*cast)
