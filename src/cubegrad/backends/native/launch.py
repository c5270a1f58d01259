"""One fused, threaded pass over every tensor of a batch: the Python side of step.c."""

import struct
from array import array
from itertools import accumulate, chain
from typing import Any

import torch

from cubegrad.backends import fused
from cubegrad.backends.batch import Batch
from cubegrad.backends.native import tensors
from cubegrad.options import Hyper
from cubegrad.rule import AVERAGED, FADING, WEIGHTED, Rule

if tensors.native is None:
    raise ImportError(tensors.missing)

NAME = "cpu"
FUSED = True
SQUARES = (WEIGHTED, FADING, AVERAGED)  # as the enum of step.h names them
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
CODES = 4  # the kind of a state in codes
LEVELS = ("baseline", "avx2", "avx512")
LEVEL = tensors.native.BEST_LEVEL  # of the instructions this machine has
NUMBERS = struct.Struct("7d").pack


class Launch:
    """A batch of dense tensors, and the tables that step.c reads."""

    written: bytes
    grad_lengths: bytes

    def __init__(self, batch: Batch) -> None:
        self.alive = fused.without_grads(batch)  # the tables hold their addresses
        form = batch.layout.form
        rows = fused.TABLES[form](batch)
        self.rows = array("q", chain.from_iterable(rows)).tobytes()
        sizes = (row[fused.SIZES[form]] for row in rows)
        self.starts = array("q", accumulate(sizes, initial=0)).tobytes()
        param, grad, _, buffers, _ = batch.rows[0]
        state = CODES if form == "codes" else KINDS[buffers[0].dtype]
        self.kinds = (_index(batch.layout.rule), KINDS[param.dtype], KINDS[grad.dtype], state)
        self.at_random = batch.rounds

    def table(self, grads: bytes) -> tuple[bytes, bool]:
        return grads, True

    def run(self, h: Hyper, table: bytes) -> None:
        if h.found_inf is not None and h.found_inf.item():
            return
        sign = -1.0 if h.maximize else 1.0
        if h.grad_scale is not None:
            sign /= h.grad_scale.item()
        shrink = 1.0 if h.shrink is None else float(h.shrink)
        moving = float(h.lr), float(h.momentum), shrink
        numbers = NUMBERS(*moving, h.eps, h.weight_decay, sign, float(h.mean_share))
        sums = 0
        if h.sums is not None:
            dense = h.sums.is_cpu and h.sums.shape == (3,) and h.sums.is_contiguous()
            if not dense or h.sums.dtype != torch.float64:
                raise ValueError(
                    f"sums are {h.sums.dtype} of shape {tuple(h.sums.shape)} on {h.sums.device}, "
                    "and must be three dense float64 numbers on the CPU; give torch.zeros(3, "
                    "dtype=torch.float64)"
                )
            sums = h.sums.data_ptr()
        how = (self.at_random, LEVEL, torch.get_num_threads(), sums)
        tensors.native.step(self.rows, self.starts, table, numbers, *self.kinds, *how)


def _index(rule: Rule) -> int:
    """The rule's place among those that step.h has loops for."""
    squares = SQUARES.index(rule.squares)
    shape = (rule.pulls, rule.holds, rule.relative, rule.averages, rule.anchored)
    fields = (rule.root, rule.growth_root or 0, squares, *shape)
    index: int = tensors.native.RULES.index(fields)
    return index


checked = fused.checked


def step(batch: Batch, h: Hyper) -> Any:
    return fused.step(Launch, batch, h)
