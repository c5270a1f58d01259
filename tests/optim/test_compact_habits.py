"""compact=True in what users do with an optimizer: the same bits whichever way a step is made."""

import copy

import cases
import pytest
import torch
from cases import each_class, each_fast_backend
from compact_runs import SHAPES, build, held_layouts, noisy_grads, same_runs
from short_runs import advance, parameters, peak_of, set_grads
from torch import nn

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD
from cubegrad.state import blocks

LR = {MADGRAD: 0.1, MirrorMADGRAD: 0.02, MADGRADW: 0.05}


@each_class
def test_a_grad_scaler_scales_and_skips(cls):
    runs = []
    for scaled in (True, False):
        params = parameters(SHAPES)
        optimizer = build(cls, params, cases.NATIVE, lr=LR[cls])
        assert optimizer._step_supports_amp_scaling
        for k in range(5):
            set_grads(params, k)
            if scaled:
                for param in params:
                    param.grad *= 1024
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.zeros(1)
                optimizer.step()
                optimizer.found_inf = torch.ones(1)
                params[0].grad[0, 0] = torch.inf
                kept = [t for p in params for t in optimizer.state[p].values()]
                with cases.no_change(*params, *kept):
                    optimizer.step()
            else:
                optimizer.step()
        runs.append((params, optimizer))
    assert same_runs(*runs[0], *runs[1])


@each_class
def test_a_skipped_first_step_has_no_weight(cls):
    """And x_0 is read again after it, if it has changed."""
    runs = []
    for skip in (True, False):
        params = parameters(SHAPES)
        optimizer = build(cls, params, cases.NATIVE, lr=LR[cls])
        if skip:
            set_grads(params, 9)
            optimizer.found_inf = torch.ones(1)
            optimizer.step()
            del optimizer.found_inf
        with torch.no_grad():
            for param in params:
                param.mul_(2)
        runs.append((params, advance(optimizer, params, range(3))))
    assert same_runs(*runs[0], *runs[1])


def sparse(grad, rows):
    rows = torch.tensor(rows, device=grad.device)
    return torch.sparse_coo_tensor(rows[None], grad[rows], grad.shape, check_invariants=True)


# torch 2.11 warns of it once, although `check_invariants` is given.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@each_fast_backend
def test_sparse_gradients_are_those_made_dense(backend, decay):
    options = {"weight_decay": decay, "decoupled_weight_decay": True, "momentum": 0.0}
    runs = []
    for dense in (True, False):
        (param,) = parameters([(64, 64)], torch.float32, backend.device)
        optimizer = build(MADGRAD, [param], backend, lr=0.1, **options)
        for k in range(4):
            grad = cases.randn((64, 64), torch.float32, k).to(backend.device)
            grad = sparse(grad, [3, 3 + k, 17])
            param.grad = grad.to_dense() if dense else grad
            optimizer.step()
        runs.append(([param], optimizer))
    assert same_runs(*runs[0], *runs[1])
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(RuntimeError, match="sparse gradient, and momentum"):
        optimizer.step()


def expanded(t):
    return t[:1].expand_as(t)


def inside_a_buffer(t):
    """A view of a part of a larger one, whose other elements must stay."""
    room = torch.full((t.numel() + 7,), 3.0, dtype=t.dtype)
    return room[5 : 5 + t.numel()].view(t.shape).copy_(t)


@pytest.mark.parametrize("grad", [torch.Tensor.clone, cases.transposed, expanded])
@pytest.mark.parametrize(
    "param", [cases.transposed, cases.channels_last, cases.gapped, inside_a_buffer]
)
@each_class
@each_fast_backend
def test_memory_layouts_change_nothing(backend, cls, param, grad):
    shape = (6, 4, 16, 16)
    runs = []
    for layout in (param, torch.Tensor.clone):
        one = cases.parameter(layout(cases.randn(shape, torch.float32, 0)), backend.device)
        optimizer = build(cls, [one], backend, lr=LR[cls])
        for k in range(4):
            one.grad = cases.moved(grad(cases.randn(shape, torch.float32, k)), backend.device)
            optimizer.step()
        runs.append(([one], optimizer))
    assert same_runs(*runs[0], *runs[1])
    if param is inside_a_buffer:
        room = runs[0][0][0].detach()
        whole = room.as_strided((room.numel() + 7,), (1,), 0)
        assert (torch.cat([whole[:5], whole[-2:]]) == 3).all()


@each_class
def test_clipping_closures_hooks_and_copies(cls):
    params = parameters(SHAPES)
    optimizer, called = build(cls, params, lr=LR[cls]), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))

    def closure():
        noisy_grads(params, len(called))
        nn.utils.clip_grad_norm_(params, 1.0)
        return 0.5

    assert [optimizer.step(closure) for _ in range(3)] == [0.5] * 3
    assert len(called) == 3
    copied_params, copied = copy.deepcopy((params, optimizer))
    noisy_grads(params, 7)
    noisy_grads(copied_params, 7)
    optimizer.step()
    copied.step()
    assert same_runs(params, optimizer, copied_params, copied)


@each_class
@each_fast_backend
def test_repeated_steps_follow_every_change(backend, cls):
    """As one that is built anew before each step."""
    params, others = (parameters(SHAPES[:3], torch.float32, backend.device) for _ in range(2))
    optimizer = build(cls, params, backend, lr=LR[cls])
    other = build(cls, others, backend, lr=LR[cls])
    for k in range(12):
        for some, one in ((params, optimizer), (others, other)):
            set_grads(some, k)
            group = one.param_groups[0]
            group["lr"] = LR[cls] / (k + 1)
            group["momentum"] = 0.0 if k in (4, 5) else 0.9
            if k == 7:
                some[1].grad = None
            if k == 8:
                some[0].data = some[0].data.clone()
                one.state[some[0]]["root_code"] = one.state[some[0]]["root_code"].clone()
            if k == 9:
                group["compact"] = False
            if k == 10:
                group["compact"] = True
            one.step()
        saved = other.state_dict()
        other = build(cls, others, backend, lr=1.0, compact=other.param_groups[0]["compact"])
        other.load_state_dict(saved)
    assert same_runs(params, optimizer, others, other)


@each_class
def test_pieces_and_threads_change_nothing(cls, monkeypatch):
    """The last bit of torch's x ** (1 / 3) depends on them, that of a code must not."""
    runs = []
    for piece, threads in ((2**22, 1), (2**10, 1), (2**22, 3)):
        monkeypatch.setattr(blocks, "PIECE", piece)
        torch.set_num_threads(threads)
        params = parameters([(300, 301), (70, 65)])
        runs.append((params, advance(build(cls, params, lr=LR[cls]), params, range(4))))
    for run in runs[1:]:
        assert same_runs(*runs[0], *run)


@each_class
def test_the_default_dtype_changes_nothing(cls):
    runs = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            params = parameters(SHAPES[:3])
            runs.append((params, advance(build(cls, params, lr=LR[cls]), params, range(3))))
        finally:
            torch.set_default_dtype(torch.float32)
    for run in runs[1:]:
        assert same_runs(*runs[0], *run)


def test_wrong_codes_are_refused_before_anything_changes():
    params = parameters(SHAPES[:2])
    optimizer = advance(build(MADGRAD, params), params, range(2))
    good = dict(optimizer.state[params[1]])
    bad = {
        "root_code": (good["root_code"].float(), "root_code .*float32 .* must be torch.uint8"),
        "offset_scale": (good["offset_scale"][:, :1], r"shape \(16, 1\), and must be .*\(16, 2\)"),
        "initial_code": (good["initial_code"].int(), "initial_code .*int32 .* must be torch.int16"),
        "initial_scale": (None, "all of the codes that belong together"),
    }
    for name, (value, message) in bad.items():
        entries = {**good, name: value}
        if value is None:
            del entries[name]
        optimizer.state[params[1]] = entries
        with cases.no_change(*params), pytest.raises(ValueError, match=message):
            optimizer.step()
    optimizer.state[params[1]] = good
    optimizer.step()


# torch 2.11's profiler warns so once in each process.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_an_idle_parameter_of_an_estimated_rate_is_decoded_by_pieces(monkeypatch):
    monkeypatch.setattr(blocks, "PIECE", 2**10)
    params = parameters([(512, 256), (64, 64)])
    optimizer = build(MADGRAD, params, lr="auto")
    advance(optimizer, params, range(2))
    assert all(layout.is_coded for layout in held_layouts(optimizer))
    params[0].grad = None
    assert peak_of(optimizer.step) < 0.5 * params[0].nbytes
