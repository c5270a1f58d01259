"""The sums that a fused CPU step also computes, for an estimated learning rate."""

from array import array

import cases
import numpy as np
import oracle
import pytest
import torch

from cubegrad import distance
from cubegrad.backends.batch import Batch, Row
from cubegrad.backends.native import tensors
from cubegrad.options import Hyper
from cubegrad.rule import MADGRAD, MADGRADW_AUTO, MIRROR_MADGRAD, SCHEDULE_FREE_AUTO
from cubegrad.state import layout

cpu = pytest.importorskip("cubegrad.backends.native.launch")

LEVELS = range(cpu.LEVEL + 1)
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: cpu.LEVELS[level])
# Around the sizes at which a row is cut into strips, chunks and folds, and a step into pieces.
SIZES = (0, 1, 15, 16, 17, 127, 128, 129, 1023, 1024, 1025, 16383, 16385, 70_001)
PLAIN = Hyper(0.01, 0.9, 1e-6, weight_decay=0.0, shrink=None, maximize=False, mean_share=0.2)
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
RULES = (
    MADGRAD,
    MADGRADW_AUTO,
    pytest.param(SCHEDULE_FREE_AUTO, marks=pytest.mark.thorough),
)
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
each_hyper = pytest.mark.parametrize("h", HYPERS.values(), ids=HYPERS)
DTYPES = {  # of parameter, gradient and state
    "float32": (torch.float32, torch.float32, torch.float32),
    "float64": (torch.float64, torch.float64, torch.float64),
    "bfloat16": (torch.bfloat16, torch.bfloat16, torch.float32),
    "float16-float32": (torch.float16, torch.float32, torch.float32),
}


def batch(h, dtypes=DTYPES["float32"], sizes=SIZES, rule=MADGRAD):
    """Parameters in the middle of a run."""
    if rule.averages and not h.momentum:
        pytest.skip("schedule_free=True needs momentum")
    param, grad, state = dtypes

    def randn(seed, dtype):
        return [cases.randn((n,), dtype, n + seed) for n in sizes]

    params, grads = randn(0, param), randn(1, grad)
    for tensor in grads:
        tensor[::7] = -0.0
    squares = [abs(tensor) for tensor in randn(3, state)]
    for tensor in squares:
        tensor[::5] = 0.0
    steps = [torch.tensor(3.0 + k) for k in range(len(sizes))]
    known = {"grad_sq_sum": squares}
    known |= {name: randn(2, state) for name in ("grad_sum", "dual_offset")}
    known["initial_param"] = randn(4, state)
    used = layout.LAYOUTS[rule.name][0 if h.momentum else -1]
    buffers = zip(*(known[name] for name in used.buffers), strict=True)
    return Batch(used, list(map(Row, params, grads, steps, buffers)))


class Float64Functions:
    """The rule's functions in float64."""

    cbrt, sqrt, quotient, total = np.cbrt, np.sqrt, staticmethod(oracle.quotient), np.sum
    smaller = np.minimum

    @staticmethod
    def where_finite(x, v):
        return np.where(np.isfinite(x), v, 0.0)


class AbsoluteSums(Float64Functions):
    """The same, but sums are of absolute values: what rounding errors are relative to."""

    @staticmethod
    def total(v):
        return np.abs(v).sum()


def step_sums(h, batch):
    """The sums of a step over the batch."""
    sums = torch.zeros(3, dtype=torch.float64)
    cpu.step(batch, h._replace(sums=sums))
    return sums


def copied(batch):
    rows = [
        Row(*(t.clone() for t in row[:3]), tuple(t.clone() for t in row[3])) for row in batch.rows
    ]
    return batch._replace(rows=rows)


def tensors_of(batch):
    return [tensor for row in batch.rows for tensor in (*row[:3], *row.buffers)]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@each_level
@each_hyper
@each_rule
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_sums_are_those_of_the_rule(monkeypatch, threads, level, h, rule, dtypes):
    monkeypatch.setattr(cpu, "LEVEL", level)
    threads(2)
    after = batch(h, dtypes, rule=rule)
    before = copied(after)
    sums = step_sums(h, after).numpy()
    expected, sizes = np.zeros(3), np.zeros(3)
    scale = 1.0 if h.grad_scale is None else h.grad_scale.item()
    for old_row, new_row in zip(before.rows, after.rows, strict=True):
        x, g, k = map(cases.numbers, old_row[:3])
        old, new = (
            dict(zip(after.layout.buffers, map(cases.numbers, row.buffers), strict=True))
            for row in (old_row, new_row)
        )
        inputs = (rule, h, k, x, g / scale, old, cases.numbers(new_row.param), new)
        expected += distance.step_sums(Float64Functions, *inputs)
        sizes += distance.step_sums(AbsoluteSums, *inputs)
    rounding = 3e-15 if dtypes[2] == torch.float64 else 5e-7
    assert (np.abs(sums - expected) <= rounding * sizes).all(), (sums - expected) / sizes


@each_level
@each_hyper
@each_rule
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_the_step_is_the_same_to_the_bit_with_sums(monkeypatch, level, h, rule, dtypes):
    monkeypatch.setattr(cpu, "LEVEL", level)
    with_sums = batch(h, dtypes, rule=rule)
    without = copied(with_sums)
    for _ in range(2):
        step_sums(h, with_sums)
        cpu.step(without, h)
    assert all(map(cases.same_bits, tensors_of(with_sums), tensors_of(without)))


@each_level
@pytest.mark.parametrize("h", [PLAIN, HYPERS["no-momentum"], HYPERS["shrink"]])
@each_rule
@pytest.mark.parametrize("dtypes", [DTYPES["float32"], DTYPES["float64"]], ids=["single", "double"])
def test_a_coordinate_that_is_not_finite_is_as_if_it_were_not_there(
    monkeypatch, level, h, rule, dtypes
):
    """Whatever is not finite, and in whatever part of a chunk or after the last whole vector."""
    monkeypatch.setattr(cpu, "LEVEL", level)
    spoilt = batch(h, dtypes, (2_085,), rule)
    squares = spoilt.layout.buffers.index("grad_sq_sum")
    without = copied(spoilt)
    largest = torch.finfo(dtypes[1]).max  # whose square is infinite
    for place, value in ((3, torch.inf), (300, torch.nan), (1_100, largest), (2_084, -torch.inf)):
        spoilt.rows[0].grad[place] = value
        spoilt.rows[0].buffers[squares][place - 1] = torch.inf
        for tensor in (without.rows[0].grad, *without.rows[0].buffers[:2]):
            tensor[place - 1 : place + 1] = 0.0
        if rule.anchored:  # then nothing has pushed this coordinate, nor moved it
            for tensor in (without.rows[0].param, without.rows[0].buffers[2]):
                tensor[place - 1 : place + 1] = 0.0
    sums, expected = step_sums(h, spoilt), step_sums(h, without)
    rounding = 1e-14 if dtypes[2] == torch.float64 else 1e-6
    assert torch.allclose(sums, expected, rtol=rounding), (sums, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [SIZES, (40_000,), (1_200_000, 3, 70_001)], ids=str)
def test_the_same_sums_at_every_call_with_any_number_of_threads(threads, sizes):
    """Whichever thread takes a piece, and in whatever order."""
    parameters = batch(PLAIN, sizes=sizes)
    seen = set()
    for number in (*(2,) * 20, 1, 3, 7):
        threads(number)
        seen.add(step_sums(PLAIN, copied(parameters)).numpy().tobytes())
    assert len(seen) == 1


def test_sums_are_added_to_the_previous_ones():
    parameters = batch(PLAIN)
    alone = step_sums(PLAIN, copied(parameters))
    sums = torch.tensor([1e3, 2e3, 3e3], dtype=torch.float64)
    expected = sums + alone
    cpu.step(parameters, PLAIN._replace(sums=sums))
    torch.testing.assert_close(sums, expected, rtol=1e-14, atol=0)


def test_a_skipped_step_adds_nothing():
    h = PLAIN._replace(found_inf=torch.tensor(1.0), grad_scale=torch.tensor(2.0))
    assert step_sums(h, batch(h)).tolist() == [0, 0, 0]


def test_a_tensor_without_elements_adds_nothing():
    parameters = batch(PLAIN, sizes=(0,))
    assert step_sums(PLAIN, parameters).tolist() == [0, 0, 0]
    assert parameters.rows[0].step == 4


@pytest.mark.parametrize(
    "sums",
    [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)[::2]],
    ids=["float32", "two", "gaps"],
)
def test_a_tensor_that_cannot_hold_the_sums_is_refused(sums):
    parameters = batch(PLAIN)
    with (
        cases.no_change(*tensors_of(parameters), sums),
        pytest.raises(ValueError, match=r"three dense float64.*zeros\(3"),
    ):
        cpu.step(parameters, PLAIN._replace(sums=sums))


def test_the_mirror_form_has_no_sums():
    h = PLAIN._replace(sums=torch.zeros(3, dtype=torch.float64))
    rows = [row._replace(buffers=row.buffers[1:]) for row in batch(h).rows]
    mirror = Batch(layout.full(MIRROR_MADGRAD), rows)
    with cases.no_change(*tensors_of(mirror)), pytest.raises(ValueError, match="do not fit"):
        cpu.step(mirror, h)


def test_without_memory_nothing_changes():
    """More pieces than can be allocated: nothing may be read or written before that is noticed."""
    count, sums = torch.zeros(()), torch.zeros(3, dtype=torch.float64)
    row = array("q", [0, 0, 0, 0, count.data_ptr(), 2**61, 0, 0, 1]).tobytes()
    starts, grads = array("q", [0, 2**61]).tobytes(), array("q", [0]).tobytes()
    kinds = (0, *[cpu.KINDS[torch.float32]] * 3)
    with cases.no_change(count, sums), pytest.raises(MemoryError):
        tensors.native.step(
            row,
            starts,
            grads,
            cpu.NUMBERS(0.1, 0.9, 1, 1e-6, 0, 1, 0),
            *kinds,
            False,
            cpu.LEVEL,
            1,
            sums.data_ptr(),
        )
