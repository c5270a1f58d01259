"""Decoupled weight decay, on every backend."""

import cases
import pytest
import torch
from cases import each_backend, each_backend_of_a_long_test, each_method
from short_runs import cloned, parameters


@each_method
@each_backend
def test_decoupled_decay_decays_as_adamw_does(backend, method):
    """If x alone were shrunk, z would hold it back: its norm would soon stop falling."""
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True}
    (param,) = parameters([(50,)], device=backend.device)
    start = param.norm().item()
    (twin,) = cloned([param])
    optimizer = cases.build(method, backend, [param], options)
    adamw = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.5)
    for _ in range(100):
        param.grad, twin.grad = torch.zeros_like(param), torch.zeros_like(twin)
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(param, twin, rtol=1e-4, atol=0)
    assert param.norm().item() < 0.01 * start


@each_method
@each_backend
def test_decoupled_lr_decays_alike_at_any_lr(backend, method):
    norms = []
    for lr in (1e-4, 1e-1):
        (param,) = parameters([(50,)], device=backend.device)
        start = param.norm().item()
        options = {"lr": lr, "weight_decay": 0.01, "decoupled_lr": True}
        optimizer = cases.build(method, backend, [param], options)
        for k in range(20):
            optimizer.param_groups[0]["lr"] = lr * (0.5 if k >= 10 else 1.0)
            param.grad = torch.zeros_like(param)
            optimizer.step()
        norms.append(param.norm().item() / start)
    assert norms[0] == pytest.approx(0.99**10 * 0.995**10, rel=1e-4)
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@each_method
@each_backend_of_a_long_test
def test_decayed_weights_do_not_come_back(backend, method):
    """After a long decay, new gradients must not bring back the old distance from x_0."""
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True, "momentum": 0.0}
    (param,) = parameters([(1,)], torch.float64, backend.device)
    optimizer = cases.build(method, backend, [param], options)
    for _ in range(20):
        param.grad = torch.full_like(param, 1.0)
        optimizer.step()
    for _ in range(400):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    assert param.abs().item() < 1e-8
    for k in range(200):  # noise that adds up to zero but doubles ν
        param.grad = torch.full_like(param, 1e-3 * (-1) ** k)
        optimizer.step()
    assert param.abs().item() < 0.2
