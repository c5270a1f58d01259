"""lr="auto" after it has converged: a run whose gradients have vanished stays where it is."""

import copy
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from torch import Tensor, nn

from cubegrad import MADGRAD, MADGRADW

pytestmark = pytest.mark.training

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]
TARGET = (1.0, -1.0, 1.0)


def parabola(x: Tensor, target: tuple[float, ...] = TARGET) -> tuple[Tensor, Tensor]:
    away = x - torch.tensor(target, dtype=x.dtype)
    return away.square().sum(), 2 * away


def rosenbrock(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x
    off = b - a * a
    return (1 - a) ** 2 + 100 * off**2, torch.stack([2 * (a - 1) - 400 * a * off, 200 * off])


def narrow_valley(x: Tensor) -> tuple[Tensor, Tensor]:
    """Curvatures from 1 to 1,000 in directions that are not those of the coordinates."""
    axes, _ = torch.linalg.qr(cases.randn((10, 10), torch.float64, 3))
    slope = (axes * torch.logspace(0, 3, 10, dtype=torch.float64)) @ (axes.T @ x.double())
    return x.double() @ slope, (2 * slope).to(x.dtype)


def start(values: tuple[float, ...], dtype: torch.dtype) -> tuple[nn.Parameter, MADGRAD]:
    param = nn.Parameter(torch.tensor(values, dtype=dtype))
    return param, MADGRAD([param], lr="auto")


def descend(param: nn.Parameter, optimizer: MADGRAD, problem: Slope, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss, param.grad = problem(param.detach())
        optimizer.step()
        losses.append(loss.item())
    return losses


def uncounted(optimizer: MADGRAD) -> float:
    share: float = optimizer.param_groups[0]["estimate"][5].item()
    return share


def counted(optimizer: MADGRAD) -> float:
    k: float = optimizer.param_groups[0]["estimate"][4].item()
    return (k + 1) * (1 - uncounted(optimizer))


# When all steps counted, losses after step 2,000 reached 0.01 to 3 times the first one.
PROBLEMS: dict[str, tuple[Slope, tuple[float, ...]]] = {
    "parabola": (parabola, (-1.0, 10.0, 1.0)),
    "rosenbrock": (rosenbrock, (0.0, 0.0)),
    "narrow valley": (narrow_valley, (1.0,) * 10),
}


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_converged_run_does_not_jump(name: str, dtype: torch.dtype, factor: float) -> None:
    problem, values = PROBLEMS[name]
    param, optimizer = start(values, dtype)
    optimizer.param_groups[0]["lr"] = factor
    losses = descend(param, optimizer, problem, 4000)
    assert max(losses[2000:]) < 1e-6 * losses[0]  # 7e-11 at most
    assert uncounted(optimizer) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_it_stays_for_12000_steps(dtype: torch.dtype) -> None:
    """When all steps counted, the loss was above 1 again on 148 of them."""
    param, optimizer = start((-1.0, 10.0, 1.0), dtype)
    losses = descend(param, optimizer, parabola, 12000)
    there = next(k for k, loss in enumerate(losses) if loss < 1e-3)
    assert there < 500  # 89
    assert max(losses[there + 200 :]) < 1e-9  # 5e-12
    assert max(losses[-1000:]) < 1e-11  # 2e-13 in float32


@pytest.mark.parametrize("decay", [1e-3, 1e-2])
def test_it_stays_with_decoupled_decay(decay: float) -> None:
    param, optimizer = start((-1.0, 10.0, 1.0), torch.float32)
    group = optimizer.param_groups[0]
    group["weight_decay"], group["decoupled_weight_decay"] = decay, True
    losses = descend(param, optimizer, parabola, 4000)
    assert max(losses[2000:]) < 1e-6 * losses[0]  # 5e-8 at most


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("decay", [1e-3, 1e-2, 1e-1])
def test_it_stays_with_coupled_decay(decay: float, momentum: float) -> None:
    """The gradients of the loss remain then, and decay must outweigh them in the estimate."""
    param = nn.Parameter(torch.tensor([-1.0, 10.0, 1.0]))
    optimizer = MADGRAD([param], lr="auto", weight_decay=decay, momentum=momentum)
    losses = descend(param, optimizer, parabola, 4000)
    minimum = 3 * (decay / (2 + decay)) ** 2  # the loss where loss and decay balance
    assert max(losses[2000:]) < 1.1 * minimum + 1e-7 * losses[0]
    assert optimizer.param_groups[0]["estimate"][0] < 11  # the distance of the furthest coordinate


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_it_stays_with_a_state_of_codes(noise: float) -> None:
    """Their rounding is not taken for gradients, nor does it hide them."""
    param = nn.Parameter(cases.randn((64, 64), torch.float32, 1))
    curvature = torch.logspace(0, 1, 64)
    optimizer = MADGRAD([param], lr="auto", compact=True)
    losses = []
    for k in range(1500):
        x = param.detach()
        losses.append((curvature * x.square()).mean().item())
        param.grad = 2 * curvature * x + noise * cases.randn((64, 64), torch.float32, k + 2)
        optimizer.step()
    assert max(losses[500:]) < (0.06 if noise else 1e-6) * losses[0]
    assert uncounted(optimizer) == 0 if noise else uncounted(optimizer) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_group_that_converges_beside_frozen_ones_does_not_jump(dtype: torch.dtype) -> None:
    """The frozen group's ν is larger, and must not hide that the other gradients vanish."""
    param, _ = start((-1.0, 10.0, 1.0), dtype)
    frozen = nn.Parameter(torch.ones(1000, dtype=dtype))
    optimizer = MADGRAD([{"params": [param]}, {"params": [frozen]}], lr="auto")
    frozen.grad = torch.full_like(frozen, 10.0)
    descend(param, optimizer, parabola, 20)
    frozen.grad = None
    losses = descend(param, optimizer, parabola, 4000)
    assert max(losses[2000:]) < 1e-6 * losses[0]
    assert uncounted(optimizer) > 0.5


def test_a_group_that_joins_makes_steps_count_again() -> None:
    """Its gradients are much smaller than those of the group that has converged were."""
    param, optimizer = start((-1.0, 10.0, 1.0), torch.float64)
    descend(param, optimizer, parabola, 2000)
    steps = counted(optimizer)
    late = nn.Parameter(torch.ones(100, dtype=torch.float64))
    optimizer.add_param_group({"params": [late]})
    for k in range(1000):
        late.grad = 1e-3 * (late.detach() + cases.randn((100,), torch.float64, k))
        descend(param, optimizer, parabola, 1)
    assert counted(optimizer) - steps > 900  # 1,000


@pytest.mark.parametrize("schedule_free", [False, True])
def test_madgradw_stays_and_a_group_that_joins_does_not_move_it(schedule_free: bool) -> None:
    """Its steps have no scale, so that the size of the others' gradients does not matter."""
    param, late = nn.Parameter(torch.tensor([-1.0, 10.0, 1.0])), nn.Parameter(torch.ones(3))
    optimizer: Any = MADGRADW([param], lr="auto", weight_decay=0.0, schedule_free=schedule_free)
    losses = descend(param, optimizer, parabola, 2000)
    assert max(losses[1000:]) < 1e-6 * losses[0]
    optimizer.add_param_group({"params": [late]})
    for _ in range(1000):
        late.grad = 1e-6 * (late.detach() - 2)
        losses += descend(param, optimizer, parabola, 1)
    assert max(losses[1000:]) < 1e-6 * losses[0]
    assert (late - 2).abs().max() < 0.01


def test_a_converged_run_follows_a_target_that_moves() -> None:
    param, optimizer = start((-1.0, 10.0, 1.0), torch.float64)
    descend(param, optimizer, parabola, 2000)
    losses = descend(param, optimizer, lambda x: parabola(x, (-5.0, 4.0, 2.0)), 600)
    assert losses[0] > 60
    assert losses[100] < 0.1  # 4e-4; 0.02 when all steps counted
    assert losses[-1] < 1e-12  # 1e-25


def test_noise_keeps_all_steps_counting() -> None:
    """Training on batches is as it was when all steps counted, to the last bit."""
    param, optimizer = start((1.0,) * 100, torch.float64)
    for k in range(1000):
        param.grad = 2 * param.detach() + cases.randn((100,), torch.float64, k)
        optimizer.step()
    assert uncounted(optimizer) == 0
    assert param.abs().max() < 1  # 0.5


def loaded(param: nn.Parameter, saved: dict[str, Any]) -> tuple[nn.Parameter, MADGRAD]:
    again = nn.Parameter(param.detach().clone())
    optimizer = MADGRAD([again], lr="auto")
    optimizer.load_state_dict(saved)
    return again, optimizer


def test_a_converged_run_is_resumed_exactly() -> None:
    param, optimizer = start((0.0, 0.0), torch.float64)
    descend(param, optimizer, rosenbrock, 300)
    assert 0.1 < uncounted(optimizer) < 0.9  # in between, so that a number lost would show
    again, other = loaded(param, copy.deepcopy(optimizer.state_dict()))
    losses = [descend(p, o, rosenbrock, 200) for p, o in ((param, optimizer), (again, other))]
    assert losses[0] == losses[1]
    assert optimizer.estimated_lr() == other.estimated_lr()
