"""What older versions have pickled names classes by the modules they were in then."""

import pickle

import pytest
import torch

import cubegrad


def as_pickled_in(module, thing):
    """The pickle, with another name for the module of its class."""
    kind = type(thing)
    now = f"{kind.__module__}\n{kind.__name__}".encode()
    pickled = pickle.dumps(thing, protocol=0)
    assert now in pickled
    return pickled.replace(now, f"{module}\n{kind.__name__}".encode())


@pytest.mark.parametrize("cls", [cubegrad.MADGRAD, cubegrad.MirrorMADGRAD])
def test_a_pickled_optimizer_loads_and_steps(cls):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = cls([param])
    param.grad = torch.ones(3)
    optimizer.step()
    again = pickle.loads(as_pickled_in("cubegrad.optimizer", optimizer))
    assert type(again) is cls
    (copied,) = again.param_groups[0]["params"]
    for one, weights in ((optimizer, param), (again, copied)):
        weights.grad = torch.ones(3)
        one.step()
    assert torch.equal(copied, param)


def test_a_pickled_estimate_of_jax_loads():
    auto = pytest.importorskip("cubegrad.optax.auto")
    estimate = auto.Estimate(*(float(i) for i in range(len(auto.Estimate._fields))))
    assert pickle.loads(as_pickled_in("cubegrad.optax_estimate", estimate)) == estimate
