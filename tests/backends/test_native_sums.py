"""The sums that the fused CPU step computes on its way, for an estimated learning rate."""

from array import array

import cases
import numpy as np
import oracle
import pytest
import torch

from cubegrad import distance
from cubegrad.backends.native import tensors as look
from cubegrad.options import Hyper

cpu = pytest.importorskip("cubegrad.backends.native.launch")

LEVELS = range(cpu.LEVEL + 1)
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: cpu.LEVELS[level])
# Around the strips, chunks and folds of a row, and the pieces of a step.
SIZES = (0, 1, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 16383, 16385, 70_001)
PLAIN = Hyper(lr=0.01, momentum=0.9, eps=1e-6, weight_decay=0.0, shrink=None, maximize=False)
HYPERS = {
    "plain": PLAIN,
    "no-momentum": PLAIN._replace(momentum=0.0),
    "eps0-no-momentum": PLAIN._replace(momentum=0.0, eps=0.0),
    "l2-maximize": PLAIN._replace(weight_decay=0.1, maximize=True),
    "shrink": PLAIN._replace(shrink=0.5),
    "shrink-no-momentum": PLAIN._replace(shrink=0.5, momentum=0.0, maximize=True),
    "scaled": PLAIN._replace(
        grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0), weight_decay=0.1
    ),
}
each_hyper = pytest.mark.parametrize("h", HYPERS.values(), ids=HYPERS)
DTYPES = {  # of parameter, gradient and state
    "float32": (torch.float32, torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.float32),
    "float16-float32": (torch.float16, torch.float32, torch.float32),
}


def group(h, dtypes=DTYPES["float32"], sizes=SIZES):
    """Parameters, gradients, step counts and buffers, in the middle of a run."""
    param, grad, state = dtypes

    def randn(seed, dtype):
        return [cases.randn((n,), dtype, n + seed) for n in sizes]

    params, grads, grad_sums = randn(0, param), randn(1, grad), randn(2, state)
    for tensor in grads:
        tensor[::7] = -0.0
    squares = [abs(tensor) for tensor in randn(3, state)]
    for tensor in squares:
        tensor[::5] = 0.0
    steps = [torch.tensor(3.0 + k) for k in range(len(sizes))]
    centre = [randn(4, state)] if h.momentum else []
    return params, grads, steps, [grad_sums, squares, *centre]


class Wide:
    """The rule's functions in float64."""

    cbrt, quotient, total = np.cbrt, staticmethod(oracle.quotient), np.sum

    @staticmethod
    def where_finite(x, v):
        return np.where(np.isfinite(x), v, 0.0)


class Sizes(Wide):
    """The same, but sums are of absolute values: what rounding errors are relative to."""

    @staticmethod
    def total(v):
        return np.abs(v).sum()


def numbers(columns):
    return [[cases.numbers(t) for t in column] for column in columns]


def stepped(h, members):
    """The sums that a step adds to nothing; the members are stepped."""
    sums = torch.zeros(3, dtype=torch.float64)
    cpu.step("madgrad", h._replace(sums=sums), *members)
    return sums


def copied(members):
    params, grads, steps, *buffers = [[t.clone() for t in column] for column in flat(members)]
    return params, grads, steps, buffers


def flat(members):
    return *members[:3], *members[3]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@each_level
@each_hyper
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_sums_are_those_of_the_rule(monkeypatch, threads, level, h, dtypes):
    monkeypatch.setattr(cpu, "LEVEL", level)
    threads(2)
    members = group(h, dtypes)
    params, grads, steps, *old = numbers(flat(members))
    found = stepped(h, members).numpy()
    new = numbers(members[3])
    expected, sizes = np.zeros(3), np.zeros(3)
    scale = 1.0 if h.grad_scale is None else h.grad_scale.item()
    for i, k in enumerate(steps):
        before, after = (tuple(column[i] for column in columns) for columns in (old, new))
        inputs = (h, k, params[i], grads[i] / scale, before[:2], after[:2], *before[2:])
        expected += distance.step_sums(Wide, *inputs)
        sizes += distance.step_sums(Sizes, *inputs)
    rounding = 3e-15 if dtypes[2] == torch.float64 else 5e-7
    assert (np.abs(found - expected) <= rounding * sizes).all(), (found - expected) / sizes


@each_level
@each_hyper
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_step_is_the_same_to_the_bit_with_sums(monkeypatch, level, h, dtypes):
    monkeypatch.setattr(cpu, "LEVEL", level)
    with_sums = group(h, dtypes)
    without = copied(with_sums)
    for _ in range(2):
        stepped(h, with_sums)
        cpu.step("madgrad", h, *without)
    for mine, other in zip(flat(with_sums), flat(without), strict=True):
        assert all(map(cases.same_bits, mine, other))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [SIZES, (40_000,), (1_200_000, 3, 70_001)], ids=str)
def test_the_same_sums_at_every_call_with_any_number_of_threads(threads, sizes):
    """Whoever takes a piece, and in whatever order."""
    members = group(PLAIN, sizes=sizes)
    seen = set()
    for number in (*(2,) * 20, 1, 3, 7):
        threads(number)
        seen.add(stepped(PLAIN, copied(members)).numpy().tobytes())
    assert len(seen) == 1


def test_sums_are_added_to_what_is_there():
    members = group(PLAIN)
    alone = stepped(PLAIN, copied(members))
    sums = torch.tensor([1e3, 2e3, 3e3], dtype=torch.float64)
    expected = sums + alone
    cpu.step("madgrad", PLAIN._replace(sums=sums), *members)
    torch.testing.assert_close(sums, expected, rtol=1e-14, atol=0)


def test_a_skipped_step_adds_nothing():
    h = PLAIN._replace(found_inf=torch.tensor(1.0), grad_scale=torch.tensor(2.0))
    assert stepped(h, group(h)).tolist() == [0, 0, 0]


def test_a_tensor_without_elements_adds_nothing():
    members = group(PLAIN, sizes=(0,))
    assert stepped(PLAIN, members).tolist() == [0, 0, 0]
    assert members[2][0] == 4


@pytest.mark.parametrize(
    "sums",
    [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)[::2]],
    ids=["float32", "two", "gaps"],
)
def test_a_place_that_does_not_fit_is_refused(sums):
    members = group(PLAIN)
    with (
        cases.no_change(*members[0], *members[2], sums),
        pytest.raises(ValueError, match=r"three dense float64.*zeros\(3"),
    ):
        cpu.step("madgrad", PLAIN._replace(sums=sums), *members)


def test_the_mirror_form_has_no_sums():
    h = PLAIN._replace(sums=torch.zeros(3, dtype=torch.float64))
    params, grads, steps, buffers = group(h)
    with cases.no_change(*params, *steps), pytest.raises(ValueError, match="do not fit"):
        cpu.step("mirror_madgrad", h, params, grads, steps, buffers[1:])


def test_without_memory_nothing_changes():
    """More pieces than there are addresses: nothing may be read or written before that is seen."""
    count, sums = torch.zeros(()), torch.zeros(3, dtype=torch.float64)
    row = array("q", [0, 0, 0, 0, count.data_ptr(), 2**61]).tobytes()
    starts, grads = array("q", [0, 2**61]).tobytes(), array("q", [0]).tobytes()
    kinds = (cpu.METHODS["madgrad"], *[cpu.KINDS[torch.float32]] * 3)
    with cases.no_change(count, sums), pytest.raises(MemoryError):
        look.native.step(
            row,
            starts,
            grads,
            cpu.NUMBERS(0.1, 0.9, 1, 1e-6, 0, 1),
            *kinds,
            cpu.LEVEL,
            1,
            sums.data_ptr(),
        )
