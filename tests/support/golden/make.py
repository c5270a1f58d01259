"""Make the golden files: what other packages' MADGRADs do, as figures to compare with.

    pip install madgrad==1.3
    pip install --no-deps --target /tmp/timm timm==1.0.30
    python tests/golden/make.py --timm /tmp/timm

timm itself needs torchvision; its file with MADGRAD does not, and is loaded alone.
"""

import argparse
import importlib.util
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
STEPS, DROP, COORDINATES, STILL = 120, 60, 12, 5  # coordinate 5 never has a gradient
TRAJECTORIES = {  # name: class, its arguments
    "madgrad_momentum0.9": ("MADGRAD", {"momentum": 0.9, "eps": 1e-6}),
    "madgrad_momentum0": ("MADGRAD", {"momentum": 0.0, "eps": 1e-6}),
    "madgrad_l2decay0.01": ("MADGRAD", {"momentum": 0.9, "eps": 1e-6, "weight_decay": 0.01}),
    "mirror_momentum0.9": ("MirrorMADGRAD", {"momentum": 0.9, "eps": 0.0}),
}
LR, EPS = 0.05, 1e-3  # of timm's runs: an eps that shows wherever it is added


def numbers(seed, *shape):
    """Of the one generator of numpy's whose numbers are frozen for good."""
    return np.random.RandomState(seed).standard_normal(shape)


def step(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def inputs():
    """x_0, gradients that fit into float32 on scales from 1e-4 to 10, and a rate that drops."""
    scales = np.logspace(-4, 1, COORDINATES)
    scales[STILL] = 0.0
    grads = (numbers(1, STEPS, COORDINATES) * scales).astype(np.float32)
    lr = np.where(np.arange(STEPS) < DROP, 1e-2, 1e-3)
    return {"x0": numbers(0, COORDINATES), "grads": grads, "lr": lr}


def trajectory(optimizer_class, given, options):
    """The parameters after each step, in float64."""
    param = torch.nn.Parameter(torch.from_numpy(given["x0"]).clone())
    optimizer = optimizer_class([param], **options)
    seen = []
    for lr, grad in zip(given["lr"], given["grads"], strict=True):
        optimizer.param_groups[0]["lr"] = lr
        step(optimizer, [param], [torch.from_numpy(grad).double()])
        seen.append(param.detach().numpy().copy())
    return np.array(seen)


def checkpoint(optimizer_class):
    """A float32 run of 50 steps, saved after 25."""
    shapes = [(6, 4), (5,)]
    grads = [torch.from_numpy(numbers(10 + i, 50, *s)).float() for i, s in enumerate(shapes)]
    params = [
        torch.nn.Parameter(torch.from_numpy(numbers(20 + i, *s)).float())
        for i, s in enumerate(shapes)
    ]
    optimizer = optimizer_class(params, lr=5e-3, momentum=0.9, weight_decay=1e-4)
    for k in range(50):
        if k == 25:
            before = {"params": copies(params), "optimizer": deepcopy(optimizer.state_dict())}
        step(optimizer, params, [grad[k] for grad in grads])
    return before | {"grads": [grad[25:].clone() for grad in grads], "after": copies(params)}


def copies(params) -> list[Tensor]:
    return [param.detach().clone() for param in params]


def timm_runs(optimizer_class):
    """Runs saved after ten steps, or before the first, and how each goes on after changes."""
    grads = [torch.from_numpy(numbers(30 + i, 20, *s)) for i, s in enumerate([(3, 4), (5,)])]
    grids = [(momentum, decay) for momentum in (0.0, 0.9) for decay in (0.0, 0.1)]
    runs = []
    for momentum, weight_decay in grids:
        options = {"momentum": momentum, "weight_decay": weight_decay}
        changes = [{}, {"lr": 0.0}, {"momentum": 0.0}][: 3 if momentum else 2]
        runs.append(timm_run(optimizer_class, grads, options, 10, changes))
    runs.append(timm_run(optimizer_class, grads, {}, 0, [{}]))
    return {"grads": grads, "runs": runs}


def timm_run(optimizer_class, grads, options, saved_at, changes):
    starts = [torch.from_numpy(numbers(40 + i, *g.shape[1:])) for i, g in enumerate(grads)]
    params = [torch.nn.Parameter(start) for start in starts]
    optimizer = optimizer_class(params, lr=LR, eps=EPS, **options)
    for k in range(saved_at):  # the second tensor has its first gradient late
        step(optimizer, params, [grads[0][k], grads[1][k] if k > 3 else None])
    saved = {"params": copies(params), "optimizer": deepcopy(optimizer.state_dict())}
    goes_on = []
    for change in changes:
        params = [torch.nn.Parameter(param.clone()) for param in saved["params"]]
        optimizer = optimizer_class(params, lr=LR, eps=EPS)
        optimizer.load_state_dict(deepcopy(saved["optimizer"]))
        optimizer.param_groups[0].update(change)
        after = []
        for k in range(saved_at, 20):
            step(optimizer, params, [grad[k] for grad in grads])
            after.append(copies(params))
        ends = [torch.stack(tensors) for tensors in zip(*after, strict=True)]
        goes_on.append({"change": change, "after": ends})
    return {"saved_at": saved_at, **saved, "goes_on": goes_on}


def load_timm(folder: Path):
    spec = importlib.util.spec_from_file_location("timm_madgrad", folder / "timm/optim/madgrad.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MADGRAD


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timm", type=Path, required=True, help="the folder timm was put into")
    folder = parser.parse_args().timm
    import madgrad

    given = inputs()
    found = {
        name: trajectory(getattr(madgrad, cls), given, options)
        for name, (cls, options) in TRAJECTORIES.items()
    }
    np.savez_compressed(HERE / "trajectories.npz", **given, **found)
    torch.save(checkpoint(madgrad.MADGRAD), HERE / "madgrad_checkpoint.pt")
    torch.save(timm_runs(load_timm(folder)), HERE / "timm.pt")


if __name__ == "__main__":
    main()
