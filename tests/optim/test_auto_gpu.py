"""MADGRAD(lr="auto") on a GPU: no step waits for the device, and steps can be captured."""

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from cubegrad import MADGRAD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WAYS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True, "fused": False},
    "eager": {"foreach": False, "fused": False},
}


def start(**options: Any) -> tuple[list[Tensor], Callable[[], None], MADGRAD]:
    """Two groups of parameters, and a function that writes gradients of |x - 3|² / 2 in place."""
    torch.manual_seed(0)
    params = [torch.randn(n, device="cuda").requires_grad_() for n in (5000, 7, 3072)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    optimizer = MADGRAD(groups, lr="auto", **options)
    grads = [torch.zeros_like(param) for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad

    def fill() -> None:
        for param, grad in zip(params, grads, strict=True):
            grad.copy_(param.detach() - 3)

    fill()
    return params, fill, optimizer


@pytest.mark.parametrize("way", WAYS)
def test_only_the_first_step_waits_for_the_device(way: str) -> None:
    _, fill, optimizer = start(**WAYS[way])
    optimizer.step()
    before = optimizer.estimated_lr()
    with cases.no_waiting():
        for _ in range(20):
            fill()
            optimizer.step()
    assert optimizer.estimated_lr() > 2 * before


@pytest.mark.parametrize("way", WAYS)
def test_nor_does_one_with_a_parameter_that_has_no_gradient(way: str) -> None:
    params, fill, optimizer = start(**WAYS[way])
    optimizer.step()
    params[1].grad = None
    optimizer.step()
    with cases.no_waiting():
        for _ in range(5):
            fill()
            optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_captured_step_equals_the_others(way: str) -> None:
    plain, fill_plain, expected = start(**WAYS[way], capturable=True)
    params, fill, optimizer = start(**WAYS[way], capturable=True)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fill()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill()
        optimizer.step()
    for _ in range(15):
        graph.replay()
    rates = []
    for _ in range(18):
        fill_plain()
        expected.step()
        rates.append(expected.estimated_lr())
    assert rates[-1] > 2 * rates[0]
    assert optimizer.estimated_lr() == expected.estimated_lr()
    for param, other in zip(params, plain, strict=True):
        assert torch.equal(param, other)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_before_the_first_step_is_refused() -> None:
    params, _, optimizer = start(fused=True, capturable=True)
    before = [param.detach().clone() for param in params]
    with (
        pytest.raises(RuntimeError, match="run one step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    assert all(map(torch.equal, params, before))
