"""compact=True: what it allocates, and what must hold exactly although the state is rounded."""

import cases
import pytest
import torch
from cases import each_class, each_fast_backend
from compact_runs import SHAPES, build, held_layouts, noisy_grads, state_bytes, state_tensors
from short_runs import advance, parameters, peak_of, through_a_file

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD
from cubegrad.state import blocks, conversion, layout

LIMITS = {(MADGRAD, 0.9): 4.2, (MADGRAD, 0.0): 3.2, (MirrorMADGRAD, 0.9): 2.2}
LIMITS |= {(MADGRADW, 0.9): 2.2, (MADGRADW, 0.0): 1.2}
each_limit = pytest.mark.parametrize(
    ("cls", "momentum"), LIMITS, ids=lambda value: getattr(value, "__name__", value)
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@each_limit
@each_dtype
@each_fast_backend
def test_state_bytes_are_within_the_limit(backend, dtype, cls, momentum):
    shapes = [(64, 64), (64, 65), (16, 257), (2, 2048), (8, 8, 8, 8), (1, 4096)]
    params = parameters(shapes, dtype, backend.device)
    optimizer = advance(build(cls, params, backend, momentum=momentum), params, range(2))
    again = build(cls, params, backend)
    again.load_state_dict(through_a_file(optimizer.state_dict()))
    for param in params:
        for one in (optimizer, again):
            assert state_bytes(one, param) <= LIMITS[cls, momentum]
    optimizer.param_groups[0]["momentum"] = 0.9 - momentum
    advance(optimizer, params, range(2))
    other = min(LIMITS.get((cls, 0.9 - momentum), 2.2), 4.2)
    assert max(state_bytes(optimizer, param) for param in params) <= other


@each_limit
@each_dtype
def test_state_bytes_after_a_change_of_form(dtype, cls, momentum):
    params = parameters([(64, 64), (16, 300)], dtype)
    optimizer = build(cls, params, compact=False, momentum=momentum)
    advance(optimizer, params, range(2))
    optimizer.param_groups[0]["compact"] = True
    advance(optimizer, params, range(1))
    assert max(state_bytes(optimizer, param) for param in params) <= LIMITS[cls, momentum]


@pytest.mark.parametrize(
    ("shape", "dtype", "coded"),
    [
        ((64, 64), torch.float32, True),
        ((64, 63), torch.float32, False),
        ((1000, 63), torch.float32, False),
        ((4096,), torch.float32, False),
        ((), torch.float32, False),
        ((0, 5000), torch.float32, False),
        ((64, 64), torch.float64, False),
        ((64, 64), torch.complex128, False),
        ((64, 64), torch.complex64, True),
        ((64, 64), torch.float16, True),
    ],
)
@each_class
def test_which_parameters_keep_codes(cls, shape, dtype, coded):
    params = parameters([shape], dtype)
    optimizer = advance(build(cls, params), params, range(1))
    assert held_layouts(optimizer)[0].is_coded == coded
    if not coded:
        plain = advance(
            build(cls, others := parameters([shape], dtype), compact=False), others, [0]
        )
        assert set(optimizer.state[params[0]]) == set(plain.state[others[0]])


# torch 2.11's profiler warns so once in each process.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@each_class
@pytest.mark.parametrize("form", ["fresh", "encoded", "decoded", "stepped"])
def test_temporaries_are_those_of_a_few_rows(cls, form, monkeypatch):
    """Beyond what is kept, far less than the parameter."""
    monkeypatch.setattr(blocks, "PIECE", 2**10)
    (param,) = parameters([(512, 256)])
    optimizer = build(cls, [param], compact=form == "decoded")
    advance(optimizer, [param], range(1))
    entries = optimizer.state[param]
    sums, codes = (layout.full(cls._rule, coded) for coded in (False, True))
    kept = {
        "fresh": lambda: codes.fresh(param, count_on_device=False),
        "encoded": lambda: conversion.convert(param, entries, codes, 1e-6),
        "decoded": lambda: conversion.convert(param, entries, sums, 1e-6),
        "stepped": optimizer.step,
    }
    if form == "stepped":
        optimizer.param_groups[0]["compact"] = True
        optimizer.step()
        new = 0
    else:
        named = (sums if form == "decoded" else codes).forms(param)
        new = sum(shape.numel() * dtype.itemsize for shape, dtype in named)
    assert peak_of(kept[form]) <= new + 0.2 * param.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("decay", ["weight_decay", "decoupled_weight_decay", "decoupled_lr"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_fast_backend
def test_lr_zero_moves_no_bit(backend, momentum, decay, dtype):
    """At first; and later too without momentum, where x is z."""
    params = parameters(SHAPES, dtype, backend.device)
    options = {"weight_decay": 0.1, decay: 0.1 if decay == "weight_decay" else True}
    optimizer = build(MADGRAD, params, backend, momentum=momentum, lr=0.1, **options)

    def steps_at_zero(first):
        lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
        advance(optimizer, params, [first])  # the first one makes the state
        names = [name for name in optimizer.state[params[0]] if name != "step"]
        kept = [optimizer.state[p][name] for p in params[:3] for name in names]
        with cases.no_change(*params, *kept):
            advance(optimizer, params, range(first + 1, first + 4))
        optimizer.param_groups[0]["lr"] = lr

    with cases.no_change(*params):
        steps_at_zero(0)
    if momentum == 0:
        advance(optimizer, params, range(4, 10))
        with cases.no_change(*params):
            steps_at_zero(10)


@each_fast_backend
def test_a_later_lr_zero_leaves_roots_and_x_0_alone_and_averages_towards_z(backend):
    params = parameters(SHAPES[:3], torch.float32, backend.device)
    optimizer = advance(build(MADGRAD, params, backend, lr=0.1), params, range(5))
    names = ("root_code", "root_scale", "initial_code", "initial_scale")
    kept = [optimizer.state[param][name] for param in params for name in names]
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0]["lr"] = 0.0
    with cases.no_change(*kept):
        advance(optimizer, params, range(5, 8))
    assert not any(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_class
@each_fast_backend
def test_no_eps_gives_no_nan(backend, cls, momentum):
    """Coordinates without a gradient, whole blocks of them among those, stay where they are."""
    params = parameters(SHAPES, torch.float32, backend.device)
    optimizer = build(cls, params, backend, eps=0.0, lr=0.1, momentum=momentum)
    idle = [torch.zeros_like(param, dtype=torch.bool) for param in params]
    for i, mask in enumerate(idle):
        mask[0] = True
        mask.view(-1)[:: i + 3] = True
    before = [param.detach().clone() for param in params]
    for k in range(5):
        noisy_grads(params, k)
        for param, mask in zip(params, idle, strict=True):
            param.grad[mask] = 0
        optimizer.step()
    for param, mask, old in zip(params, idle, before, strict=True):
        assert cases.same_bits(param.detach()[mask], old[mask])
        assert param.isfinite().all()
        assert not torch.equal(param, old)
    assert all(tensor.isfinite().all() for tensor in state_tensors(optimizer, params))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e25, -1e25])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_class
@each_fast_backend
def test_a_bad_gradient_stays_in_its_coordinate(backend, cls, momentum, bad):
    """The others have the bits that they have if it is 0, and so have the scales."""
    runs = []
    for value in (bad, 0.0):
        params = parameters(SHAPES[:3], torch.float32, backend.device)
        optimizer = build(cls, params, backend, lr=0.1, momentum=momentum)
        for k in range(6):
            generator = torch.Generator().manual_seed(k)
            for param in params:
                grad = torch.randn(param.shape, generator=generator).to(param.device)
                grad[1].view(-1)[7] = value if k == 2 else 0.0
                param.grad = grad
            optimizer.step()
        runs.append((params, optimizer))
    (params, optimizer), (others, other) = runs
    for p, q in zip(params, others, strict=True):
        for a, b in zip(
            (p, *optimizer.state[p].values()), (q, *other.state[q].values()), strict=True
        ):
            a, b = a.detach().clone(), b.detach().clone()
            if a.shape == p.shape:
                a[1].view(-1)[7] = b[1].view(-1)[7] = 0
            assert cases.same_bits(a, b)


def test_differentiable_is_refused():
    with pytest.raises(ValueError, match="differentiable=True and compact=True exclude"):
        MADGRAD(parameters([(64, 64)]), compact=True, differentiable=True)
    params = parameters([(64, 64)])
    saved = MADGRAD(params, differentiable=True).state_dict()
    optimizer = build(MADGRAD, params)
    with pytest.raises(ValueError, match="differentiable=True and compact=True exclude"):
        optimizer.load_state_dict(saved)
    assert not optimizer.param_groups[0]["differentiable"]
