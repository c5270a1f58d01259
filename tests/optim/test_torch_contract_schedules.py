"""What torch's tests ask of every optimizer in torch.optim: that every scheduler can drive it."""

import pytest
import torch
from contract import CLASSES, IMPLEMENTATIONS, EstimatedMADGRAD, each_class
from torch import nn
from torch.optim import lr_scheduler as schedulers

STEPS = 400
# `peak` is the learning rate that the optimizer was built with.
SCHEDULERS = {
    "ChainedScheduler": lambda o, _: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.999), schedulers.ConstantLR(o, 0.5, 20)]
    ),
    "ConstantLR": lambda o, _: schedulers.ConstantLR(o, 0.5, 20),
    "CosineAnnealingLR": lambda o, _: schedulers.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o, _: schedulers.CosineAnnealingWarmRestarts(o, 100),
    "CyclicLR": lambda o, peak: schedulers.CyclicLR(o, peak / 10, peak, 50),
    "ExponentialLR": lambda o, _: schedulers.ExponentialLR(o, 0.999),
    "LambdaLR": lambda o, _: schedulers.LambdaLR(o, lambda k: 1 / (1 + k / 100)),
    "LinearLR": lambda o, _: schedulers.LinearLR(o, 0.1, total_iters=50),
    "MultiStepLR": lambda o, _: schedulers.MultiStepLR(o, [200, 300], 0.5),
    "MultiplicativeLR": lambda o, _: schedulers.MultiplicativeLR(o, lambda _: 0.999),
    "OneCycleLR": lambda o, peak: schedulers.OneCycleLR(o, peak, total_steps=STEPS + 1),
    "PolynomialLR": lambda o, _: schedulers.PolynomialLR(o, STEPS),
    "ReduceLROnPlateau": lambda o, _: schedulers.ReduceLROnPlateau(o, factor=0.9, patience=10),
    "SequentialLR": lambda o, _: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=20), schedulers.ExponentialLR(o, 0.99)], [20]
    ),
    "StepLR": lambda o, _: schedulers.StepLR(o, 50, 0.9),
    "swa_utils.SWALR": lambda o, peak: torch.optim.swa_utils.SWALR(o, peak / 10, 50),
}


def rosenbrock(point):
    x, y = point
    return (1 - x) ** 2 + 100 * (y - x**2) ** 2


def descend(optimizer, param, scheduler):
    """Train with the scheduler; the learning rates that it set."""
    rates = set()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = rosenbrock(param)
        loss.backward()
        rates.add(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            scheduler.step(loss.item())
        else:
            scheduler.step()
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
@each_class
def test_it_converges_with(cls, name):
    param = nn.Parameter(torch.tensor([1.5, 1.5]))
    peak = 1.0 if cls is EstimatedMADGRAD else 0.01
    optimizer = cls([param]) if cls is EstimatedMADGRAD else cls([param], lr=peak)
    start = rosenbrock(param).item()
    rates = descend(optimizer, param, SCHEDULERS[name](optimizer, peak))
    assert rosenbrock(param).item() < 0.02 * start
    assert len(rates) > 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["CyclicLR", "LinearLR", "OneCycleLR", "SequentialLR"])
@pytest.mark.parametrize("cls", CLASSES[:2])
def test_a_tensor_lr_is_scheduled_as_a_number_is(cls, name, implementation):
    runs = []
    for lr in (0.01, torch.tensor(0.01)):
        param = nn.Parameter(torch.tensor([1.5, 1.5], dtype=torch.float64))
        optimizer = cls([param], lr=lr, **IMPLEMENTATIONS[implementation])
        scheduler = SCHEDULERS[name](optimizer, 0.01)
        for k in range(30):
            param.grad = torch.tensor([1.0, -1.0 / (1 + k)], dtype=torch.float64)
            optimizer.step()
            scheduler.step()
        runs.append(param)
        assert isinstance(optimizer.param_groups[0]["lr"], type(lr))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-6, atol=1e-6)  # a float32 lr
