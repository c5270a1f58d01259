"""Runs with and without gradient release, and their comparison."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import cases
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 64  # its square is just enough for codes
HELD_BYTES = 1000  # instead of 2^18: matrices of WIDTH are stepped during backward, vectors later


class Net(nn.Module):
    """Tied weights, a layer used twice, a frozen one, an unused one."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.to(device, dtype)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(self.twice(torch.tanh(self.twice(x)))) + self.frozen(x)

    def forward(self, tokens: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.embedding(tokens)
        if reentrant is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=reentrant)
        return functional.linear(torch.tanh(self.last(x)), self.embedding.weight)


def loss_of(model: nn.Module, k: int, reentrant: bool | None = None) -> Tensor:
    device = next(model.parameters()).device
    tokens = torch.randint(WIDTH, (16,), generator=torch.Generator().manual_seed(k)).to(device)
    return functional.cross_entropy(model(tokens, reentrant).float(), tokens.roll(1))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "lr": 3e-3}]


def train(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int] = range(8),
    scheduler: Any = None,
    reentrant: bool | None = None,
    change: Callable[[int, Any], None] = lambda *_: None,
) -> None:
    for k in steps:
        change(k, optimizer)
        loss_of(model, k, reentrant).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def decaying(optimizer: Any) -> Any:
    """A rate that changes at every step, from 0 on."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(k, 3) / 3 * 0.9**k)


def pair(
    build: Callable[[nn.Module], Any], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[tuple[Net, Any]]:
    """The same model and optimizer twice, the second with gradient release."""
    runs = []
    for _ in range(2):
        model = Net(dtype, device)
        runs.append((model, build(model)))
    runs[1][1].release_gradients()
    return runs


def assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    """The weights and the state, bit for bit."""
    (model, optimizer), (again, released) = one, other
    names = [name for name, _ in model.named_parameters()]
    triples = zip(names, model.parameters(), again.parameters(), strict=True)
    for name, p, q in triples:
        assert cases.same_bits(p.detach(), q.detach()), name
        assert set(optimizer.state[p]) == set(released.state[q]), name
        for key, value in optimizer.state[p].items():
            assert cases.same_bits(value, released.state[q][key]), (name, key)
    for mine, its in zip(optimizer.param_groups, released.param_groups, strict=True):
        assert mine["last_eps"] == its["last_eps"]


def params_of(optimizer: Any) -> list[Tensor]:
    groups = (group["params"] for group in optimizer.param_groups)
    return list(itertools.chain.from_iterable(groups))
