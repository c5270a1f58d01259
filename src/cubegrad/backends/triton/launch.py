"""Every tensor of a batch in one launch, at the speed of the memory.

The kernel finds its tensors through tables of addresses in device memory. `rows` holds, for each
tensor, what stays in place from step to step; `grads` the addresses of the gradients, which do
not; `units` the (row, index) pairs that cut all tensors into pieces, one for each program. The
last program to finish increments the step counts.
"""

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cubegrad.backends import fused
from cubegrad.backends.batch import Batch, capturing
from cubegrad.backends.triton import on_device
from cubegrad.backends.triton.kernel import step_units
from cubegrad.options import Hyper

NAME = "triton"
FUSED = True

# A program updates SPAN blocks in a row. On an H200 (torch 2.11, Triton 3.6) the kernel then moved
# 100 % of the copy bandwidth in one tensor of 2^29, 94 % in ResNet-50's 161 tensors, and 99 % in
# bfloat16. One block a program lost 4 to 10 % to looking up its addresses. Programs that stay and
# walk over the units in strides lost 3 %: they drift apart, and open more pages of memory at once.
BLOCK = 1024
SPAN = 3
WARPS = 4
REGISTERS = 64
REGISTERS_FOR_SUMS = 80  # with 64 the sums cost 7 % of the kernel's time, with 80 0.8 %
PACK_DOUBLES = struct.Struct("6d").pack
UNPACK_INTEGERS = struct.Struct("6q").unpack

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


# What captured graphs read. It is never freed: we cannot know which replay is the last.
CAPTURED: list[Any] = []


def _pinned(host: Tensor, device: torch.device) -> Tensor:
    """Memory that the device can copy from while the host goes on."""
    return host if device.type == "cpu" else host.pin_memory()


class Launch:
    """A batch of dense tensors, and the tables that the kernel reads."""

    written: bytes
    grad_lengths: bytes

    def __init__(self, batch: Batch) -> None:
        param, grad, _, buffers, _ = batch.rows[0]
        self.device = param.device
        self.alive = fused.without_grads(batch)  # the tables hold their addresses
        # Two numbers more: a row of 64 bytes.
        table = torch.tensor([(*row, 0, 0) for row in fused.addresses(batch)])
        rows, sizes = _pinned(table, self.device), table[:, 5].tolist()
        units = _pinned(_cut(sizes, SPAN * BLOCK).int(), self.device)
        ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.rows, self.units = (t.to(self.device, non_blocking=True) for t in (rows, units))
        if capturing():  # each replay uploads the tables again
            CAPTURED.append((self, batch, rows, units))
        self.places = (self.units, ticket, len(rows), SPAN * BLOCK)
        self.programs = len(units)
        self.sums: Tensor | None = None  # of every unit, where they are wanted
        self.kernels: dict[tuple[bool, ...], Callable[..., None]] = {}
        dtypes = (DTYPES[tensor.dtype] for tensor in (param, grad, buffers[0]))
        self.constants = (batch.layout.method, batch.layout.keeps_initial_param, *dtypes, BLOCK)

    def table(self, grads: bytes) -> tuple[Tensor, bool]:
        """On the device. While a graph is captured, only its replays will upload the table."""
        host = _pinned(torch.frombuffer(bytearray(grads), dtype=torch.int64), self.device)
        table = host.to(self.device, non_blocking=True)
        lasting = not capturing()
        if not lasting:
            CAPTURED.append((self, host, table))
        return table, lasting

    def run(self, h: Hyper, table: Tensor) -> None:
        with on_device(self.device):
            self._run(h, table)

    def _run(self, h: Hyper, table: Tensor) -> None:
        if capturing():  # a graph holds addresses, not tensors
            CAPTURED.append((self, table))
        moving = (h.lr, h.momentum, 1.0 if h.shrink is None else h.shrink)
        host = [0.0 if isinstance(number, Tensor) else number for number in moving]
        doubles = PACK_DOUBLES(*host, h.eps, h.weight_decay, -1.0 if h.maximize else 1.0)
        tensors = [
            *(self._here(number, torch.float64) for number in moving),
            *(self._here(number, torch.float32) for number in (h.found_inf, h.grad_scale)),
            self._unit_sums(h),
        ]
        integers = UNPACK_INTEGERS(doubles)
        arguments = (self.rows, table, *self.places, *integers, *tensors, *self.constants)
        variant = tuple(tensor is None for tensor in tensors)
        kernel = self.kernels.get(variant)
        if kernel is not None:
            kernel(*arguments)
        else:
            self._compile(variant, arguments)
        if h.sums is not None:
            h.sums.add_(self._unit_sums(h).sum(dim=1).to(h.sums.device))

    def _here(self, number: Any, dtype: torch.dtype) -> Tensor | None:
        """A number that is a tensor, on this device."""
        if not isinstance(number, Tensor):
            return None
        return number.to(self.device, dtype, non_blocking=True)

    def _unit_sums(self, h: Hyper) -> Any:
        """Where each program stores its sums, if they are wanted."""
        if h.sums is None:
            return None
        if self.sums is None:
            self.sums = torch.zeros(3, self.programs, dtype=torch.float64, device=self.device)
        return self.sums

    def _compile(self, variant: tuple[bool, ...], arguments: tuple[Any, ...]) -> None:
        compiled = step_units[(self.programs,)](
            *arguments,
            num_warps=WARPS,
            maxnreg=REGISTERS if variant[-1] else REGISTERS_FOR_SUMS,
            enable_fp_fusion=False,  # else a step at lr 0 moves by the rounding of a product
        )
        if compiled is not None:  # the interpreter returns nothing
            # Without the just-in-time front end: 12 us a launch instead of 40.
            self.kernels[variant] = compiled[(self.programs, 1, 1)]


def _cut(sizes: list[int], length: int) -> Tensor:
    """(row, index) of every unit; one unit if there are no elements, to increment the counts."""
    counts = torch.tensor([triton.cdiv(size, length) for size in sizes])
    if not counts.any():
        counts[0] = 1
    rows = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = counts.cumsum(0) - counts
    return torch.stack((rows, torch.arange(len(rows)) - starts[rows]), dim=1)


checked = fused.checked
step = functools.partial(fused.step, Launch)
