"""What torch's tests ask of every optimizer in torch.optim: the input it accepts and refuses."""

import re

import pytest
import torch
from contract import each_class, each_default
from short_runs import advance
from torch import nn

from cubegrad import MADGRAD


@each_class
def test_fused_refuses_the_meta_device(cls):
    model = nn.Linear(2, 3, device="meta")
    optimizer = cls(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.rand_like(p)
    with pytest.raises(RuntimeError, match=re.escape("fused=True, but the fused backend is not")):
        optimizer.step()
    model.to_empty(device="cpu").reset_parameters()
    optimizer = cls(model.parameters(), fused=True)
    advance(optimizer, model.parameters(), [0])
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


@each_class
def test_fused_does_nothing_on_meta_without_gradients(cls):
    optimizer = cls(nn.Linear(2, 3, device="meta").parameters(), fused=True)
    optimizer.step()
    assert not optimizer.state


@each_default
def test_lazy_parameters_are_accepted_before_they_have_a_shape(case):
    """If they have one at the first step."""
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))
    optimizer = case.build(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("options", [{}, {"lr": "auto"}, {"compact": True}], ids=str)
def test_a_lazy_module_that_has_not_run_is_left_alone(options):
    model, unused = nn.Linear(8, 8), nn.LazyLinear(8)
    optimizer = MADGRAD([*model.parameters(), *unused.parameters()], **options)
    for k in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["step"] == k + 1
    assert set(optimizer.state) == set(model.parameters())
