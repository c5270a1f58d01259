"""x_0 (and z) is the parameter's value before the first step whose lr is not 0."""

import copy

import cases
import numpy as np
import pytest
import torch
from cases import each_class, each_fast_backend
from short_runs import advance, ones, parameters, set_grads, through_pickle
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from cubegrad import MADGRAD, MirrorMADGRAD

METHODS = {method.optimizer: method for method in cases.METHODS}
SHAPES = [(4, 3), (3,)]


def pretrained():
    return [param.detach() for param in parameters(SHAPES)]


def filled(value):
    return nn.Parameter(torch.full((3,), value))


def load(params, values):
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def dry_step(params, optimizer, lr=0.0):
    """A step like the one that torch.distributed.checkpoint makes to allocate the state."""
    kept = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(lr) if isinstance(group["lr"], torch.Tensor) else lr
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, kept, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def starts(params, optimizer):
    names = ("initial_param", "z")
    return [
        optimizer.state[p][name] for p in params for name in names if name in optimizer.state[p]
    ]


def assert_starts_near(value, params, optimizer):
    """z has already moved by a step."""
    assert all(float((start - value).abs().max()) < 1 for start in starts(params, optimizer))


@each_fast_backend
@each_class
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1), "auto"], ids=["float", "tensor", "auto"])
@pytest.mark.parametrize("dry", [1, 3])
def test_weights_loaded_after_a_dry_step_are_the_start(backend, cls, rate, dry):
    if rate == "auto" and cls is not MADGRAD:
        return
    if isinstance(rate, torch.Tensor) and dry > 1:
        return  # with a tensor lr, x_0 is read again only after the first step
    runs = []
    for dry_steps in (dry, 0):
        params = [nn.Parameter(9.0 + torch.zeros(s, device=backend.device)) for s in SHAPES]
        lr = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = cls(params, lr=lr, **backend.flags)
        for _ in range(dry_steps):
            dry_step(params, optimizer)
        load(params, pretrained())
        for param in params:  # so that both runs count from 0
            if optimizer.state:
                optimizer.state[param]["step"].zero_()
        advance(optimizer, params, range(8))
        runs.append(params)
    for param, expected in zip(*runs, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-6)


@each_class
def test_weights_loaded_after_torchs_own_dry_step_are_the_start(cls):
    net = nn.Linear(3, 2)
    optimizer = cls(net.parameters(), lr=0.1)
    get_optimizer_state_dict(net, optimizer)
    params = list(net.parameters())
    load(params, [torch.full_like(param, 9.0) for param in params])
    advance(optimizer, params, range(1))
    if cls is MADGRAD:
        assert all(bool((start == 9.0).all()) for start in starts(params, optimizer))
    assert_starts_near(9.0, params, optimizer)


@each_class
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_made_after_a_dry_step_starts_from_the_loaded_weights(cls, copied):
    params = [filled(9.0)]
    optimizer = cls(params, lr=0.1)
    dry_step(params, optimizer)
    params, optimizer = copied((params, optimizer))
    load(params, pretrained()[1:])
    advance(optimizer, params, range(1))
    assert_starts_near(pretrained()[1], params, optimizer)


@each_class
def test_a_checkpoint_saved_after_a_dry_step_starts_from_the_loaded_weights(cls):
    params = [filled(9.0)]
    optimizer = cls(params, lr=0.1)
    dry_step(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    again = cls(params, lr=0.1)
    again.load_state_dict(saved)
    load(params, pretrained()[1:])
    advance(again, params, range(1))
    assert_starts_near(pretrained()[1], params, again)


@each_class
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_dry_step_may_have_gradients(cls, rate, loaded):
    """They make ν of the mirror form grow, although the step has no weight."""
    if loaded and isinstance(rate, torch.Tensor):
        return
    runs = []
    for dry in (True, False):
        params = [filled(-9.0)]
        lr = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = cls(params, lr=lr)
        if dry:
            params[0].grad = torch.full((3,), 1e-3)
            optimizer.param_groups[0]["lr"] = torch.tensor(0.0) if lr is not rate else 0.0
            optimizer.step()
            optimizer.param_groups[0]["lr"] = lr
        if dry and loaded:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = cls(params, lr=lr)
            optimizer.load_state_dict(saved)
        load(params, [torch.full((3,), 10.0)])
        if dry:
            optimizer.state[params[0]]["step"].zero_()
            optimizer.state[params[0]]["grad_sq_sum"].zero_()
        advance(optimizer, params, range(5))
        runs.append(params[0].detach())
    torch.testing.assert_close(*runs)


@each_class
@pytest.mark.parametrize("put", [Tensor.copy_, lambda t, v: t.data.copy_(v)], ids=["copy", "data"])
def test_a_state_that_is_restored_by_hand_after_a_dry_step(cls, put):
    params = parameters(SHAPES)
    optimizer = advance(cls(params, lr=0.1), params, range(6))
    saved = copy.deepcopy([(p.detach(), dict(optimizer.state[p])) for p in params])
    advance(optimizer, params, range(6))
    again = parameters(SHAPES)  # the same x_0: only the sums show that the run was restored
    other = cls(again, lr=0.1)
    dry_step(again, other)
    for param, (value, entries) in zip(again, saved, strict=True):
        put(param.detach(), value)
        for name, kept in entries.items():
            put(other.state[param][name], kept)
    advance(other, again, range(6))
    for param, expected in zip(again, params, strict=True):
        assert torch.equal(param, expected)


@each_class
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tensor_without_gradients_resumes_bit_for_bit(cls, dtype):
    """Decoupled decay moves x_0 in float32, and x in its own dtype."""
    options = {"lr": 0.005, "weight_decay": 0.5, "decoupled_weight_decay": True}
    runs = []
    for rate, split in ((0.005, 0), (0.005, 20), (torch.tensor(0.005), 0)):
        param = nn.Parameter(torch.full((4,), 1.3, dtype=dtype))
        optimizer = cls([param], **options | {"lr": rate})
        for k in range(40):
            if split and k == split:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = cls([param], **options)
                optimizer.load_state_dict(saved)
            param.grad = torch.full_like(param, float(k >= 30))
            optimizer.step()
        runs.append(param.detach())
    assert torch.equal(runs[0], runs[1])
    torch.testing.assert_close(runs[0], runs[2])


def test_a_tensor_rate_has_the_slope_of_a_number():
    """Reading x_0 a second time must not cut it out of the graph."""
    slopes = []
    for rate in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
        param = torch.ones((), dtype=torch.float64).clone().requires_grad_()
        moved = param * 1.0
        optimizer = MADGRAD([param], lr=rate, eps=1e-2, differentiable=True)
        optimizer.param_groups[0]["params"][0] = moved
        for k, grad in enumerate((theta, 2 * theta + 0.3, 3 * theta + 0.3)):
            moved.grad = grad
            optimizer.step()
            assert optimizer.state[moved]["step"] == k + 1
        slopes.append(torch.autograd.grad(moved, theta)[0])
    torch.testing.assert_close(*slopes)


def test_a_parameter_whose_start_is_not_settled_does_not_keep_its_group_from_repeating():
    params = [ones(3), ones(4)]
    optimizer = MADGRAD(params, lr=0.1, fused=True)
    dry_step(params, optimizer)
    for _ in range(2):
        params[0].grad = torch.ones(3)
        optimizer.step()
    assert optimizer._repeats.prepared


@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
def test_a_start_that_a_user_has_written_stays(cls):
    params = [filled(9.0)]
    optimizer = advance(cls(params, lr=0.0), params, range(2))
    (start,) = starts(params, optimizer)
    start.fill_(5.0)
    advance(optimizer, params, range(2))
    assert starts(params, optimizer)[0].tolist() == [5.0, 5.0, 5.0]


@each_fast_backend
@each_class
def test_a_warm_up_from_zero_follows_the_oracle(backend, cls):
    """Nothing is loaded after the step at lr 0, so reading x_0 a second time changes nothing."""
    params, twins = (parameters(SHAPES, device=backend.device) for _ in range(2))
    expected = METHODS[cls].oracle(cases.numbers(params[0]))
    optimizer, plain = (
        cls(p, lr=0.1, momentum=m, weight_decay=0.0, **backend.flags)
        for p, m in ((params, 0.9), (twins, torch.tensor(0.9)))
    )
    for k in range(8):
        for group in (*optimizer.param_groups, *plain.param_groups):
            group["lr"] = cases.lr_at(k, 0.1)
        for some, opt in ((params, optimizer), (twins, plain)):
            set_grads(some, k)
            opt.step()
        o = cases.settings({"lr": 0.1, "eps": optimizer.defaults["eps"]}, cases.lr_at(k, 0.1))
        expected.step(cases.numbers(params[0].grad), o)
    np.testing.assert_allclose(cases.numbers(params[0]), expected.x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(params[0], twins[0], rtol=1e-5, atol=1e-6)


def test_an_entry_of_a_wrapper_before_the_first_step():
    param = ones(3)
    optimizer = MADGRAD([param])
    optimizer.state[param]["slow_buffer"] = torch.ones(3)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.state[param]["step"] == 3
    assert optimizer._repeats.prepared


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": False}, {"foreach": True}], ids=str)
def test_eps_may_change_without_momentum(flags):
    """x_0 is not kept, and the weights belong to the eps they were reached with."""
    runs = []
    for momentum in (0.0, torch.tensor(0.0, dtype=torch.float64)):  # the tensor keeps x_0
        params = parameters(SHAPES, torch.float64)
        optimizer = MADGRAD(params, lr=0.1, momentum=momentum, **flags)
        for k in range(12):
            if k in (4, 8):
                optimizer.param_groups[0]["eps"] = 1.0 if k == 4 else 0.01
            if k == 6:
                restored = copy.deepcopy(optimizer.state_dict())
                optimizer = MADGRAD(params, lr=0.1, momentum=momentum, **flags)
                optimizer.load_state_dict(restored)
            set_grads(params, k)
            if k in (4, 5):
                params[1].grad = None  # it is still at the old eps when it moves again
            optimizer.step()
        runs.append(params)
    for param, expected in zip(*runs, strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=1e-12)
