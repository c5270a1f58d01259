"""What cubegrad.param_groups refuses, with the remedy."""

from functools import partial

import pytest
import torch
from group_models import ResNet
from torch import nn

from cubegrad import param_groups


class FlatParameter(nn.Parameter):  # FSDP1's has this name
    pass


def flat():
    model = nn.Module()
    model._flat_param = FlatParameter(torch.ones(3))
    return model


def frozen():
    return ResNet().requires_grad_(False)


def parameters():
    return list(ResNet().parameters())


@pytest.mark.parametrize(
    ("build", "chosen", "error", "message"),
    [
        (parameters, {}, TypeError, "got a list and .*pass model, not model.para"),
        (nn.ReLU, {}, ValueError, "ReLU has 0 parameters .*; pass one with weights"),
        (frozen, {}, ValueError, r"all 17 parameters of the ResNet are frozen.*requires_grad_"),
        (partial(nn.LazyLinear, 2), {}, ValueError, "weight has no shape .*; run a batch"),
        (flat, {}, ValueError, "_flat_param is a flat parameter of FSDP1.*use_orig_params=True"),
        (ResNet, {"weight_decay": float("nan")}, ValueError, "weight_decay=nan must be finite"),
        (
            ResNet,
            {"weight_decay": -1},
            ValueError,
            "weight_decay=-1.0 must be finite and >= 0; use 0",
        ),
        (ResNet, {"lr": float("inf")}, ValueError, "lr=inf must be finite"),
        (ResNet, {"lr": "otto"}, TypeError, "lr='otto' .*must be one number"),
        (
            ResNet,
            {"weight_decay": True},
            TypeError,
            r"weight_decay=True \(bool\) must be one number",
        ),
        (ResNet, {"lr": True}, TypeError, r"lr=True \(bool\) must be one number"),
        (
            ResNet,
            {"patterns": {"head": {"decoupled_weight_decay": 0.1}}},
            TypeError,
            "decoupled_weight_decay=0.1 .*; pass weight_decay=0.1, decoupled_weight_decay=True",
        ),
        (ResNet, {"layer_decay": 0.5}, ValueError, "layer_decay=0.5 needs lr, .*; pass lr=1e-3"),
        (
            ResNet,
            {"layer_decay": 0, "lr": 1},
            ValueError,
            r"layer_decay=0 must be in \(0, 1\]; use",
        ),
        (ResNet, {"layer_decay": float("nan"), "lr": 1}, ValueError, "layer_decay=nan must be in"),
        (
            partial(nn.Linear, 2, 2),
            {"layer_decay": 0.5, "lr": 1},
            ValueError,
            "numbered blocks.*patterns",
        ),
        (
            ResNet,
            {"no_decay": ("norm",)},
            ValueError,
            "no_decay has 'norm', and its kinds are norms, ",
        ),
        (
            ResNet,
            {"patterns": {"heda": {}}},
            ValueError,
            r"patterns\['heda'\] matches no .* nearest",
        ),
        (
            ResNet,
            {"patterns": {"layer1.0.convl": {}}},
            ValueError,
            "nearest are layer1.0.conv1, .*glob",
        ),
        (ResNet, {"patterns": {"layer": {}}}, ValueError, "nearest are layer"),
        (ResNet, {"patterns": {r".*\.bias$": {}}}, ValueError, r"`\*` stands for any characters"),
        (ResNet, {"patterns": ["fc"]}, TypeError, "must be a dict of globs to dicts; use"),
        (ResNet, {"patterns": {"fc": 0.1}}, TypeError, "must be a dict of globs to dicts; use"),
        (
            ResNet,
            {"patterns": {"fc": {"params": []}}},
            ValueError,
            "sets 'params', which param_groups",
        ),
        (ResNet, {"patterns": {"fc": {"lr": -1}}}, ValueError, "lr=-1.0 must be finite and >= 0"),
        (
            ResNet,
            {"patterns": {"fc": {"lr": "auto"}}},
            TypeError,
            "lr='auto' must be one number here",
        ),
    ],
)
def test_refusals(build, chosen, error, message):
    with pytest.raises(error, match=message):
        param_groups(build(), **chosen)
