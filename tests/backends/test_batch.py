"""Another form of the state passes through the rooms of a step, which do not look into it."""

from functools import partial
from types import SimpleNamespace

import torch

from cubegrad import MADGRAD
from cubegrad.backends import fused
from cubegrad.state import layout


class Coded(layout.Layout):
    """Integers and one scale for all of them."""

    def forms(self, param):
        return [(torch.Size([param.numel()]), torch.int8), (torch.Size([1]), torch.float32)]

    def fresh(self, param, count_on_device):
        codes, scale = (torch.zeros(shape, dtype=dtype) for shape, dtype in self.forms(param))
        return {"step": layout.counter(param, count_on_device), "codes": codes, "scale": scale + 2}


class Launch:
    """Counts in the codes, and takes the scale from the parameter."""

    made = 0

    def __init__(self, batch):
        Launch.made += 1
        self.alive = fused.without_grads(batch)

    def table(self, grads):
        return grads, True

    def run(self, h, table):
        assert len(table) == 8 * len(self.alive)
        for param, step, (codes, scale) in self.alive:
            param.sub_(h.lr * scale)
            codes += 1
            step += 1


BACKEND = SimpleNamespace(
    NAME="coded", FUSED=True, checked=fused.checked, step=partial(fused.step, Launch)
)


def test_a_state_of_integers_and_scales_is_stepped_and_repeated(monkeypatch):
    coded = Coded(MADGRAD._rule, ("codes", "scale"), None)
    monkeypatch.setitem(layout.LAYOUTS, "madgrad", (coded,))
    monkeypatch.setattr(Launch, "made", 0)
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,))]
    optimizer = MADGRAD(params, lr=0.5)
    monkeypatch.setattr(optimizer, "_backend", lambda _: BACKEND)
    for _ in range(4):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert Launch.made == 1
    for param in params:
        assert torch.equal(param, torch.full_like(param, 1 - 4 * 0.5 * 2))
        assert optimizer.state[param]["codes"].tolist() == [4] * param.numel()
        assert optimizer.state[param]["step"] == 4
    optimizer.state[params[0]]["codes"] = torch.zeros(12, dtype=torch.int8)
    optimizer.step()
    assert Launch.made == 2
    assert optimizer.state[params[0]]["codes"].tolist() == [1] * 12
