"""One fused, threaded pass over every tensor of a group: the thin side of cpu.c."""

import functools
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from cubegrad.backends import look
from cubegrad.backends.prepared import rows_of, step_once
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
        threads = torch.get_num_threads()
        look.native.step(self.rows, self.starts, table, numbers, *self.kinds, LEVEL, threads)


step = functools.partial(step_once, Launch)
