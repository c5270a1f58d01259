"""Property tests over random shapes, groups, options and missing gradients."""

import copy
import os

import cases
import numpy as np
import pytest
import torch
from cases import METHODS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from cubegrad.backends import foreach

settings.register_profile(
    "cubegrad", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("cubegrad")
DEFAULTS = {"weight_decay": 1e-2, "decoupled_weight_decay": True}  # MADGRADW's
MANY = int(os.environ.get("CUBEGRAD_EXAMPLES", "1"))  # `make test-all` sets 10

layouts = st.sampled_from(cases.SHAPES)
options = st.fixed_dictionaries(
    {
        "lr": st.floats(0, 1.0),
        "momentum": st.one_of(st.just(0.0), st.floats(0, 0.999)),
        "eps": st.one_of(st.just(0.0), st.floats(1e-8, 1.0)),
        "maximize": st.booleans(),
    },
    optional={
        "weight_decay": st.floats(0, 0.9),
        "decoupled_weight_decay": st.booleans(),
    },
)


@st.composite
def runs(draw):
    """Groups of parameters, and for each step the seed of every gradient, or None."""
    groups = draw(st.lists(st.lists(layouts, min_size=1, max_size=3), min_size=1, max_size=2))
    group_options = [draw(options) for _ in groups]
    count = sum(map(len, groups))
    seeds = st.one_of(st.none(), st.integers(0, 1000))
    steps = draw(st.lists(st.lists(seeds, min_size=count, max_size=count), min_size=1, max_size=6))
    return groups, group_options, steps


def build(method, groups, group_options, dtype, **flags):
    made, number = [], 0
    for group, chosen in zip(groups, group_options, strict=True):
        params = []
        for shape in group:
            params.append(nn.Parameter(shape.param(cases.randn(shape.shape, dtype, number))))
            number += 1
        made.append({"params": params, **chosen})
    return [p for g in made for p in g["params"]], method.optimizer(made, **flags)


def feed(groups, params, seeds, dtype):
    shapes = [shape for group in groups for shape in group]
    for shape, param, seed in zip(shapes, params, seeds, strict=True):
        param.grad = None if seed is None else shape.grad(cases.randn(shape.shape, dtype, seed))


@given(
    run=runs(),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150 * MANY)
def test_foreach_equals_eager_bit_for_bit(run, method, dtype):
    groups, group_options, steps = run
    sides = [build(method, groups, group_options, dtype, foreach=f) for f in (False, True)]
    for seeds in steps:
        for params, optimizer in sides:
            feed(groups, params, seeds, dtype)
            optimizer.step()
    for p, q in zip(sides[0][0], sides[1][0], strict=True):
        assert cases.same_bits(p.detach(), q.detach())


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    method=st.sampled_from(METHODS),
    size=st.integers(1, 500),
    layout=st.sampled_from([torch.Tensor.clone, cases.gapped]),
)
@settings(max_examples=60 * MANY)
def test_foreach_in_slices_equals_eager(shape, method, size, layout):
    """Not bit for bit: torch rounds powers differently at the ends of a tensor."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreach, "SMALLEST_SLICE", size)
        for flag in (False, True):
            param = nn.Parameter(layout(cases.randn(tuple(shape), torch.float32, 0)))
            optimizer = method.optimizer([param], foreach=flag)
            for k in range(3):
                param.grad = cases.randn(tuple(shape), torch.float32, k + 1)
                optimizer.step()
            results.append(param.detach())
    torch.testing.assert_close(*results, rtol=2.0**-22, atol=2.0**-24)


@given(run=runs(), method=st.sampled_from(METHODS))
@settings(max_examples=150 * MANY)
def test_any_run_follows_the_oracle(run, method):
    groups, group_options, steps = run
    params, optimizer = build(method, groups, group_options, torch.float64)
    references = [method.oracle(cases.numbers(p)) for p in params]
    owner = [chosen for group, chosen in zip(groups, group_options, strict=True) for _ in group]
    for seeds in steps:
        feed(groups, params, seeds, torch.float64)
        optimizer.step()
        for param, reference, chosen in zip(params, references, owner, strict=True):
            if param.grad is not None:
                default = {"eps": 1e-6} | (DEFAULTS if method is cases.MADGRADW else {})
                reference.step(cases.numbers(param.grad), cases.settings(default | chosen))
    for param, reference in zip(params, references, strict=True):
        scale = 1 + np.abs(reference.x).max(initial=0.0)
        np.testing.assert_allclose(cases.numbers(param), reference.x, rtol=0, atol=1e-11 * scale)


@given(run=runs(), method=st.sampled_from(METHODS), data=st.data())
@settings(max_examples=100 * MANY)
def test_saving_and_loading_anywhere_changes_nothing(run, method, data):
    groups, group_options, steps = run
    cut = data.draw(st.integers(0, len(steps)))
    params, optimizer = build(method, groups, group_options, torch.bfloat16)
    twins, restarted = build(method, groups, group_options, torch.bfloat16)
    for k, seeds in enumerate(steps):
        if k == cut:
            state_dict = copy.deepcopy(restarted.state_dict())
            restarted = method.optimizer([{"params": twins[a:b]} for a, b in spans(groups)], lr=0.5)
            restarted.load_state_dict(state_dict)
        for some, opt in ((params, optimizer), (twins, restarted)):
            feed(groups, some, seeds, torch.bfloat16)
            opt.step()
    for p, q in zip(params, twins, strict=True):
        assert cases.same_bits(p.detach(), q.detach())


def spans(groups):
    end = 0
    for group in groups:
        start, end = end, end + len(group)
        yield start, end
