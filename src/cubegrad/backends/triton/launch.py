"""Every tensor of a group in one launch, at the speed of the memory.

The kernel finds its tensors through tables of addresses in device memory. `rows` holds, for each
tensor, what stays in place from step to step; `grads` the addresses of the gradients, which do
not; `units` the (row, index) pairs that cut all tensors into pieces, one for each program. The
last program to finish counts the steps.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cubegrad.backends.fused import step_once
from cubegrad.backends.launching import capturing, rows_of
from cubegrad.backends.triton.kernel import advance_estimate, step_units
from cubegrad.options import Hyper

# A program updates SPAN blocks in a row. On an H200 (torch 2.11, Triton 3.6) the kernel then moved
# 100 % of the copy bandwidth in one tensor of 2^29, 94 % in ResNet-50's 161 tensors, and 99 % in
# bfloat16. One block a program lost 4 to 10 % to looking up where it lies. Programs that stay and
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


# What a graph was captured with, for as long as it may be replayed: nobody says when that ends.
CAPTURED: list[Any] = []

ADVANCING: dict[tuple[Any, ...], Callable[..., None]] = {}  # compiled, by what they were made for


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
        if capturing():  # each replay uploads the tables anew
            CAPTURED.append((self, rows, units))
        self.places = (self.units, ticket, len(rows), SPAN * BLOCK)
        self.programs = len(units)
        self.sums: Tensor | None = None  # of every unit, where they are wanted
        self.kernels: dict[tuple[bool, ...], Callable[..., None]] = {}
        dtypes = (params[0].dtype, grad_dtype, buffers[0][0].dtype)
        self.constants = (method, len(buffers) == 3, *(DTYPES[d] for d in dtypes), BLOCK)

    def table(self, grads: bytes) -> tuple[Tensor, bool]:
        """The gradients' addresses on the device. What a graph uploads, only its replay has."""
        host = _pinned(torch.frombuffer(bytearray(grads), dtype=torch.int64), self.device)
        table = host.to(self.device, non_blocking=True)
        lasting = not capturing()
        if not lasting:
            CAPTURED.append((self, host, table))
        return table, lasting

    def run(self, h: Hyper, table: Tensor) -> None:
        """Update everything, with the gradients that the table lists."""
        with _on(self.device):
            self._run(h, table)

    def _run(self, h: Hyper, table: Tensor) -> None:
        if capturing():  # a graph knows addresses only
            CAPTURED.append((self, table))
        moving = (h.lr, h.momentum, 1.0 if h.shrink is None else h.shrink)
        host = [0.0 if isinstance(number, Tensor) else number for number in moving]
        doubles = PACK_DOUBLES(*host, h.eps, h.weight_decay, -1.0 if h.maximize else 1.0)
        tensors = [
            *(self._here(number, torch.float64) for number in moving),
            *(self._here(number, torch.float32) for number in (h.found_inf, h.grad_scale)),
            self._room(h),
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
            h.sums.add_(self._room(h).sum(dim=1).to(h.sums.device))

    def _here(self, number: Any, dtype: torch.dtype) -> Tensor | None:
        """A number that lives on a device, on this one."""
        if not isinstance(number, Tensor):
            return None
        return number.to(self.device, dtype, non_blocking=True)

    def _room(self, h: Hyper) -> Any:
        """Where the kernel puts its sums, if they are wanted."""
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
            # Past the just-in-time front end: 12 us a launch instead of 40.
            self.kernels[variant] = compiled[(self.programs, 1, 1)]


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Where Triton launches: on the current device, which may be another."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()


def _cut(sizes: list[int], length: int) -> Tensor:
    """(row, index) of every unit, row by row; with no element at all, one unit to count for all."""
    counts = torch.tensor([triton.cdiv(size, length) for size in sizes])
    if not counts.any():
        counts[0] = 1
    rows = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    starts = counts.cumsum(0) - counts
    return torch.stack((rows, torch.arange(len(rows)) - starts[rows]), dim=1)


def advance(
    values: Tensor,
    sums: Tensor,
    rates: Tensor,
    kept: Tensor | None,
    counts: Tensor,
    found_inf: Tensor | None,
) -> None:
    """An estimated learning rate one step on, in one launch: see the kernel."""
    if found_inf is not None:
        found_inf = found_inf.to(values.device, torch.float32, non_blocking=True)
    groups = len(values)
    room = triton.next_power_of_2(groups)
    arguments = (values, sums, rates, kept, counts, groups, found_inf, room)
    variant = (values.device, kept is None, found_inf is None, room)
    with _on(values.device):
        if variant in ADVANCING:
            ADVANCING[variant](*arguments)
            return
        compiled = advance_estimate[(1,)](*arguments, num_warps=1)
        if compiled is not None:
            ADVANCING[variant] = compiled[(1, 1, 1)]


step = functools.partial(step_once, Launch)
