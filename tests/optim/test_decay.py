"""Decoupled weight decay, on every backend."""

import warnings

import cases
import pytest
import torch
from cases import each_backend, each_backend_of_a_long_test, each_method
from short_runs import cloned, ones, parameters

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, cautions, param_groups


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


@pytest.fixture
def not_warned(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(cautions, "_has_warned_of_decay", False)


REMEDY = (
    r"weight_decay={} is an L2 term .* pass decoupled_weight_decay=True and .* with 4 times "
    r"AdamW's lr, weight_decay={}\."
)


@pytest.mark.usefixtures("not_warned")
@pytest.mark.parametrize("lr", [0.01, "auto"])
def test_adamws_decay_without_decoupling_is_warned_of_once_at_the_users_line(lr):
    with pytest.warns(UserWarning, match=REMEDY.format("0.1", "0.025")) as caught:
        [MADGRAD([ones()], lr, weight_decay=0.1) for _ in range(2)]
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.usefixtures("not_warned")
def test_the_decays_of_groups_are_what_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = MADGRAD([{"params": [ones()], "weight_decay": 0.0}], weight_decay=0.1)
        optimizer.add_param_group(
            {"params": [ones()], "weight_decay": 0.1, "decoupled_weight_decay": True}
        )
        with pytest.raises(UserWarning, match=r"weight_decay=0\.01 is an L2 term"):
            optimizer.add_param_group({"params": [ones()], "weight_decay": 0.01})
    assert len(optimizer.param_groups) == 2
    with pytest.warns(UserWarning, match=REMEDY.format("0.05", "0.0125")):
        MADGRAD(param_groups(torch.nn.Linear(3, 3), weight_decay=0.05))


@pytest.mark.usefixtures("not_warned")
@pytest.mark.filterwarnings("error")
def test_other_decays_are_not_warned_of():
    """MADGRAD's largest best one in docs/results is 1e-3, MirrorMADGRAD's 2.5e-3."""
    MADGRAD([ones()], weight_decay=2.5e-3)
    MADGRAD([ones()], weight_decay=0.1, decoupled_weight_decay=True)
    MADGRAD([ones()], weight_decay=0.1, decoupled_lr=True)
    MirrorMADGRAD([ones()], weight_decay=0.1)
    MADGRADW([ones()], weight_decay=0.1)
    MADGRADW([ones()], weight_decay=0.1, decoupled_weight_decay=False)
