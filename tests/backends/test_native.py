"""The fused CPU backend: its cube root, its conversions, its threads, its build."""

import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from cases import each_method
from fork_check import prepared, stepped
from short_runs import advance, ones, parameters

import cubegrad
from cubegrad import backends
from cubegrad.backends.native import tensors

cpu = pytest.importorskip("cubegrad.backends.native.launch")

SOURCES = Path(cubegrad.__file__).parent / "backends" / "native"
HERE = Path(__file__).parents[1] / "support"
LEVELS = range(cpu.LEVEL + 1)
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: cpu.LEVELS[level])


def roots(x, level):
    result = np.empty_like(x)
    kind = cpu.KINDS[torch.float32 if x.dtype == np.float32 else torch.float64]
    tensors.native.cbrt(x, result, kind, level)
    return result


@pytest.mark.exhaustive
@each_level
def test_the_cube_root_is_within_an_ulp_at_every_exponent(level):
    """Every number of four exponents (subnormal, and one of each remainder by 3), and every 97th
    of the others."""
    worst = 0
    for exponent in range(255):
        whole = exponent in (0, 126, 127, 128)
        bits = np.arange(0, 1 << 23, 1 if whole else 97, dtype=np.uint32)
        x = (bits + (np.uint32(exponent) << 23)).view(np.float32)
        exact = np.cbrt(x.astype(np.float64)).astype(np.float32)
        away = np.abs(roots(x, level).view(np.int32) - exact.view(np.int32))
        worst = max(worst, int(away.max()))
    assert worst <= 1


@each_level
def test_the_double_cube_root_is_within_an_ulp(level):
    random = np.random.default_rng(0)
    x = np.concatenate([np.ldexp(1 + random.random(300), e) for e in range(-1074, 1024)])
    exact = np.cbrt(x.astype(np.longdouble)).astype(np.float64)
    assert np.abs(roots(x, level).view(np.int64) - exact.view(np.int64)).max() <= 1


@each_level
def test_the_cube_root_of_zero_infinity_and_nan(level):
    for dtype in (np.float32, np.float64):
        x = np.array([0, np.inf, np.nan], dtype)
        np.testing.assert_array_equal(roots(x, level), x)


@each_level
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_read_and_rounded_as_torch_does(monkeypatch, level, dtype):
    """At lr 0 and momentum 0 a step from x = 0 puts x_0, a float32, into the parameter."""
    monkeypatch.setattr(cpu, "LEVEL", level)
    every_half = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every_half = every_half[every_half.isfinite()]
    between = torch.nextafter(every_half.float(), torch.tensor(torch.inf))
    between = torch.cat((every_half.float(), between, every_half.float() * 1.0005))
    ties = torch.cat((every_half.float(), (every_half.float()[1:] + every_half.float()[:-1]) / 2))
    for wanted in (between, ties, torch.tensor([1e38, -1e38, 65519.0, 65520.0, 1e-10])):
        param = torch.nn.Parameter(torch.zeros(len(wanted), dtype=dtype))
        optimizer = cubegrad.MADGRAD([param], lr=0.0, momentum=0.0, fused=True)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.state[param]["initial_param"].copy_(wanted)
        optimizer.step()
        assert cases.same_bits(param.detach(), (wanted + 0.0).to(dtype))
    param = torch.nn.Parameter(every_half.clone())
    optimizer = cubegrad.MADGRAD([param], lr=0.0, fused=True)
    param.grad = torch.ones_like(param)
    with cases.no_change(param):
        optimizer.step()


@each_level
@each_method
@pytest.mark.parametrize("options", cases.OPTIONS.values(), ids=cases.OPTIONS)
def test_each_level_of_instructions_follows_eager(monkeypatch, level, method, options):
    monkeypatch.setattr(cpu, "LEVEL", level)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        params, optimizers = [], []
        for backend in (cases.NATIVE, cases.EAGER):
            params += parameters([(300,)], dtype)
            optimizers.append(cases.build(method, backend, params[-1:], options))
            advance(optimizers[-1], params[-1:], range(5))
        double = dtype == torch.float64
        rtol, atol = (1e-12, 1e-13) if double else (1e-5, 1e-6)
        for name, tensor in optimizers[1].state[params[1]].items():
            mine = optimizers[0].state[params[0]][name]
            torch.testing.assert_close(mine, tensor, rtol=rtol, atol=atol)
        torch.testing.assert_close(*params)


def test_tensors_may_be_at_odd_addresses():
    def odd(values):
        room = bytearray(values.nbytes + 1)
        view = torch.frombuffer(room, dtype=values.dtype, offset=1, count=values.numel())
        return view.copy_(values)

    value, grads = cases.randn((301,), torch.float32, 0), cases.randn((3, 301), torch.float32, 1)
    params = [torch.nn.Parameter(odd(value)), torch.nn.Parameter(value.clone())]
    assert params[0].data_ptr() % 4
    for param, place in zip(params, (odd, torch.clone), strict=True):
        optimizer = cubegrad.MADGRAD([param], fused=True)
        for grad in grads:
            param.grad = place(grad)
            optimizer.step()
    assert torch.equal(*params)


def test_the_number_of_threads_changes_no_bit():
    one = stepped(prepared(1))
    for threads in (2, 3, 7):
        assert stepped(prepared(threads)) == one


@pytest.mark.processes
@pytest.mark.parametrize("where", ["a forked child", "a data loader"])
def test_a_step_works_in(where):
    """In a process of its own: a fork is not safe once JAX has started its threads."""
    command = [sys.executable, HERE / "fork_check.py", where]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "the same bits\n"), result.stderr


def test_other_python_threads_run_during_a_step():
    param = torch.nn.Parameter(torch.zeros(30_000_000))
    optimizer = cubegrad.MADGRAD([param], fused=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    seen, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            seen.append(time.perf_counter())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        start = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
    finally:
        stop.set()
        watcher.join()
    middle = [t for t in seen if start + 0.1 * (end - start) < t < end - 0.1 * (end - start)]
    assert middle, f"no other thread ran during the {end - start:.3f} s of a step"


def test_a_scaled_step_and_one_that_is_skipped():
    params = parameters([(50,)]) + parameters([(50,)])
    optimizers = [cubegrad.MADGRAD([param], fused=True) for param in params]
    grad = cases.randn((50,), torch.float32, 1)
    params[0].grad, params[1].grad = grad * 1024, grad
    optimizers[0].grad_scale, optimizers[0].found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(*params)
    optimizers[0].found_inf = torch.tensor(1.0)
    with cases.no_change(params[0], *optimizers[0].state[params[0]].values()):
        optimizers[0].step()


@pytest.mark.processes
def test_without_the_extension_the_foreach_backend_steps():
    """As where it could not be compiled; prepared steps are then checked in Python."""
    code = """
import sys
sys.modules["cubegrad.backends.native._native"] = None
import torch, cubegrad
from cubegrad import backends
from cubegrad.backends.native import tensors
param = torch.nn.Parameter(torch.ones(3))
optimizer = cubegrad.MADGRAD([param])
param.grad = torch.ones(3)
optimizer.step()
assert optimizer._backend(optimizer.param_groups[0]) is backends.foreach
assert tensors.addresses is tensors.plain_addresses
assert (param < 1).all()
print(backends.available()["cpu"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "not available" in result.stdout
    assert "C compiler" in result.stdout


def test_the_default_on_a_cpu_is_the_fused_backend():
    param = ones(3)
    param.grad = torch.ones(3)
    assert cubegrad.MADGRAD([param])._backend({"params": [param]} | FLAGS) is cpu
    assert backends.available()["cpu"] == "available"


FLAGS = {"foreach": None, "fused": None, "differentiable": False}

COMPILER = shutil.which(os.environ.get("CC", "cc"))
FLAGS_C = "-std=c11 -O2 -g -pthread -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.mark.compilation
@needs_compiler
def test_the_extension_compiles_without_a_warning(tmp_path):
    include = sysconfig.get_paths()["include"]
    for source in ("step.c", "tensors.c", "torch.c", "module.c"):
        flags = [*FLAGS_C.split(), "-O3", "-fno-trapping-math", "-DPy_LIMITED_API=0x030B0000"]
        command = [COMPILER, *flags, f"-I{include}", "-c", str(SOURCES / source)]
        result = subprocess.run(
            [*command, "-o", tmp_path / "out.o"], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr


@pytest.mark.compilation
@needs_compiler
@pytest.mark.parametrize(
    "chosen",
    [
        ["-O1"],  # compiles in half the time
        pytest.param([], marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_the_kernels_pass_the_sanitizers(tmp_path, chosen):
    program = tmp_path / "check"
    sanitize = [*chosen, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(HERE / "native_check.c"), str(SOURCES / "step.c")]
    command = [COMPILER, *FLAGS_C.split(), *sanitize, f"-I{SOURCES}", *sources, "-lm"]
    result = subprocess.run([*command, "-o", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "0 wrong\n"
