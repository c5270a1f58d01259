"""A step from codes to codes against the rule in float64, from random states.

It may differ by no more than the codes' own resolution, and not at all on average.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_examples import examples

from cubegrad import codec, rule
from cubegrad.functions import CodedFunctions, TorchFunctions
from cubegrad.options import Hyper

hypers = st.builds(
    lambda **numbers: Hyper(**numbers),  # hypothesis would fill in the fields with defaults
    lr=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    momentum=st.one_of(st.just(0.0), st.floats(0, 0.99)),
    eps=st.one_of(st.just(0.0), st.floats(1e-8, 1e-2)),
    # A smaller decay of a small weight has a square that float32 takes for 0.
    weight_decay=st.one_of(st.just(0.0), st.floats(1e-4, 0.5)),
    shrink=st.one_of(st.none(), st.floats(0.5, 1.0)),
    maximize=st.booleans(),
    mean_share=st.floats(0, 1),
)


@st.composite
def states(draw, method):
    """x, g and codes of two blocks, which a run could have left."""
    seed, width = draw(st.integers(0, 2**31)), draw(st.sampled_from([1, 7, 64, 256]))
    sizes = [10.0 ** draw(st.integers(-6, 3)) for _ in range(4)]
    random = np.random.default_rng(seed)
    shape = (1, 2, width)

    def normal(size):
        return torch.tensor(random.normal(size=shape) * size, dtype=torch.float32)

    x, g, offset = (normal(size) for size in sizes[:3])
    root = normal(sizes[3]).abs() * torch.tensor(random.random(shape) > 0.2)
    if draw(st.booleans()):
        g = g * torch.tensor(random.random(shape) > 0.3)  # no gradient there
    none = codec.Codes(None, None, None, None, None, None)
    initial = [None, None]
    if method.keeps_start:
        initial = list(codec.encode_integers(CodedFunctions, x + normal(1.0), 32767))
        initial[0] = initial[0].to(torch.int16)
    old = none._replace(
        offset=offset, root_scale=torch.zeros(1, 2, 1), initial=initial[0], initial_scale=initial[1]
    )
    coded = codec.encode_integers(CodedFunctions, offset, codec.LARGEST_OFFSET)
    return x, g, codec.encode(CodedFunctions, method, coded, root, old)


def stepped_in_float64(h, k, x, g, codes, method):
    """The rule on what the codes stand for: x, m and r after the step."""
    values = (None if v is None else v.double() for v in codec.decode(CodedFunctions, codes))
    return rule.step_from_root(TorchFunctions, method, h, k, x.double(), g.double(), *values)[:3]


def sizes(method, h, k, x, g, offset, root):
    """A bound on what is added up for x and m: float32's rounding is relative to it."""
    gradient = g.double().abs() + abs(h.weight_decay) * x.double().abs()
    moved = rule.step_weight(method, h.lr, k) * gradient
    bound = TorchFunctions.quotient(moved, root + h.eps)
    return x.double().abs() + offset.double().abs() + bound


@pytest.mark.parametrize("method", rule.RULES, ids=lambda method: method.name)
@given(data=st.data(), h=hypers, k=st.integers(0, 10_000), index=st.integers(0, 2**31 - 1))
@examples(200)
def test_a_step_is_within_a_code_of_the_exact_one(method, data, h, k, index):
    assume(h.momentum > 0.05 or not method.averages)
    x, g, codes = data.draw(states(method))
    step, place = (torch.tensor(number, dtype=torch.int32) for number in (k, index))
    bits = codec.random_bits(step, place + torch.arange(x.numel(), dtype=torch.int32))
    new_x, new, _ = codec.step(
        CodedFunctions, method, h, float(k), bits.view(x.shape), x, g, codes, "float32"
    )
    exact_x, exact_offset, exact_root = stepped_in_float64(h, float(k), x, g, codes, method)
    got = codec.decode(CodedFunctions, new)
    old = codec.decode(CodedFunctions, codes)
    away = 0 if old.initial is None else (old.initial - x).abs().double()
    size = sizes(method, h, k, x, g, old.offset, exact_root) + away
    rounding = 64 * 2.0**-24 * size
    code = new.offset_scale.double() * 1.001 + rounding
    assert ((got.offset.double() - exact_offset).abs() <= code).all()
    # x takes in this part of what rounding changes of z - x: if it is all, z is exact.
    part = codec.share(CodedFunctions, method, h.momentum)
    rounding = rounding * max(1.0, abs(part))
    assert ((new_x.double() - exact_x).abs() <= code * abs(part) + rounding).all()
    kept, exact = new_x.double() + part * got.offset.double(), exact_x + part * exact_offset
    assert ((kept - exact).abs() <= rounding).all()
    # A code is 1/64 of its binade, 1/32 without momentum. Smaller roots get the smallest code.
    smallest = new.root_scale.double() * 2.0**-7 * (1 + 1 / 32)
    limit = exact_root * (1 / (64 if h.momentum else 32) + 1e-5)
    off = (got.root.double() - exact_root).abs()
    assert ((off <= limit) | (exact_root < smallest)).all()
    assert ((got.root == 0) == (exact_root.float() == 0)).all()
    assert (
        got.root.double()[exact_root < smallest] <= smallest.expand_as(off)[exact_root < smallest]
    ).all()


@pytest.mark.parametrize("method", rule.RULES, ids=lambda method: method.name)
@pytest.mark.parametrize("varied", ["step", "index"])
def test_the_mean_over_many_draws_is_the_exact_number(method, varied):
    """Of z - x in units of a code, and of ∛ν relative to itself; 4,096 draws of 512 numbers."""
    draws, generator = 4096, torch.Generator().manual_seed(5)
    offset = torch.randn((1, 2, 256), generator=generator)
    root = torch.randn((1, 2, 256), generator=generator).abs() + 0.1
    old = codec.Codes(
        offset, None, None, torch.zeros(1, 2, 1), offset if method.keeps_start else None, None
    )
    numbers = torch.arange(512, dtype=torch.int32).view(1, 2, 256)
    sums = [torch.zeros(1, 2, 256, dtype=torch.float64) for _ in range(2)]
    for draw in range(draws):
        k, first = (draw, 0) if varied == "step" else (7, 512 * draw)
        bits = codec.random_bits(torch.tensor(k, dtype=torch.int32), numbers + first)
        dither = codec.dither(CodedFunctions, bits)
        coded = codec.encode_integers(CodedFunctions, offset, codec.LARGEST_OFFSET, dither)
        new = codec.encode(CodedFunctions, method, coded, root, old, bits)
        got = codec.decode(CodedFunctions, new._replace(initial=None))
        for total, value in zip(sums, (got.offset, got.root), strict=True):
            total += value.double()
    # A rounding has a standard deviation of at most half a code: 1/128 of one for the mean.
    # Of 512 means the farthest is about 3.5 of those away; 6 are allowed.
    unit = new.offset_scale.double()
    apart = [(sums[0] / draws - offset) / unit, (sums[1] / draws - root) / (root / 64)]
    for deviation in apart:
        assert deviation.abs().max() < 6 * 0.5 / draws**0.5
        # The mean over all numbers is a finer test: the 512 are independent.
        assert deviation.mean().abs() < 5 * 0.5 / (draws * 512) ** 0.5
