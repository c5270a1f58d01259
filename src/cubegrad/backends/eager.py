"""rule.py, tensor by tensor: the reference every other backend is judged by."""

import torch

from cubegrad import distance, rule
from cubegrad.backends import coded, rounding
from cubegrad.backends.batch import Batch
from cubegrad.functions import CodedFunctions, TorchFunctions
from cubegrad.options import Hyper
from cubegrad.state.layout import state_dtype

NAME = "eager"
FUSED = False


def checked(batch: Batch) -> Batch:
    return batch


def step(batch: Batch, h: Hyper) -> None:
    STEPS[batch.layout.form](batch, h)


def _step_sums(batch: Batch, h: Hyper) -> None:
    names, rounds = batch.layout.buffers, batch.rounds
    for given in batch.rows:
        row = given if h.differentiable else given.with_dimensions()
        param, grad, step, buffers, _ = row
        # The last bit, and so a rounding, must not depend on how a parameter is sharded.
        xp = CodedFunctions if rounds else TorchFunctions
        dtype = state_dtype(param)
        k = step.to(dtype) if h.on_device else step.item()
        x, old = param, buffers
        if h.differentiable:  # autograd saves what the rule reads, so it must not be overwritten
            x, old = param.clone(), tuple(buffer.clone() for buffer in buffers)
        x, grad = x.to(dtype), grad.to(dtype)
        if h.grad_scale is not None:
            grad = grad / h.grad_scale.to(grad).reshape(())
        state = dict(zip(names, old, strict=True))
        new_x, new = rule.step(xp, batch.layout.rule, h, k, x, grad, state)
        if h.sums is not None:
            with torch.no_grad():
                sums = distance.step_sums(xp, batch.layout.rule, h, k, x, grad, state, new_x, new)
                h.sums.add_(torch.stack(sums).to(h.sums.device))
        exact = new_x
        if rounds:
            new_x = rounding.rounded(new_x, row, h.momentum)
        if param.dtype != dtype and "dual_offset" in new:
            rule.take_rounding(new, exact, rounding.nearest(new_x, param.dtype))
        finite = None if h.found_inf is None else h.found_inf.to(param.device).reshape(()) == 0
        values = (new_x, *(new[name] for name in names))
        for target, value in zip((param, *buffers), values, strict=True):
            if value is not target:
                target.copy_(value if finite is None else torch.where(finite, value, target))
        step += 1 if finite is None else finite.to(step)


STEPS = {"sums": _step_sums, "codes": coded.step}
