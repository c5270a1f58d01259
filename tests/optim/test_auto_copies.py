"""lr="auto" on a GPU, without one: its arithmetic copies nothing from the host to the device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cubegrad import distance
from cubegrad.functions import TorchFunctions
from cubegrad.options import Hyper
from cubegrad.rule import MADGRAD, MADGRADW_AUTO, Rule


class Copies(TorchDispatchMode):
    """Notes operations that take a tensor of the host and make one of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if isinstance(made, Tensor) and made.is_cuda and not all(one.is_cuda for one in given):
            self.found.append(func)
        return made


def table(rows: int, columns: int) -> list[tuple[Tensor, ...]]:
    return [torch.empty(columns, dtype=torch.float64, device="cuda").unbind() for _ in range(rows)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_auto_gpu.py asks the GPU itself")
@pytest.mark.parametrize("rule", [MADGRAD, MADGRADW_AUTO], ids=lambda rule: rule.name)
def test_an_estimate_advances_without_copies_to_the_device(rule: Rule) -> None:
    """Each would wait for the device, and could not be captured in a graph."""
    with FakeTensorMode(), Copies() as copies:
        rows, sums, factors = table(2, 7), table(2, 3), table(1, 2)[0]
        hypers = [Hyper(factors[0], 0.9, 1e-6, 0.0, None, False)] * 2
        new = distance.advance(TorchFunctions, rule, rows, sums, factors, (5, 7), hypers)
        assert all(number.is_cuda for row in new for number in row)
        assert not copies.found
        torch.as_tensor(1.0, device="cuda")
        assert copies.found
