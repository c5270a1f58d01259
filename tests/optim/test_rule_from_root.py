"""The rule that compact=True runs, without its codes: it is Algorithm 1, in exact arithmetic."""

import cases
import numpy as np
import pytest
import torch

from cubegrad import rule
from cubegrad.functions import TorchFunctions
from cubegrad.options import Hyper

STEPS = 100


def torch_arrays():
    return TorchFunctions, torch.from_numpy, None


def jax_arrays():
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    from cubegrad.optax import xla

    return xla, jax.numpy.asarray, jax.enable_x64


LIBRARIES = {"torch": torch_arrays, "jax": jax_arrays}


def hyper(o):
    decoupled = o.decoupled_weight_decay or o.decoupled_lr
    shrink = o.shrink() if decoupled else None
    return Hyper(o.lr, o.momentum, o.eps, o.coupled_decay(), shrink, o.maximize)


def follow(method, options, xp, array):
    """Steps of the rule beside those of the oracle, at changing learning rates."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal(40)
    judge = method.oracle(start)
    x, root = array(start), array(np.zeros(40))
    offset = None if options.get("momentum") == 0 else array(np.zeros(40))
    initial = array(start.copy()) if method.rule.pulls else None
    for k in range(STEPS):
        o = cases.settings(options, cases.lr_at(k, options.get("lr", 1e-2)))
        grad = rng.standard_normal(40) * 10.0 ** rng.integers(-3, 3, 40)
        grad[:2] = 0  # one of them has never had a gradient, one has a late one
        grad[1] = 1.0 if k > 60 else 0.0
        judge.step(grad, o)
        h, g, step = hyper(o), array(grad), float(k)
        x, m, root, _ = rule.step_from_root(xp, method.rule, h, step, x, g, offset, root, initial)
        initial = None if initial is None else rule.shrunk(h, initial)
        offset = None if offset is None else m
        largest = max(1.0, np.abs(judge.x).max())
        np.testing.assert_allclose(np.asarray(x), judge.x, rtol=0, atol=1e-11 * largest)
        expected = np.cbrt(judge.nu) if method.rule.root == 3 else np.sqrt(judge.nu)
        np.testing.assert_allclose(np.asarray(root), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("options", cases.OPTIONS)
@cases.each_method
def test_100_steps_follow_the_oracle(method, options, library):
    xp, array, enable_x64 = LIBRARIES[library]()
    if enable_x64 is None:
        follow(method, cases.OPTIONS[options], xp, array)
        return
    with enable_x64(True):
        follow(method, cases.OPTIONS[options], xp, array)
