"""An optimizer that "estimates" numbers known beforehand: half as much again after each step."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import SGD

FIRST = 1e-4


class Growing(SGD):
    """Under lr="auto" as cubegrad.MADGRAD has it: a group's lr is a factor, 1 at first."""

    first = FIRST

    def __init__(self, params: Iterable[Tensor], lr: str, weight_decay: float) -> None:
        assert lr == "auto"
        super().__init__(params, lr=1.0, weight_decay=weight_decay)
        self.param_groups[0]["found"] = self.first  # where a state dict keeps it

    def estimated_lr(self) -> float:
        found: float = self.param_groups[0]["found"]
        return found

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        factor, group["lr"] = group["lr"], group["lr"] * group["found"]
        super().step(closure)
        group["lr"] = factor
        group["found"] *= 1.5
