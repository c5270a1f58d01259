"""One fused, threaded pass over every tensor of a group: the thin side of cpu.c."""

import functools
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from cubegrad.backends.fused import step_once
from cubegrad.backends.launching import rows_of
from cubegrad.backends.native import tensors as look
from cubegrad.options import Hyper

if look.native is None:
    raise ImportError(look.missing)

METHODS = {"madgrad": 0, "mirror_madgrad": 1}
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
LEVELS = ("baseline", "avx2", "avx512")
LEVEL = look.native.BEST_LEVEL  # of the instructions this machine has
NUMBERS = struct.Struct("6d").pack


class Launch:
    """Tensors of one set of dtypes, all lying densely, and what updates them."""

    def __init__(
        self,
        method: str,
        params: list[Tensor],
        grad_dtype: torch.dtype,
        steps: list[Tensor],
        buffers: Sequence[list[Tensor]],
    ) -> None:
        self.alive: Any = (params, steps, buffers)  # the tables hold their addresses
        rows = rows_of(params, steps, buffers)
        self.rows = array("q", chain.from_iterable(rows)).tobytes()
        sizes = (row[-1] for row in rows)
        self.starts = array("q", accumulate(sizes, initial=0)).tobytes()
        dtypes = (params[0].dtype, grad_dtype, buffers[0][0].dtype)
        self.kinds = (METHODS[method], *(KINDS[dtype] for dtype in dtypes))

    def table(self, grads: bytes) -> tuple[bytes, bool]:
        return grads, True

    def run(self, h: Hyper, table: bytes) -> None:
        """Update everything, with the gradients that the table lists."""
        if h.found_inf is not None and h.found_inf.item():
            return
        sign = -1.0 if h.maximize else 1.0
        if h.grad_scale is not None:
            sign /= h.grad_scale.item()
        shrink = 1.0 if h.shrink is None else float(h.shrink)
        numbers = NUMBERS(float(h.lr), float(h.momentum), shrink, h.eps, h.weight_decay, sign)
        how = (LEVEL, torch.get_num_threads(), 0 if h.sums is None else _address(h.sums))
        look.native.step(self.rows, self.starts, table, numbers, *self.kinds, *how)


def _address(sums: Tensor) -> int:
    """Where the kernel adds its three sums; it trusts the address."""
    whole = sums.is_cpu and sums.is_contiguous() and sums.numel() == 3
    if not whole or sums.dtype != torch.float64:
        kind = f"{sums.dtype} of shape {tuple(sums.shape)} on {sums.device}"
        raise ValueError(
            f"sums are {kind}, and must be three dense float64 numbers on the CPU; "
            "give torch.zeros(3, dtype=torch.float64)"
        )
    return sums.data_ptr()


step = functools.partial(step_once, Launch)
