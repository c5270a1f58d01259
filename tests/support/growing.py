"""An optimizer with known "estimates" of its learning rate: each is 1.5 times the last."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import SGD

FIRST = 1e-4


class Growing(SGD):
    """SGD with lr="auto" as in cubegrad.MADGRAD: a group's lr is a factor, 1 at first."""

    first = FIRST

    def __init__(self, params: Iterable[Tensor], lr: str, weight_decay: float) -> None:
        assert lr == "auto"
        super().__init__(params, lr=1.0, weight_decay=weight_decay)
        self.param_groups[0]["estimate"] = self.first  # so that state dicts have it

    def estimated_lr(self) -> float:
        estimate: float = self.param_groups[0]["estimate"]
        return estimate

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        factor, group["lr"] = group["lr"], group["lr"] * group["estimate"]
        super().step(closure)
        group["lr"] = factor
        group["estimate"] *= 1.5
