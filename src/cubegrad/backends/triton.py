"""One kernel: every tensor of a group in one launch, at the speed of the memory.

The kernel finds its tensors through tables of addresses in device memory. `rows` holds, for each
tensor, what stays in place from step to step; `grads` the addresses of the gradients, which do
not; `units` the (row, index) pairs that cut all tensors into pieces, one for each program. The
last program to finish counts the steps.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cubegrad.backends.prepared import rows_of, step_once
from cubegrad.backends.triton_kernel import step_units
from cubegrad.options import Hyper

# A program updates SPAN blocks in a row. On an H200 (torch 2.11, Triton 3.6) the kernel then moved
# 100 % of the copy bandwidth in one tensor of 2^29, 94 % in ResNet-50's 161 tensors, and 99 % in
# bfloat16. One block a program lost 4 to 10 % to looking up where it lies. Programs that stay and
# walk over the units in strides lost 3 %: they drift apart, and open more pages of memory at once.
BLOCK = 1024
SPAN = 3
WARPS = 4
REGISTERS = 64
PACK_DOUBLES = struct.Struct("6d").pack
UNPACK_INTEGERS = struct.Struct("6q").unpack

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


# What a graph was captured with, for as long as it may be replayed: nobody says when that ends.
CAPTURED: list[Any] = []


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    """On the host, where the device can fetch it while the host goes on."""
    return host if device.type == "cpu" else host.pin_memory()


class Launch:
    """Tensors of one device and one set of dtypes, all lying densely, and what updates them."""

    def __init__(
        self,
        method: str,
        params: list[Tensor],
        grad_dtype: torch.dtype,
        steps: list[Tensor],
        buffers: Sequence[list[Tensor]],
    ) -> None:
        self.device = params[0].device
        self.alive: Any = (params, steps, buffers)  # the tables hold their addresses
        # Two numbers more: a row of 64 bytes.
        table = torch.tensor([(*row, 0, 0) for row in rows_of(params, steps, buffers)])
        rows, sizes = _pinned(table, self.device), table[:, 5].tolist()
        units = _pinned(_cut(sizes, SPAN * BLOCK).int(), self.device)
        ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.rows, self.units = (t.to(self.device, non_blocking=True) for t in (rows, units))
        if _capturing(self.device):  # each replay uploads the tables anew
            CAPTURED.append((self, rows, units))
        self.places = (self.units, ticket, len(rows), SPAN * BLOCK)
        self.programs = len(units)
        self.sums: Tensor | None = None  # of each block of each unit, where they are wanted
        self.kernels: dict[tuple[bool, ...], Callable[..., None]] = {}
        dtypes = (params[0].dtype, grad_dtype, buffers[0][0].dtype)
        self.constants = (method, len(buffers) == 3, *(DTYPES[d] for d in dtypes), BLOCK)

    def table(self, grads: bytes) -> tuple[Tensor, bool]:
        """The gradients' addresses on the device. What a graph uploads, only its replay has."""
        host = _pinned(torch.frombuffer(bytearray(grads), dtype=torch.int64), self.device)
        table = host.to(self.device, non_blocking=True)
        capturing = _capturing(self.device)
        if capturing:
            CAPTURED.append((self, host, table))
        return table, not capturing

    def run(self, h: Hyper, table: Tensor) -> None:
        """Update everything, with the gradients that the table lists."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self._run(h, table)
        else:
            self._run(h, table)

    def _run(self, h: Hyper, table: Tensor) -> None:
        moving = (h.lr, h.momentum, 1.0 if h.shrink is None else h.shrink)
        gathered = None
        if h.on_device:
            gathered, moving = _gathered(moving, self.device), (0.0, 0.0, 0.0)
        doubles = PACK_DOUBLES(*moving, h.eps, h.weight_decay, -1.0 if h.maximize else 1.0)
        found_inf, grad_scale = (
            None if t is None else t.to(self.device, torch.float32, non_blocking=True)
            for t in (h.found_inf, h.grad_scale)
        )
        arguments = (
            *(self.rows, table, *self.places),
            *UNPACK_INTEGERS(doubles),
            *(gathered, found_inf, grad_scale, self._room(h)),
            *self.constants,
        )
        variant = (gathered is None, found_inf is None, grad_scale is None, h.sums is None)
        kernel = self.kernels.get(variant)
        if kernel is not None:
            kernel(*arguments)
        else:
            self._compile(variant, arguments)
        if h.sums is not None:
            h.sums.add_(self._room(h).sum(dim=1).to(h.sums.device))

    def _room(self, h: Hyper) -> Any:
        """Where the kernel puts its sums. Units end early, and leave what is past their end 0."""
        if h.sums is not None and self.sums is None:
            places = (3, self.programs * SPAN)
            self.sums = torch.zeros(places, dtype=torch.float64, device=self.device)
        return None if h.sums is None else self.sums

    def _compile(self, variant: tuple[bool, ...], arguments: tuple[Any, ...]) -> None:
        compiled = step_units[(self.programs,)](
            *arguments,
            num_warps=WARPS,
            maxnreg=REGISTERS,
            enable_fp_fusion=False,  # else a step at lr 0 moves by the rounding of a product
        )
        if compiled is not None:  # the interpreter returns nothing
            # Past the just-in-time front end: 12 us a launch instead of 40.
            self.kernels[variant] = compiled[(self.programs, 1, 1)]


def _cut(sizes: list[int], length: int) -> Tensor:
    """(row, index) of every unit, row by row; with no element at all, one unit to count for all."""
    counts = torch.tensor([triton.cdiv(size, length) for size in sizes])
    if not counts.any():
        counts[0] = 1
    rows = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = counts.cumsum(0) - counts
    return torch.stack((rows, torch.arange(len(rows)) - starts[rows]), dim=1)


def _gathered(numbers: tuple[float | Tensor, ...], device: torch.device) -> Tensor:
    """Numbers some of which live on the device, put together there without a look at them."""
    tensors = [
        n.to(device, torch.float64, non_blocking=True)
        if isinstance(n, Tensor)
        else torch.full((), n, dtype=torch.float64, device=device)
        for n in numbers
    ]
    return torch.stack(tensors)


step = functools.partial(step_once, Launch)
