"""A small classifier under lr="auto", for the tests that need a real training run."""

from typing import Any

import torch
from short_runs import tanh_net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cubegrad import MADGRAD


class Classifier:
    """A network, its optimizer, and the same batches every time."""

    def __init__(
        self,
        groups: Any = None,
        dtype: torch.dtype = torch.float32,
        cls: Any = MADGRAD,
        **options: Any,
    ) -> None:
        self.net = tanh_net(9, 17, 3).to(dtype)
        params = self.net.parameters() if groups is None else groups(self.net)
        self.optimizer = cls(params, lr="auto", **options)
        self.dtype = dtype

    def train(self, steps: range, scale: float = 1.0, step: Any = None) -> Tensor:
        for k in steps:
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(32, 9, generator=generator, dtype=torch.float64).to(self.dtype)
            self.optimizer.zero_grad()
            (cross_entropy(self.net(x), x[:, :3].argmax(1)) * scale).backward()
            (step or self.optimizer.step)()
        return self.weights()

    def weights(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.net.parameters()])


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": "auto"}]
