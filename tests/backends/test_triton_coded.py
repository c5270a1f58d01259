"""The GPU kernel for states in codes, on a GPU or interpreted, against the eager backend."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch
from cases import each_method
from torch import nn

from cubegrad import codec
from cubegrad.functions import CodedFunctions
from cubegrad.state import layout

pytest.importorskip("cubegrad.backends.triton.launch")

FUSED, DEVICE = cases.TRITON, cases.TRITON.device
EAGER = cases.EAGER if DEVICE == "cpu" else cases.BACKENDS[0]
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
SUPPORT = Path(__file__).parents[1] / "support"

# Whole blocks; rows of a multiple of 16 with a short last block; any rows; rows of one short block.
SHAPES = [(16, 256), (8, 576), (14, 299), (64, 64)]
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "maximize": True},
    "decoupled": {"weight_decay": 0.5, "decoupled_weight_decay": True},
    "eps0": {"eps": 0.0},
}


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = list(itertools.product(OPTIONS, DTYPES, (0.9, 0.0)))
STEPS = 4
CASES += [("plain", torch.float32, 0.97), ("decoupled", torch.bfloat16, 0.97)]
if DEVICE == "cpu":  # interpreted, a step takes seconds
    CASES = [case for case in CASES if case[0] == "plain" or case[1:] == (torch.float32, 0.9)]
    SHAPES = SHAPES[:3]
    STEPS = 2

# How many weights may be rounded the other way, since they differ in float32's last place before:
# float16 has 13 places less, so that 1 in 8,192 is for each unit in the last place.
ROUNDED_APART = {torch.float32: 1e-4, torch.bfloat16: 1e-4, torch.float16: 1e-3}


def built(method, backend, params, options):
    return cases.build(method, backend, params, {"lr": 1e-2, "compact": True} | options)


def params_of(shapes, dtype, channels_last=False):
    tensors = [cases.randn(shape, dtype, i) / 10 for i, shape in enumerate(shapes)]
    form = torch.channels_last if channels_last else torch.contiguous_format
    return [nn.Parameter(t.to(DEVICE, memory_format=form)) for t in tensors]


def take_over(optimizer, other):
    """Give the parameters and states of one optimizer to the other."""
    ours, theirs = (o.param_groups[0]["params"] for o in (optimizer, other))
    for own, param in zip(ours, theirs, strict=True):
        own.data.copy_(param.data)
        for name, value in other.state[param].items():
            optimizer.state[own][name].copy_(value)


def codes_of(optimizer, param):
    """Of z - x and of ∛ν, one without the other's bits."""
    state = optimizer.state[param]
    held = layout.held(optimizer._rule, state)
    codes = held.codes([state[name] for name in held.buffers])
    offset, root = codec.unpacked(CodedFunctions, codes)
    return offset, root if offset is not None else root >> 1  # 0 is the lowest bit then


def differing_codes(one, other):
    """How many codes differ, how many there are, and by how much they differ at most."""
    count = total = largest = 0
    for a, b in zip(*(o.param_groups[0]["params"] for o in (one, other)), strict=True):
        for code, expected in zip(codes_of(one, a), codes_of(other, b), strict=True):
            if code is not None:
                apart = (code - expected).abs()
                count, total = count + int((apart > 0).sum()), total + apart.numel()
                largest = max(largest, int(apart.max()))
    return count, total, largest


def check_equal_steps(method, params, twins, options, steps=3):
    """Step both from the same state, again and again. The cube roots differ in their last bit."""
    eager, fused = built(method, EAGER, params, options), built(method, FUSED, twins, options)
    half = params[0].dtype != torch.float32
    for k in range(steps):
        if k:
            take_over(fused, eager)
        for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
            param.grad = cases.randn(param.shape, param.dtype, 100 * k + i).to(param.device)
            param.grad = param.grad.contiguous(
                memory_format=torch.channels_last if param.dim() == 4 else torch.contiguous_format
            )
            twin.grad = param.grad.clone()
        eager.step()
        fused.step()
        count, total, largest = differing_codes(eager, fused)
        assert count <= 2 + total * 1e-4
        assert half or largest <= 1
        for param, twin in zip(params, twins, strict=True):
            for name, value in eager.state[param].items():
                if name == "step" or name.startswith("initial") or name == "root_scale":
                    assert torch.equal(value.cpu(), fused.state[twin][name].cpu())
            apart = (param - twin).abs() > (0 if half else 1e-6)
            assert apart.sum() <= 2 + param.numel() * ROUNDED_APART[param.dtype]


@pytest.mark.compilation
@pytest.mark.parametrize(("options", "dtype", "momentum"), CASES)
@each_method
def test_codes_are_those_of_the_eager_backend(method, options, dtype, momentum):
    chosen = OPTIONS[options] | {"momentum": momentum}
    params, twins = params_of(SHAPES, dtype), params_of(SHAPES, dtype)
    check_equal_steps(method, params, twins, chosen, STEPS)


@pytest.mark.compilation
@each_method
def test_channels_last(method):
    shape = [(16, 32, 3, 3)]
    params, twins = (params_of(shape, torch.float32, channels_last=True) for _ in range(2))
    check_equal_steps(method, params, twins, {}, 2)
    assert twins[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.compilation
def test_gradients_that_are_not_aligned():
    params, twins = params_of([(16, 256)], torch.float32), params_of([(16, 256)], torch.float32)
    eager, fused = built(cases.MADGRAD, EAGER, params, {}), built(cases.MADGRAD, FUSED, twins, {})
    memory = cases.randn((16 * 256 + 1,), torch.float32, 5).to(DEVICE)
    params[0].grad = twins[0].grad = memory[1:].view(16, 256)
    eager.step()
    fused.step()
    assert differing_codes(eager, fused)[0] <= 1
    torch.testing.assert_close(params[0], twins[0], rtol=0, atol=1e-6)


@pytest.mark.compilation
@pytest.mark.parametrize("decoupled", [False, True])
def test_the_sums_of_an_estimated_learning_rate(decoupled):
    shapes = SHAPES[:3]
    options = {"lr": "auto", "weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    params, twins = params_of(shapes, torch.float32), params_of(shapes, torch.float32)
    eager = built(cases.MADGRAD, EAGER, params, options)
    fused = built(cases.MADGRAD, FUSED, twins, options)
    for k in range(3):
        if k:  # from the same codes: a code that differs changes the next sums
            take_over(fused, eager)
            fused.param_groups[0]["estimate"].copy_(eager.param_groups[0]["estimate"])
        for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
            param.grad = cases.randn(param.shape, param.dtype, 100 * k + i).to(DEVICE)
            twin.grad = param.grad.clone()
        eager.step()
        fused.step()
        expected, found = (o.param_groups[0]["estimate"] for o in (eager, fused))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.compilation
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
@each_method
def test_a_bad_gradient_stays_in_its_coordinate(method, bad):
    params, twins = params_of([(16, 256)], torch.float32), params_of([(16, 256)], torch.float32)
    sound, struck = built(method, FUSED, params, {}), built(method, FUSED, twins, {})
    for k in range(2):
        grad = cases.randn((16, 256), torch.float32, k).to(DEVICE)
        grad[3, 7] = 0
        params[0].grad, twins[0].grad = grad, grad.clone()
        twins[0].grad[3, 7] = bad
        sound.step()
        struck.step()
    others = torch.ones(16, 256, dtype=torch.bool, device=DEVICE)
    others[3, 7] = False
    assert torch.equal(params[0][others], twins[0][others])
    for name, value in sound.state[params[0]].items():
        other = struck.state[twins[0]][name]
        assert (
            torch.equal(value[others], other[others])
            if value.dim() == 2 and (value.shape == others.shape)
            else torch.equal(value, other)
        )


@pytest.mark.compilation
@pytest.mark.parametrize("size", [1e-17, 8e-20, 1e-22, 1e-30])
@each_method
def test_a_first_gradient_whose_square_is_hardly_a_number(method, size):
    """A GPU's logarithm takes a subnormal number for 0; a filter that comes to life late in a
    long training can have such a gradient."""
    params, twins = params_of([(16, 256)], torch.float32), params_of([(16, 256)], torch.float32)
    eager, fused = built(method, EAGER, params, {}), built(method, FUSED, twins, {})
    for k in range(2):
        params[0].grad = cases.randn((16, 256), torch.float32, k).to(DEVICE) * size
        twins[0].grad = params[0].grad.clone()
        eager.step()
        fused.step()
        assert twins[0].isfinite().all()
    torch.testing.assert_close(twins[0], params[0], rtol=0, atol=1e-6)


@pytest.mark.compilation
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_step_at_lr_0_moves_no_bit(momentum):
    params = params_of(SHAPES[:2], torch.float32)
    params[0].data[0, :2] = torch.tensor([0.0, -0.0])
    optimizer = built(cases.MADGRAD, FUSED, params, {"momentum": momentum})
    steps = 3 if momentum == 0 else 0
    for k in range(steps + 2):
        optimizer.param_groups[0]["lr"] = 1e-2 if k < steps else 0.0
        if k == steps + 1:
            before = [t.clone() for p in params for t in (p, *optimizer.state[p].values())]
        for i, param in enumerate(params):
            param.grad = cases.randn(param.shape, param.dtype, 10 * k + i).to(DEVICE)
        optimizer.step()
    after = [t for p in params for t in (p, *optimizer.state[p].values())]
    for old, new in zip(before, after, strict=True):
        if old.dim():  # not the step count
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@on_gpu
def test_a_step_neither_waits_nor_allocates():
    param = params_of([(2**14, 1024)], torch.float32)[0]
    param.grad = torch.randn_like(param)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer = built(cases.MADGRAD, FUSED, [param], {})
    optimizer.step()
    state = torch.cuda.memory_allocated() - before
    assert state / param.numel() <= 4.2
    assert torch.cuda.max_memory_allocated() - before <= 1.3 * state + 2**20
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with cases.no_waiting():
        for _ in range(3):
            optimizer.step()
    assert torch.cuda.max_memory_allocated() - held <= 2**16


@on_gpu
@each_method
def test_a_graph_replays_the_step_bit_for_bit(method):
    params, twins = (params_of([(64, 576), (16, 299)], torch.float32) for _ in range(2))
    options = {"capturable": True}
    plain, graphed = (built(method, FUSED, p, options) for p in (params, twins))
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn_like(param)
        twin.grad = param.grad.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            plain.step()
            graphed.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for _ in range(3):
        graph.replay()
        plain.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        for name, value in plain.state[param].items():
            assert torch.equal(value, graphed.state[twin][name])


@pytest.mark.compilation
@pytest.mark.processes
def test_all_variants_compile_for_a_gpu():
    """The interpreter takes things that the compiler does not."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SUPPORT / "compile_kernels.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("compiled\n")


@pytest.mark.parametrize("size", [1e25, float("inf")])
@pytest.mark.parametrize("method", [cases.MIRROR, cases.MADGRADW], ids=str)
def test_a_square_that_overflows_moves_as_eager_does(method, size):
    """Without a pull nothing moves where the denominator is infinite, unless g is."""
    ends = []
    for backend in (FUSED, EAGER):
        params = params_of([(64, 64)], torch.float32)
        optimizer = built(method, backend, params, {})
        for first in (size, 1.0):
            params[0].grad = torch.ones_like(params[0])
            params[0].grad[0, :4] = first
            optimizer.step()
        ends.append(params[0].detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert ends[0][0, :4].isfinite().all() == (size < float("inf"))
    assert ends[0][1:].isfinite().all()
