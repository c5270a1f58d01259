"""Batches whose state is in codes, and how much two backends differ on them."""

import cases
import pytest
import torch

from cubegrad import codec
from cubegrad.backends import eager
from cubegrad.backends.batch import Batch, Row
from cubegrad.functions import CodedFunctions
from cubegrad.options import Hyper
from cubegrad.rule import RULES, SCHEDULE_FREE_AUTO
from cubegrad.state import blocks, layout

each_rule = pytest.mark.parametrize(
    "rule",
    # Which is much like SCHEDULE_FREE and MADGRADW_AUTO.
    [
        pytest.param(rule, marks=pytest.mark.thorough) if rule is SCHEDULE_FREE_AUTO else rule
        for rule in RULES
    ],
    ids=lambda rule: rule.name,
)
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)
GRAD_DTYPES = (*DTYPES, torch.float64)
# Rows of one block and several, of whole vectors and not, with a short last block and not.
SHAPES = ((640, 64), (300, 147), (160, 256), (140, 300), (70, 576), (40, 16, 33, 2), (9, 4608))
PLAIN = Hyper(0.01, 0.9, 1e-6, weight_decay=0.0, shrink=None, maximize=False, mean_share=0.2)
HYPERS = {
    "plain": PLAIN,
    "no-momentum": PLAIN._replace(momentum=0.0),
    "high-momentum": PLAIN._replace(momentum=0.97),
    "eps0": PLAIN._replace(eps=0.0),
    "l2-maximize": PLAIN._replace(weight_decay=0.1, maximize=True),
    "shrink": PLAIN._replace(shrink=0.75),
    "scaled": PLAIN._replace(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0)),
}


def fresh(rule, h, dtype, shapes=SHAPES, place=torch.clone):
    """A batch before its first step."""
    used = layout.CODED_LAYOUTS[rule.name][0 if h.momentum else -1]
    rows = []
    for seed, shape in enumerate(shapes):
        param = place(cases.randn(shape, torch.float32, seed).mul(0.1).to(dtype))
        state = used.fresh(param, count_on_device=False)
        buffers = tuple(map(state.get, used.buffers))
        rows.append(Row(param, torch.empty(0), state["step"], buffers, 2**32 - 1000 + seed))
    return Batch(used, rows)


def with_gradients(batch, k, dtype, place=torch.clone):
    def grad(param, seed):
        values = cases.randn(tuple(param.shape), torch.float32, 1000 * k + seed)
        values[::3, :5] = 0.0  # a coordinate may have no gradient yet
        return place((0.1 * values).to(dtype))

    rows = [row._replace(grad=grad(row.param, seed)) for seed, row in enumerate(batch.rows)]
    return batch._replace(rows=rows)


def middle(rule, h, dtype, grad_dtype=torch.float32, **kinds):
    """A batch after a few steps, with the gradients of the next one."""
    batch = fresh(rule, h, dtype, **kinds)
    for k in range(3):
        eager.step(with_gradients(batch, k, grad_dtype), h)
    return with_gradients(batch, 3, grad_dtype)


def copied(batch):
    rows = [
        Row(*(t.clone() for t in row[:3]), tuple(t.clone() for t in row.buffers), row.first_index)
        for row in batch.rows
    ]
    return batch._replace(rows=rows)


def tensors_of(batch):
    return [tensor for row in batch.rows for tensor in (row.param, row.step, *row.buffers)]


def same(a, b):
    return all(
        cases.same_bits(s, t) if s.is_floating_point() else torch.equal(s, t)
        for s, t in zip(tensors_of(a), tensors_of(b), strict=True)
    )


def codes_of(batch, row):
    return batch.layout.codes(row.buffers)


def sizes(codes, shape):
    """Codes of roots counted from one zero for all blocks; a scale may differ by a factor of 2."""
    binades = torch.log2(codes.root_scale.clamp(min=2.0**-126)).int()
    _, root = codec.unpacked(CodedFunctions, codes)
    per_binade = 64
    if codes.offset is None:
        root, per_binade = root >> 1, 32
    return root + per_binade * blocks.joined(
        binades.unsqueeze(-1).expand(-1, -1, min(codec.BLOCK, codec.row_length(shape))), shape
    )


def offset_of(codes, shape):
    """z - x."""
    width = min(codec.BLOCK, codec.row_length(shape))
    scale = codes.offset_scale.double().unsqueeze(-1).expand(-1, -1, width)
    return offset_codes(codes).double() * blocks.joined(scale, shape)


def offset_codes(codes):
    return codec.unpacked(CodedFunctions, codes)[0]


# How often a parameter may be rounded to the other neighbour: its last place is 2^13 or 2^16 last
# places of the float32 before, of which the cube root may be wrong by a few.
ROUNDED_APART = {torch.float16: 1e-3, torch.bfloat16: 1e-4}


class Differences:
    """How much two backends differ after single steps from the same state."""

    def __init__(self, rule, momentum=0.9):
        self.codes = self.params = self.count = 0
        self.share = codec.share(CodedFunctions, rule, momentum)

    def add(self, a, b):
        for one, two in zip(a.rows, b.rows, strict=True):
            first, second = codes_of(a, one), codes_of(b, two)
            if one.param.dtype == torch.float32 and first.offset is not None:
                self.add_dual_points(one.param, first, two.param, second)
            else:
                self.add_params(one.param, two.param)
            self.add_codes(*(sizes(codes, one.param.shape) for codes in (first, second)))
            assert torch.equal(first.root == 0, second.root == 0)
            if first.offset is not None:
                scales = first.offset_scale, second.offset_scale
                torch.testing.assert_close(*scales, rtol=1e-3, atol=0)
                # In half precision z - x makes up for the rounding of x.
                half = one.param.dtype in HALVES
                alike = (one.param == two.param) | one.param.isnan() | (not half)
                self.add_codes(offset_codes(first)[alike], offset_codes(second)[alike])
            if first.initial is not None:
                assert torch.equal(first.initial, second.initial)
                assert torch.equal(first.initial_scale, second.initial_scale)
            assert one.step == two.step

    def add_params(self, x, y):
        size = max(1.0, x[x.isfinite()].abs().max().item())
        rtol = 5e-7 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=rtol, atol=5e-7 * size, equal_nan=True)
        if x.dtype in ROUNDED_APART:
            apart = (x != y) & ~x.isnan()
            self.params += apart.sum().item() / ROUNDED_APART[x.dtype]
        self.count += x.numel()

    def add_dual_points(self, x, codes, y, others):
        """Where a code of z - x differs, so does x, by the part of the error that it takes in."""
        pairs = [(x, offset_of(codes, x.shape)), (y, offset_of(others, y.shape))]
        z, w = (param.double() + offset * self.share for param, offset in pairs)
        size = max(1.0, z[z.isfinite()].abs().max().item())
        torch.testing.assert_close(z, w, rtol=5e-7, atol=5e-7 * size, equal_nan=True)
        alike = offset_codes(codes) == offset_codes(others)
        torch.testing.assert_close(x[alike], y[alike], rtol=5e-7, atol=5e-7 * size, equal_nan=True)
        self.count += x.numel()

    def add_codes(self, a, b):
        away = (a - b).abs()
        assert away.max() <= 1
        self.codes += int(away.sum()) / 1e-4

    def check(self):
        assert self.codes <= self.count
        assert self.params <= self.count
