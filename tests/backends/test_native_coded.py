"""A step of the fused CPU backend on a state in codes, against the eager one."""

import cases
import pytest
import torch
from coded_batches import (
    DTYPES,
    GRAD_DTYPES,
    HYPERS,
    PLAIN,
    SHAPES,
    Differences,
    codes_of,
    copied,
    each_rule,
    fresh,
    middle,
    same,
    tensors_of,
    with_gradients,
)

from cubegrad import codec
from cubegrad.backends import eager
from cubegrad.backends.batch import Row
from cubegrad.functions import TorchFunctions
from cubegrad.rule import MADGRAD, RULES
from cubegrad.state import blocks

cpu = pytest.importorskip("cubegrad.backends.native.launch")

LEVELS = range(cpu.LEVEL + 1)
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: cpu.LEVELS[level])
each_hyper = pytest.mark.parametrize("h", HYPERS.values(), ids=HYPERS)


def compare(rule, h, dtype, grad_dtype):
    differences = Differences(rule, h.momentum)
    native = fresh(rule, h, dtype)
    for k in range(4):
        native = with_gradients(native, k, grad_dtype)
        reference = copied(native)
        cpu.step(native, h)
        eager.step(reference, h)
        differences.add(native, reference)
    differences.check()


@each_level
@each_rule
@each_hyper
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_level_of_instructions_follows_eager(monkeypatch, level, rule, h, dtype):
    if rule.averages and h.momentum == 0:
        pytest.skip("a mean of all z needs momentum")
    monkeypatch.setattr(cpu, "LEVEL", level)
    compare(rule, h, dtype, dtype)


@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
def test_gradients_of_any_dtype(rule, dtype, grad_dtype):
    compare(rule, PLAIN, dtype, grad_dtype)


@each_level
@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_new_root_nothing_differs(monkeypatch, level, rule, dtype):
    """Where lr or the gradient is 0 MADGRAD keeps its roots; the other rules take new ones.

    Of a level that rounds a product and a sum only once, x may differ in its last bit.
    """
    monkeypatch.setattr(cpu, "LEVEL", level)
    for h, factor in ((PLAIN._replace(lr=0.0), 1.0), (PLAIN._replace(shrink=0.5), 0.0)):
        native = middle(rule, h._replace(lr=0.01), dtype)
        for row in native.rows:
            row.grad.mul_(factor)
        reference = copied(native)
        cpu.step(native, h)
        eager.step(reference, h)
        differences = Differences(rule)
        differences.add(native, reference)
        differences.check()
        if level == 0:
            assert all(
                cases.same_bits(a.param, b.param)
                for a, b in zip(native.rows, reference.rows, strict=True)
            )
        if rule.never_falls:
            assert all(
                torch.equal(codes_of(native, a).root, codes_of(reference, b).root)
                for a, b in zip(native.rows, reference.rows, strict=True)
            )


@each_level
@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lr_0_moves_no_bit_of_a_fresh_parameter(monkeypatch, level, rule, dtype):
    monkeypatch.setattr(cpu, "LEVEL", level)
    batch = with_gradients(fresh(rule, PLAIN, dtype), 0, dtype)
    for row in batch.rows:
        row.param[1, :3] = -0.0
    with cases.no_change(*(row.param for row in batch.rows)):
        cpu.step(batch, PLAIN._replace(lr=0.0))


@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 12, 5, 7), (16, 300, 3, 3), (12, 30, 3, 4, 2)], ids=str)
def test_channels_last(rule, dtype, shape):
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d

    def place(tensor):
        return tensor.to(memory_format=form)

    plain = fresh(rule, PLAIN, dtype, (shape,))
    last = fresh(rule, PLAIN, dtype, (shape,), place)
    assert not last.rows[0].param.is_contiguous()
    for k in range(3):
        plain = with_gradients(plain, k, torch.float32)
        last = with_gradients(last, k, torch.float32, place)
        strides = last.rows[0].param.stride()
        cpu.step(plain, PLAIN)
        cpu.step(last, PLAIN)
        assert last.rows[0].param.stride() == strides
        assert same(plain, last)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(threads, dtype):
    start = middle(MADGRAD, PLAIN, dtype, shapes=(*SHAPES, (900, 700)))
    seen = []
    for number in (1, 2, 3, 7):
        threads(number)
        batch, sums = copied(start), torch.zeros(3, dtype=torch.float64)
        cpu.step(batch, PLAIN._replace(sums=sums))
        seen.append((batch, sums))
    for batch, sums in seen[1:]:
        assert same(batch, seen[0][0])
        assert torch.equal(sums, seen[0][1])


@each_level
@each_hyper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sums_for_an_estimated_rate(monkeypatch, level, h, dtype):
    monkeypatch.setattr(cpu, "LEVEL", level)
    native = middle(MADGRAD, h, dtype)
    reference, without = copied(native), copied(native)
    sums, expected = (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) for _ in range(2))
    size = torch.zeros(3, dtype=torch.float64)
    for row in native.rows:
        values = codec.decode(TorchFunctions, blocks.codes_in_blocks(codes_of(native, row)))
        away = values.away(TorchFunctions, blocks.split(row.param.float()))
        weight = h.lr * 4**0.5 / (1.0 if h.grad_scale is None else h.grad_scale.item())
        size[0] += (away * blocks.split(row.grad.float())).abs().sum() * weight
    cpu.step(native, h._replace(sums=sums))
    eager.step(reference, h._replace(sums=expected))
    size[1:] = expected[1:]  # of no sign
    assert ((sums - expected).abs() <= 2e-6 * size).all(), (sums - expected) / size
    cpu.step(without, h)
    assert same(native, without)


@each_level
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38], ids=str)  # 3e38² is infinite
def test_the_sums_leave_out_what_is_not_finite(monkeypatch, level, value):
    monkeypatch.setattr(cpu, "LEVEL", level)
    native = middle(MADGRAD, PLAIN, torch.float32, torch.float32)
    for row in native.rows:
        row.grad[5, 7] = value
    reference = copied(native)
    sums, expected = torch.zeros(2, 3, dtype=torch.float64)
    cpu.step(native, PLAIN._replace(sums=sums))
    eager.step(reference, PLAIN._replace(sums=expected))
    assert sums.isfinite().all()
    assert torch.allclose(sums[1:], expected[1:], rtol=1e-5)


@each_level
@each_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_gradient_that_is_not_finite_stays_in_its_coordinate(
    monkeypatch, level, rule, dtype, value
):
    monkeypatch.setattr(cpu, "LEVEL", level)
    native = middle(rule, PLAIN, dtype, dtype)
    for row in native.rows:
        row.grad[5, 7] = value
    differences = Differences(rule)
    for k in range(2):
        reference = copied(native)
        cpu.step(native, PLAIN)
        eager.step(reference, PLAIN)
        differences.add(native, reference)
        for row in native.rows:
            assert (~row.param.isfinite()).sum() == row.param[5, 7].numel()
            scales = codes_of(native, row)
            assert scales.root_scale.isfinite().all()
            assert scales.offset_scale.isfinite().all()
        native = with_gradients(native, 4 + k, dtype)
    differences.check()


def test_a_square_that_overflows_moves_as_eager_does():
    """The mirror form does not move then: its denominator is infinite."""
    for rule in RULES:
        native = middle(rule, PLAIN, torch.float32)
        for row in native.rows:
            row.grad[2, 3] = 1e30
        reference = copied(native)
        cpu.step(native, PLAIN)
        eager.step(reference, PLAIN)
        differences = Differences(rule)
        differences.add(native, reference)
        differences.check()


@each_level
@each_rule
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-20, 1e-12, 1e10])
def test_eps_0_gives_no_nan(monkeypatch, level, rule, size):
    """Subnormal sums among them, whose roots are normal numbers."""
    monkeypatch.setattr(cpu, "LEVEL", level)
    h = PLAIN._replace(eps=0.0)
    native = fresh(rule, h, torch.float32)
    differences = Differences(rule)
    for k in range(3):
        native = with_gradients(native, k, torch.float32)
        for row in native.rows:
            row.grad.mul_(size)
        reference = copied(native)
        cpu.step(native, h)
        eager.step(reference, h)
        assert all(tensor.isfinite().all() for tensor in tensors_of(native))
        for a, b in zip(native.rows, reference.rows, strict=True):
            one, two = codes_of(native, a), codes_of(reference, b)
            if size < 1e-15:
                differences.add_dual_points(a.param, one, b.param, two)
            assert torch.equal(one.root == 0, two.root == 0)
        if size > 1e-15:
            differences.add(native, reference)
    differences.check()


def test_a_scaled_step_and_one_that_is_skipped():
    native = middle(MADGRAD, PLAIN, torch.float32)
    plain = copied(native)
    for row in native.rows:
        row.grad.mul_(1024)
    scaled = PLAIN._replace(grad_scale=torch.tensor(1024.0), found_inf=torch.tensor(0.0))
    cpu.step(native, scaled)
    cpu.step(plain, PLAIN)
    assert same(native, plain)
    with cases.no_change(*(t for t in tensors_of(native) if t.is_floating_point())):
        cpu.step(native, scaled._replace(found_inf=torch.tensor(1.0)))


def odd(values):
    room = bytearray(values.nbytes + 1)
    view = torch.frombuffer(room, dtype=values.dtype, offset=1, count=values.numel())
    return view.view(values.shape).copy_(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_may_be_at_odd_addresses(dtype):
    plain = middle(MADGRAD, PLAIN, dtype)
    rows = [
        Row(*map(odd, row[:2]), row.step.clone(), tuple(map(odd, row.buffers)), row.first_index)
        for row in plain.rows
    ]
    assert rows[0].param.data_ptr() % 2
    moved = plain._replace(rows=rows)
    cpu.step(plain, PLAIN)
    cpu.step(moved, PLAIN)
    assert same(plain, moved)


@cases.each_class
def test_a_step_repeats_itself(cls):
    """The optimizer keeps the launch, and its steps are those of single launches."""
    params = [torch.nn.Parameter(cases.randn((70, 300), torch.float32, 0)) for _ in range(2)]
    repeated, alone = (cls([param], lr=0.01, compact=True, fused=True) for param in params)
    for k in range(4):
        grad = cases.randn((70, 300), torch.float32, k + 1)
        for param in params:
            param.grad = grad.clone()
        repeated.step()
        alone.load_state_dict(alone.state_dict())  # its tensors are new, so it looks them up
        alone.step()
    assert torch.equal(*params)
    for name, tensor in repeated.state[params[0]].items():
        assert torch.equal(tensor, alone.state[params[1]][name])
