"""Trajectories of the authors' package, which adds eps to the learning rate."""

from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from cases import each_backend_of_a_long_test
from golden import make

GOLDEN = np.load(Path(__file__).parents[1] / "support" / "golden" / "trajectories.npz")
METHODS = {"MADGRAD": cases.MADGRAD, "MirrorMADGRAD": cases.MIRROR}
each_trajectory = pytest.mark.parametrize("name", make.TRAJECTORIES)


@each_trajectory
@each_backend_of_a_long_test
def test_the_authors_trajectories_are_followed(backend, name):
    if torch.float64 not in backend.dtypes:
        pytest.skip("no float64 on this backend")
    method, options = make.TRAJECTORIES[name]
    param = cases.parameter(torch.from_numpy(GOLDEN["x0"]), backend.device)
    optimizer = cases.build(METHODS[method], backend, [param], options)
    for lr, grad, expected in zip(GOLDEN["lr"], GOLDEN["grads"], GOLDEN[name], strict=True):
        optimizer.param_groups[0]["lr"] = lr + options["eps"]
        param.grad = torch.from_numpy(grad).double().to(backend.device)
        optimizer.step()
        np.testing.assert_allclose(cases.numbers(param), expected, rtol=0, atol=1e-10)


def test_the_rate_drops_and_one_coordinate_has_no_gradient():
    assert GOLDEN["lr"][[0, make.DROP - 1, make.DROP]].tolist() == [1e-2, 1e-2, 1e-3]
    still = (GOLDEN["grads"] == 0).all(0)
    assert np.flatnonzero(still).tolist() == [make.STILL]


@each_trajectory
def test_the_package_computes_the_recorded_trajectories(name):
    method, options = make.TRAJECTORIES[name]
    package = pytest.importorskip("madgrad")
    again = make.trajectory(getattr(package, method), make.inputs(), options)
    np.testing.assert_allclose(again, GOLDEN[name], rtol=0, atol=1e-12)
