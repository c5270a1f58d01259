"""stochastic_rounding=True: weights of half precision make the moves that rounding would lose."""

import copy
import math

import cases
import pytest
import torch
from cases import MADGRAD, NATIVE, each_backend, each_class, each_fast_backend, each_method
from short_runs import advance, cloned, held_walk, parameters, same_bits, set_grads
from torch import nn

import cubegrad

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
each_momentum = pytest.mark.parametrize("momentum", [0.9, 0.0])
AT_RANDOM = {"stochastic_rounding": True}
# Of one dimension, of several, of none, without elements, and longer than a chunk or a slice.
SHAPES = [(37,), (8, 6, 3, 5), (), (0, 3), (5, 3000)]
STEPS = 40
# A number with the same distance to both neighbours, and that distance.
START = {torch.bfloat16: (384.0, 2.0), torch.float16: (768.0, 0.5)}
# By which z goes about four times that distance in STEPS steps.
LR = {
    (cubegrad.MADGRAD, torch.bfloat16): 0.135,
    (cubegrad.MADGRAD, torch.float16): 0.0168,
    (cubegrad.MirrorMADGRAD, torch.bfloat16): 0.175,
    (cubegrad.MirrorMADGRAD, torch.float16): 0.044,
    (cubegrad.MADGRADW, torch.bfloat16): 0.2,
    (cubegrad.MADGRADW, torch.float16): 0.05,
}


def advance_by_ones(optimizer, *params):
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()


@each_half
@each_class
@each_fast_backend
def test_small_moves_stall_to_nearest_and_are_made_on_average_at_random(backend, cls, dtype):
    """x goes a tenth of the way to z in each step, which is less than half its last place.

    Rounded at random, the mean of a step is exact and x depends on the last one linearly, so the
    mean of x is that of float32. A step adds a variance of at most unit²/4, of which the next keeps
    0.9²: in the end it is at most unit² / 4 / (1 - 0.81) = 1.32 unit². Of the five standard
    deviations of the mean that are allowed, the largest error measured was a quarter of one.
    """
    start, unit = START[dtype]
    values = torch.full((64, 1024), start, dtype=dtype)
    nearest, at_random = (cases.parameter(values.clone(), backend.device) for _ in range(2))
    exact = nn.Parameter(torch.tensor([start]))
    lr = LR[cls, dtype]
    options = {"lr": lr, "weight_decay": 0.0}
    advance_by_ones(cls([nearest], **options, **backend.flags), nearest)
    advance_by_ones(cls([at_random], **options, **AT_RANDOM, **backend.flags), at_random)
    advance_by_ones(cls([exact], **options), exact)
    way = start - exact.item()
    if cls._rule.holds:  # not linear
        walk = held_walk(STEPS, lr, unit)
        assert way < walk < way + unit
        way = walk
    assert way > unit
    assert (nearest == start).all()
    moved = start - at_random.detach().double()
    assert abs(moved.mean().item() - way) < 5 * math.sqrt(1.32 / moved.numel()) * unit
    assert moved.var() < 1.32 * unit**2


@each_half
@each_class
@each_fast_backend
def test_without_momentum_x_is_z_rounded_at_random(backend, cls, dtype):
    start, unit = START[dtype]
    param = cases.parameter(torch.full((64, 1024), start, dtype=dtype), backend.device)
    exact = nn.Parameter(torch.tensor([start]))
    options = {"lr": LR[cls, dtype], "momentum": 0.0, "weight_decay": 0.0}
    advance_by_ones(cls([param], **options, **AT_RANDOM, **backend.flags), param)
    advance_by_ones(cls([exact], **options), exact)
    moved = start - param.detach().double()
    way = start - exact.item()
    assert (abs(moved - way) < unit).all()
    assert abs(moved.mean().item() - way) < 5 * math.sqrt(0.25 / moved.numel()) * unit


@each_momentum
@each_half
@each_method
@cases.each_backend_of_a_long_test
def test_every_backend_and_memory_layout_draws_the_same_bits(backend, method, dtype, momentum):
    """Weights that differ in float32's last place are rounded apart in at most 1 of 1,000 cases."""
    kinds = (
        [(8, 6, 3, 5), cases.channels_last],
        [(65, 33), cases.transposed],
        [(4, 6), cases.gapped],
    )
    runs = []
    for own, change in ((cases.EAGER, False), (backend, False), (backend, True)):
        layouts = [(shape, torch.clone) for shape in SHAPES]
        layouts += [(shape, place if change else torch.clone) for shape, place in kinds]
        device = backend.device if own is backend else "cpu"
        params = [
            cases.parameter(place(cases.randn(shape, dtype, i)), device)
            for i, (shape, place) in enumerate(layouts)
        ]
        optimizer = cases.build(method, own, params, AT_RANDOM | {"momentum": momentum})
        advance(optimizer, params, range(3))
        runs.append([param.detach().cpu() for param in params])
    eager, plain, placed = runs
    assert sum(int((a != b).sum()) for a, b in zip(eager, plain, strict=True)) <= 16
    assert all(torch.equal(a, b) for a, b in zip(plain, placed, strict=True))


@each_class
@each_fast_backend
def test_nothing_changes_for_single_and_double_precision(backend, cls):
    for dtype in (torch.float32, torch.float64, torch.complex64):
        runs = []
        for flag in (False, True):
            params = parameters(SHAPES, dtype, backend.device)
            optimizer = cls(params, stochastic_rounding=flag, **backend.flags)
            advance(optimizer, params, range(4))
            runs.append(params)
        assert same_bits(*runs)


@each_half
@each_method
@each_backend
def test_a_step_at_lr_0_moves_no_bit(backend, method, dtype):
    """At the start; without momentum also later."""
    for momentum, steps in ((0.9, 0), (0.0, 0), (0.0, 3)):
        params = parameters([(40, 30), (37,)], dtype, backend.device)
        params[1].data[:2] = torch.tensor([0.0, -0.0])
        params[1].data[2] = 2.0**-20  # subnormal in float16
        optimizer = cases.build(method, backend, params, AT_RANDOM | {"momentum": momentum})
        advance(optimizer, params, range(steps))
        optimizer.param_groups[0]["lr"] = 0.0
        with cases.no_change(*params):
            advance(optimizer, params, range(steps, steps + 3))


@each_momentum
@each_half
@each_class
@each_fast_backend
def test_a_resumed_run_equals_the_unbroken_one(backend, cls, dtype, momentum, tmp_path):
    options = AT_RANDOM | {"momentum": momentum} | backend.flags
    params = parameters(SHAPES, dtype, backend.device)
    optimizer = cls(params, **options)
    advance(optimizer, params, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    others = cloned(params)
    other = cls(others, **options)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    pickled = copy.deepcopy(optimizer)
    copies = pickled.param_groups[0]["params"]
    for some, own in ((optimizer, params), (other, others), (pickled, copies)):
        advance(some, own, range(3, 6))
    assert same_bits(params, others)
    assert same_bits(params, copies)


def test_the_option_is_what_the_optimizer_was_built_with():
    params = parameters([(8, 8)], torch.bfloat16)
    plain = cubegrad.MADGRAD(params)
    advance(plain, params, range(2))
    saved = plain.state_dict()
    optimizer = cubegrad.MADGRAD(params, **AT_RANDOM)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["stochastic_rounding"]
    plain.load_state_dict(saved)
    assert not plain.param_groups[0]["stochastic_rounding"]


@each_class
@each_fast_backend
def test_switched_in_the_middle_of_a_run(backend, cls):
    """A fused step that repeats its last launch notices it."""
    runs = []
    for flags in ((False, False), (False, True), (True, True)):
        params = parameters([(64, 64)], torch.bfloat16, backend.device)
        optimizer = cls(params, stochastic_rounding=flags[0], **backend.flags)
        advance(optimizer, params, range(3))
        optimizer.param_groups[0]["stochastic_rounding"] = flags[1]
        advance(optimizer, params, range(3, 6))
        runs.append(params)
    assert not same_bits(runs[0], runs[1])
    assert not same_bits(runs[1], runs[2])


@each_class
@each_fast_backend
def test_compact_implies_it_for_parameters_with_sums(backend, cls):
    runs = []
    for options in ({"compact": True}, {"compact": True, **AT_RANDOM}, AT_RANDOM):
        params = parameters([(40, 30), (37,)], torch.bfloat16, backend.device)
        optimizer = cls(params, **options, **backend.flags)
        advance(optimizer, params, range(5))
        assert "root_code" not in optimizer.state[params[0]]
        runs.append(params)
    assert same_bits(runs[0], runs[1])
    assert same_bits(runs[0], runs[2])


def test_groups_have_a_flag_of_their_own():
    params, twins = (parameters([(40, 30)] * 2, torch.bfloat16) for _ in range(2))
    mixed = cubegrad.MADGRAD([{"params": params[0], **AT_RANDOM}, {"params": params[1]}])
    apart = [cubegrad.MADGRAD([twins[0]], **AT_RANDOM), cubegrad.MADGRAD([twins[1]])]
    for k in range(4):
        set_grads(params, k)
        set_grads(twins, k)
        for optimizer in (mixed, *apart):
            optimizer.step()
    assert same_bits(params, twins)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@each_half
@each_fast_backend
def test_sparse_gradients_are_stepped_as_dense_ones(backend, dtype):
    sparse, dense = (parameters([(12, 3)], dtype, backend.device)[0] for _ in range(2))
    options = AT_RANDOM | {"momentum": 0.0}
    optimizers = [cases.build(MADGRAD, backend, [param], options) for param in (sparse, dense)]
    for k in range(6):
        grad = torch.zeros(12, 3, dtype=dtype, device=backend.device)
        grad[[k % 12, 11]] = cases.randn((2, 3), dtype, k).to(backend.device)
        sparse.grad, dense.grad = grad.to_sparse(1), grad
        for optimizer in optimizers:
            optimizer.step()
    assert same_bits([sparse], [dense])


@pytest.mark.parametrize("number", ["lr", "momentum"])
@each_half
@each_backend
def test_a_scalar_beside_a_number_of_float64(backend, dtype, number):
    """Alone among tensors, one without dimensions takes the dtype of a number that it meets."""
    options = {"lr": 0.5, "momentum": 0.5} | AT_RANDOM
    params = [cases.parameter(torch.full((), 1.5, dtype=dtype), backend.device) for _ in range(2)]
    value = torch.tensor(options[number], dtype=torch.float64, device=backend.device)
    for param, own in zip(params, (options, options | {number: value}), strict=True):
        optimizer = cases.build(MADGRAD, backend, [param], own)
        for k in range(4):
            param.grad = torch.full_like(param, k + 1)
            optimizer.step()
        assert {tensor.dtype for tensor in optimizer.state[param].values()} == {torch.float32}
    assert params[0].item() != 1.5
    assert same_bits(params[:1], params[1:])


def test_rounding_has_no_derivative():
    with pytest.raises(ValueError, match="rounding at random has no derivative; leave stochastic"):
        cubegrad.MADGRAD(parameters([(3,)]), differentiable=True, **AT_RANDOM)


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore::DeprecationWarning")
@pytest.mark.parametrize("momentum", [0.9, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_a_traced_step_draws_the_same_bits(momentum):
    torch._dynamo.reset()
    shapes = [(40, 30), (37,)]
    params, twins = parameters(shapes, torch.bfloat16), parameters(shapes, torch.bfloat16)
    options = {"lr": torch.tensor(0.05), "momentum": momentum} | AT_RANDOM
    traced, plain = (cubegrad.MADGRAD(some, **copy.deepcopy(options)) for some in (params, twins))
    step = torch.compile(traced.step, fullgraph=True)
    for k in range(4):
        set_grads(params, k)
        set_grads(twins, k)
        step()
        plain.step()
    apart = sum(int((p != q).sum()) for p, q in zip(params, twins, strict=True))
    assert apart <= 4  # a fused multiply-add changes float32's last place


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@each_half
def test_a_bad_gradient_stays_in_its_coordinate(dtype, bad):
    params, twins = parameters([(40, 30)], dtype), parameters([(40, 30)], dtype)
    for some, value in ((params, 0.0), (twins, bad)):
        optimizer = cases.build(MADGRAD, NATIVE, some, AT_RANDOM)
        for k in range(3):
            set_grads(some, k)
            some[0].grad[3, 7] = value
            optimizer.step()
    others = torch.ones(40, 30, dtype=torch.bool)
    others[3, 7] = False
    assert torch.equal(params[0][others], twins[0][others])
    assert not twins[0][3, 7].isfinite()


@each_fast_backend
def test_an_estimated_rate(backend):
    """The sums are taken from z, whose numbers rounding does not touch."""
    rates = []
    for own in (cases.EAGER, backend):
        params = parameters([(40, 30), (37,)], torch.bfloat16, own.device)
        optimizer = cases.build(MADGRAD, own, params, AT_RANDOM | {"lr": "auto"})
        advance(optimizer, params, range(6))
        rates.append(optimizer.estimated_lr())
    assert rates[0] > 0
    assert rates[1] == pytest.approx(rates[0], rel=1e-3)
