"""Trajectories of the authors' package, which adds eps to the learning rate."""

from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from cases import BACKENDS

GOLDEN = Path(__file__).parents[2] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden files are not here")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("madgrad_momentum0.9", cases.MADGRAD),
        ("madgrad_momentum0", cases.MADGRAD),
        ("madgrad_l2decay0.01", cases.MADGRAD),
        ("mirror_momentum0.9", cases.MIRROR),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_authors_trajectories_are_followed(backend, name, method):
    if torch.float64 not in backend.dtypes:
        pytest.skip("no float64 on this backend")
    golden = np.load(GOLDEN / f"{name}.npz")
    options = {key[4:]: golden[key].item() for key in golden.files if key.startswith("arg_")}
    param = cases.parameter(torch.from_numpy(golden["x0"]), backend.device)
    optimizer = cases.build(method, backend, [param], options)
    for lr, grad, expected in zip(golden["lr"], golden["grads"], golden["x"], strict=True):
        optimizer.param_groups[0]["lr"] = lr + options["eps"]
        param.grad = torch.from_numpy(grad).to(backend.device)
        optimizer.step()
        np.testing.assert_allclose(cases.numbers(param), expected, rtol=0, atol=1e-10)
