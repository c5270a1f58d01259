"""States in codes: saved and resumed bit for bit, converted with little lost."""

import copy

import pytest
import torch
from cases import each_class, each_fast_backend
from compact_runs import SHAPES, build, held_layouts, noisy_grads, rms, same_runs
from short_runs import advance, parameters, set_grads, through_a_file, through_pickle
from torch import nn

from cubegrad import MADGRAD, MirrorMADGRAD, codec, interop
from cubegrad.codec import LARGEST_OFFSET
from cubegrad.functions import CodedFunctions
from cubegrad.state import conversion, layout

# Where a run is cut, for each dtype.
CUTS = [
    *((0, torch.float32), (1, torch.float32), (4, torch.float32)),
    *((2, torch.bfloat16), (1, torch.float16), (3, torch.complex64)),
]


def through_a_state_dict(run):
    params, optimizer = run
    saved = through_a_file({"x": [p.detach() for p in params], "o": optimizer.state_dict()})
    resumed = [nn.Parameter(x) for x in saved["x"]]
    again = type(optimizer)(resumed, lr=optimizer_lr(optimizer), compact=True)
    for flag in ("foreach", "fused", "capturable"):
        again.param_groups[0][flag] = optimizer.param_groups[0][flag]
    again.load_state_dict(saved["o"])
    return resumed, again


def optimizer_lr(optimizer):
    return "auto" if optimizer.param_groups[0]["auto_lr"] else 0.7


@pytest.mark.parametrize("copied", [through_a_state_dict, through_pickle, copy.deepcopy])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each_class
@each_fast_backend
def test_resumed_equals_unbroken(backend, cls, momentum, copied):
    options = {"momentum": momentum, "weight_decay": 0.01, "lr": 0.05}
    for cut, dtype in CUTS:
        params = parameters(SHAPES, dtype, backend.device)
        optimizer = advance(build(cls, params, backend, **options), params, range(cut))
        others, other = copied((params, optimizer))
        advance(optimizer, params, range(cut, 6))
        advance(other, others, range(cut, 6))
        assert same_runs(params, optimizer, others, other)


@pytest.mark.parametrize("copied", [through_a_state_dict, through_pickle, copy.deepcopy])
@pytest.mark.parametrize("cut", [0, 1, 4])
@each_fast_backend
def test_an_estimated_rate_resumes(backend, cut, copied):
    def steps(params, optimizer, ks):
        for k in ks:
            noisy_grads(params, k)
            if k == 3:
                params[1].grad = None
            optimizer.step()

    params = parameters(SHAPES, torch.float32, backend.device)
    optimizer = build(MADGRAD, params, backend, lr="auto")
    steps(params, optimizer, range(cut))
    others, other = copied((params, optimizer))
    steps(params, optimizer, range(cut, 8))
    steps(others, other, range(cut, 8))
    assert same_runs(params, optimizer, others, other)
    assert optimizer.estimated_lr() == other.estimated_lr()


@each_class
@each_fast_backend
def test_resumed_on_another_backend(backend, cls):
    """Sums may differ in their last place, so that one code in a thousand may be another."""
    params = parameters(SHAPES[:3])
    reference = advance(build(cls, params, lr=0.05), params, range(3))
    others = parameters(SHAPES[:3], torch.float32, backend.device)
    other = build(cls, others, backend)
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    other.load_state_dict(through_a_file(reference.state_dict()))
    other.param_groups[0].update(backend.flags)
    advance(reference, params, range(3, 5))
    advance(other, others, range(3, 5))
    for p, q in zip(params, others, strict=True):
        close = {"rtol": 1e-5, "atol": 1e-6, "check_device": False}
        off = (p - q.cpu()).abs() > 1e-5
        assert off.float().mean() < 2e-3
        for name, tensor in reference.state[p].items():
            own = other.state[q][name]
            if name.endswith("code"):
                apart = (tensor.int() - own.cpu().int()).abs()
                assert apart.max() <= 1
                assert apart.float().mean() < 2e-3
            else:
                torch.testing.assert_close(own, tensor, **close)


def test_a_state_dict_has_types_that_process_groups_send():
    """Neither NCCL nor gloo has int16; the bytes are the same memory, not a copy."""
    params = parameters(SHAPES[:1])
    optimizer = advance(build(MADGRAD, params), params, range(1))
    saved, held = optimizer.state_dict()["state"][0], optimizer.state[params[0]]
    assert {tensor.dtype for tensor in saved.values()} == {
        *(torch.float32, torch.int8, torch.uint8),
    }
    assert held["initial_code"].dtype == torch.int16
    assert saved["initial_code"].data_ptr() == held["initial_code"].data_ptr()
    assert saved["initial_code"].shape == (64, 128)
    # A wrapper may put such a state into the optimizer itself, or load int16.
    optimizer.state[params[0]] = dict(saved)
    advance(optimizer, params, range(1, 2))
    assert optimizer.state[params[0]]["initial_code"].dtype == torch.int16
    direct = optimizer.state_dict()
    direct["state"][0]["initial_code"] = optimizer.state[params[0]]["initial_code"]
    optimizer.load_state_dict(direct)
    advance(optimizer, params, range(2, 3))


def dual_points(optimizer, params):
    """z of each parameter, in either form."""
    points = []
    for param, held in zip(params, held_layouts(optimizer), strict=True):
        state, x = optimizer.state[param], param.detach().double()
        if held.is_coded:
            codes = held.codes([state[name] for name in held.buffers])
            step = codes.offset_scale.double().repeat_interleave(256, 1)[:, : x[0].numel()]
            offset, _ = codec.unpacked(CodedFunctions, codes)
            points.append(x + offset.double() * step.reshape(x.shape))
        elif held.rule.relative:
            points.append(x + state["dual_offset"].double())
        elif not held.rule.pulls:
            points.append(state["z"].double())
        else:
            root = state["grad_sq_sum"].double() ** (1 / 3) + optimizer.param_groups[0]["eps"]
            points.append(state["initial_param"].double() - state["grad_sum"].double() / root)
    return points


@each_class
def test_a_change_of_form_moves_z_by_less_than_a_code(cls):
    """And x not at all: the step after it has no weight."""
    params = parameters(SHAPES[:3])
    optimizer = build(cls, params, compact=False, lr=0.05, momentum=0.9)
    for k in range(20):
        noisy_grads(params, k)
        optimizer.step()
    for to in (True, False):
        before = dual_points(optimizer, params)
        for param in params:
            held = layout.held(cls._rule, optimizer.state[param])
            full = layout.full(cls._rule, to)
            assert held.is_coded != to
            conversion.convert(
                param, optimizer.state[param], full, optimizer.param_groups[0]["eps"]
            )
        for param, old, new in zip(params, before, dual_points(optimizer, params), strict=True):
            largest = (old - param.detach().double()).abs().max()
            # Half a code to encode; float32's rounding of sums and their quotient to decode.
            limit = 0.5 / LARGEST_OFFSET if to else 1e-4
            assert (new - old).abs().max() <= 1.01 * limit * largest


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@each_class
def test_a_state_loads_into_the_other_form(cls, dtype, momentum):
    """It changes at the next step, and the run goes on close to the unbroken one."""
    for saved_as in (True, False):
        params = parameters(SHAPES, dtype)
        # A larger one where x is held: at steps of a last place of bfloat16 it goes elsewhere
        # rounded at random, as codes have it, than rounded to nearest.
        lr = 0.06 if cls._rule.holds else 0.02
        optimizer = build(cls, params, compact=saved_as, momentum=momentum, lr=lr)

        def steps(some, one, ks):
            for k in ks:
                noisy_grads(some, k)
                one.step()

        steps(params, optimizer, range(10))
        others = copy.deepcopy(params)
        other = build(cls, others, compact=not saved_as)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        held = [layout.is_coded for layout in held_layouts(other)]
        assert held == [saved_as] * 3 + [False]
        assert other.param_groups[0]["compact"] is not saved_as
        middle = copy.deepcopy(params)
        steps(params, optimizer, range(10, 20))
        steps(others, other, range(10, 20))
        assert [layout.is_coded for layout in held_layouts(other)] == [not saved_as] * 3 + [False]
        for start, p, q in zip(middle, params, others, strict=True):
            assert rms(p, q) < 0.06 * rms(p, start)  # measured up to 3 %


@each_class
@pytest.mark.parametrize("change", ["none", "load", "pickle", "form"])
def test_x_0_is_read_again_until_a_step_has_had_a_weight(cls, change):
    """As torch.distributed.checkpoint does: a step at lr 0, then the weights are loaded."""
    params, others = parameters(SHAPES), parameters(SHAPES)
    optimizer = build(cls, params, lr=0.05, compact=change != "form")
    for param in params:
        param.grad = torch.zeros_like(param)
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    optimizer.step()
    if change == "form":
        optimizer.param_groups[0]["compact"] = True
        optimizer.step()
    if change == "load":
        saved = through_a_file(optimizer.state_dict())
        optimizer = build(cls, params)
        optimizer.load_state_dict(saved)
    if change == "pickle":
        params, optimizer = through_pickle((params, optimizer))
    optimizer.param_groups[0]["lr"] = lr
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            p.copy_(3 * q - 1)
            q.copy_(p)
    for param in params:
        optimizer.state[param]["step"].zero_()
    other = build(cls, others, lr=lr)
    for k in range(3):
        set_grads(params, k)
        set_grads(others, k)
        optimizer.step()
        other.step()
    assert same_runs(params, optimizer, others, other)


@pytest.mark.parametrize("mirror", [False, True])
def test_another_packages_state_is_taken_in(mirror):
    """As the authors' package saves it; its mirror form keeps z."""
    cls = MirrorMADGRAD if mirror else MADGRAD
    params = parameters(SHAPES)
    plain = advance(build(cls, params, compact=False, lr=0.05), params, range(5))
    names = {"grad_sq_sum": "grad_sum_sq", "z": "z", "grad_sum": "s", "initial_param": "x0"}
    state = {
        key: {names[name]: tensor.clone() for name, tensor in entries.items() if name in names}
        for key, entries in plain.state_dict()["state"].items()
    }
    options = {
        "lr": 0.05,
        "eps": 0.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "decouple_decay": False,
    }
    theirs = {
        "state": {"k": torch.tensor([5]), **state},
        "param_groups": [{**options, "params": [*range(len(params))]}],
    }
    others = copy.deepcopy(params)
    other = build(cls, others)
    other.load_state_dict(interop.convert(theirs))
    middle = copy.deepcopy(params)
    plain.param_groups[0]["eps"] = 0.0
    advance(plain, params, range(5, 12))
    advance(other, others, range(5, 12))
    assert [layout.is_coded for layout in held_layouts(other)] == [True] * 3 + [False]
    for start, p, q in zip(middle, params, others, strict=True):
        assert rms(p, q) < 0.06 * rms(p, start)
