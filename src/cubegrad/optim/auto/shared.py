"""One estimate of processes that each hold other parameters: pipeline stages, ZeRO-1, FSDP1.

Each adds its own sums, and the totals over the processes advance the same numbers in all of them.
Parameters that are DTensors need none of this: they know their processes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from cubegrad.optim.auto.estimate import Estimate


class Shared:
    """The processes of `MADGRAD.share_estimate`."""

    def __init__(self, process_group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "share_estimate() needs the processes of torch.distributed, which has not been "
                "initialized; call init_process_group first, or leave it out in a single process"
            )
        self.process_group = process_group

    def default_device(self) -> torch.device:
        """Where a process that holds no parameter takes part."""
        backend = str(dist.get_backend(self.process_group))
        return torch.device("cuda" if backend == "nccl" else "cpu")

    def sum(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers, group=self.process_group)
        return numbers

    def largest(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.process_group)
        return numbers

    def agreed(
        self, first: tuple[float, float] | None, steps: float, device: torch.device
    ) -> tuple[tuple[float, float] | None, float]:
        """Begin in all processes or in none, at the same step."""
        numbers = torch.tensor([float(first is None), steps], dtype=torch.float64, device=device)
        waits, steps = self.largest(numbers).tolist()
        return (None if waits else first), steps

    def totals(
        self, estimate: "Estimate", counts: Sequence[int] | Tensor, found_inf: Tensor | None
    ) -> tuple[Any, Any, Tensor | None]:
        """Replace the sums by those over the processes.

        Returns each group's count of coordinates, which groups have a gradient, and whether any
        process found an overflow. On a GPU all of them are tensors, which nobody waits for.
        """
        sums = estimate.sums
        own = [torch.as_tensor(column, dtype=torch.float64) for column in (counts, estimate.live)]
        columns = [column.to(sums.device, non_blocking=True)[:, None] for column in own]
        overflow = torch.zeros_like(columns[0])
        if found_inf is not None:
            overflow += found_inf.to(overflow)
        table = self.sum(torch.cat([sums, *columns, overflow], dim=1))
        *new_sums, counted, groups_live, overflows = table.unbind(1)
        sums.copy_(torch.stack(new_sums, 1))
        any_overflow = None if found_inf is None else (overflows[:1] > 0).float()
        live = groups_live > 0
        if estimate.on_host:
            return counted.tolist(), live.tolist(), any_overflow
        return counted.contiguous(), live.double(), any_overflow
