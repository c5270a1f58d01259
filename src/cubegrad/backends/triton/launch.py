"""Every tensor of a batch in one launch, at the speed of the memory.

The kernel finds its tensors through tables of addresses in device memory. `rows` holds, for each
tensor, what stays in place from step to step; `grads` the addresses of the gradients, which do
not; `units` the (row, index) pairs that cut all tensors into pieces, one for each program. The
last program to finish increments the step counts.
"""

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cubegrad.backends import fused
from cubegrad.backends.batch import Batch, capturing
from cubegrad.backends.triton import on_device
from cubegrad.backends.triton.coded import step_coded_units
from cubegrad.backends.triton.kernel import step_units
from cubegrad.options import Hyper
from cubegrad.rule import Rule

NAME = "triton"
FUSED = True


# A program updates three blocks of 1,024 elements in a row. On an H200 (torch 2.11, Triton 3.6) the
# kernel then moved 100 % of the copy bandwidth in one tensor of 2^29, 94 % in ResNet-50's 161
# tensors, and 99 % in bfloat16. One block a program lost 4 to 10 % to looking up its addresses.
# Programs that stay and walk over the units in strides lost 3 %: they drift apart, and open more
# pages of memory at once.
BLOCK = 1024
SPAN = 3 * BLOCK
# Of states in codes a program, one warp, updates so many blocks of 256: the fewer, the sooner all
# programs end; the more, the less they look up.
CODED_SPANS = (8, 32)
MANY_BLOCKS = 2**18
# Above, 1/(∛ν + ε) is finite in float32, and √ν matters only where ν is a normal number.
SMALL_EPS = {3: 1e-30, 2: 1e-12}
PACK_DOUBLES = struct.Struct("7d").pack
UNPACK_INTEGERS = struct.Struct("7q").unpack

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


class Plan(NamedTuple):
    """How a kernel is launched for a batch."""

    kernel: Any
    rows: list[tuple[int, ...]]  # of its table
    sizes: list[int]  # of the rows: elements, or blocks of codes
    span: int  # how many of them a program updates
    warps: int
    registers: tuple[int, int]  # for a thread, without sums and with them
    constants: tuple[Any, ...]
    root: int  # of the rule
    has_offset: bool = False  # codes of z - x


def fields(rule: Rule) -> tuple[Any, ...]:
    """What the kernels take of a rule, as constants."""
    shape = (rule.pulls, rule.holds, rule.relative, rule.averages, rule.anchored)
    return rule.root, rule.growth_root or 0, rule.squares, *shape


def _plan(batch: Batch) -> Plan:
    param, grad, _, buffers, _ = batch.rows[0]
    # The length of a row counts with a spacing only; then it is that of a convolution's kernels.
    rows = [
        (*row, first, length << 32 | spacing if spacing > 1 else 1)
        for *row, length, first, spacing in fused.addresses(batch)
    ]
    dtypes = (DTYPES[tensor.dtype] for tensor in (param, grad, buffers[0]))
    form = (*fields(batch.layout.rule), batch.layout.keeps_point)
    at_random = batch.rounds
    constants = (*form, *dtypes, BLOCK, at_random)
    # With 64 registers the sums cost 7 % of the kernel's time, with 80 0.8 %. With 8 more, rounding
    # at random puts no more of them into memory than rounding to nearest.
    registers = (72, 88) if at_random else (64, 80)
    if batch.layout.rule.anchored:
        # For sm_90, 144 bytes of a thread are spilled with 80 registers, 16 with 112; not timed.
        registers = (72, 112)
    sizes = [row[fused.SIZES["sums"]] for row in rows]
    return Plan(step_units, rows, sizes, SPAN, 4, registers, constants, batch.layout.rule.root)


def _coded_plan(batch: Batch) -> Plan:
    numbers = fused.coded_addresses(batch)
    rows = [(*row, 0, 0, 0, 0) for row in numbers]  # 128 bytes each
    sizes = [row[fused.SIZES["codes"]] for row in rows]
    span = CODED_SPANS[sum(sizes) >= MANY_BLOCKS]
    whole = all(map(_is_whole, numbers))
    dtypes = (DTYPES[tensor.dtype] for tensor in batch.rows[0][:2])
    has_offset = "offset_code" in batch.layout.buffers
    rule = batch.layout.rule
    constants = (*fields(rule), has_offset, *dtypes, whole)
    registers = (72, 96) if whole else (80, 96)
    form = (constants, rule.root, has_offset)
    return Plan(step_coded_units, rows, sizes, span, 1, registers, *form)


PLANS = {"sums": _plan, "codes": _coded_plan}  # by the form of the state


def _is_whole(row: tuple[int, ...]) -> bool:
    """Whether all blocks of a parameter are full and lie on 16-byte boundaries."""
    param, offset, _, root, _, initial, _, _, _, length, _, spacing = row
    return length % 256 == 0 and spacing == 1 and (param | offset | root | initial) % 16 == 0


class Launch:
    """A batch of dense tensors, and the tables that the kernel reads."""

    written: bytes
    grad_lengths: bytes

    def __init__(self, batch: Batch) -> None:
        self.device = batch.rows[0].param.device
        self.alive = fused.without_grads(batch)  # the tables hold their addresses
        self.plan = plan = PLANS[batch.layout.form](batch)
        rows = _pinned(torch.tensor(plan.rows), self.device)
        units = _pinned(_cut(plan.sizes, plan.span).int(), self.device)
        ticket = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.rows, self.units = (t.to(self.device, non_blocking=True) for t in (rows, units))
        if capturing():  # each replay uploads the tables again
            CAPTURED.append((self, batch, rows, units))
        self.places = (self.units, ticket, len(rows), plan.span)
        self.programs = len(units)
        self.sums: Tensor | None = None  # of every unit, where they are wanted
        self.kernels: dict[tuple[int, ...], Callable[..., None]] = {}

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
        moving = (h.lr, h.momentum, 1.0 if h.shrink is None else h.shrink, h.mean_share)
        host = [0.0 if isinstance(number, Tensor) else number for number in moving]
        doubles = PACK_DOUBLES(*host, h.eps, h.weight_decay, -1.0 if h.maximize else 1.0)
        tensors = [
            *(self._here(number, torch.float64) for number in moving),
            *(self._here(number, torch.float32) for number in (h.found_inf, h.grad_scale)),
            self._unit_sums(h),
        ]
        integers = UNPACK_INTEGERS(doubles)
        variant = tuple(int(tensor is None) for tensor in tensors)
        constants = self.plan.constants
        own: tuple[int, ...]
        if self.plan.kernel is step_coded_units:
            low_bit = isinstance(h.momentum, Tensor) or h.momentum != 0
            has_offset = self.plan.has_offset
            no_eps = h.eps < SMALL_EPS[self.plan.root]
            own = int(low_bit and has_offset), _is_plain(h), h.shrink is not None, no_eps
        else:  # with decay the sums need more registers than a thread has
            own = (h.sums is not None and h.weight_decay != 0,)
        variant, constants = own + variant, constants + own
        arguments = (self.rows, table, *self.places, *integers, *tensors, *constants)
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

    def _compile(self, variant: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        plan = self.plan
        compiled = plan.kernel[(self.programs,)](
            *arguments,
            num_warps=plan.warps,
            maxnreg=plan.registers[not variant[-1]],
            enable_fp_fusion=False,  # else a step at lr 0 moves by the rounding of a product
        )
        if compiled is not None:  # the interpreter returns nothing
            # Without the just-in-time front end: 12 us a launch instead of 40.
            self.kernels[variant] = compiled[(self.programs, 1, 1)]


def _is_plain(h: Hyper) -> bool:
    """Without coupled decay, maximize or a GradScaler, which spares some of the instructions."""
    return not h.weight_decay and not h.maximize and h.grad_scale is None


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
