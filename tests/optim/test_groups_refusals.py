"""What cubegrad.param_groups refuses, with the remedy."""

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


@pytest.mark.parametrize(
    ("model", "chosen", "error", "message"),
    [
        (list(ResNet().parameters()), {}, TypeError, "got a list and .*pass model, not model.para"),
        (nn.ReLU(), {}, ValueError, "ReLU has 0 parameters .*; pass one with weights"),
        (frozen(), {}, ValueError, r"all 17 parameters of the ResNet are frozen.*requires_grad_"),
        (nn.LazyLinear(2), {}, ValueError, "weight has no shape .*; run a batch"),
        (flat(), {}, ValueError, "_flat_param is a flat parameter of FSDP1.*use_orig_params=True"),
        (..., {"weight_decay": float("nan")}, ValueError, "weight_decay=nan must be finite"),
        (..., {"weight_decay": -1}, ValueError, "weight_decay=-1.0 must be finite and >= 0; use 0"),
        (..., {"lr": float("inf")}, ValueError, "lr=inf must be finite"),
        (..., {"lr": "otto"}, TypeError, "lr='otto' .*must be one number"),
        (..., {"layer_decay": 0.5}, ValueError, "layer_decay=0.5 needs lr, .*; pass lr=1e-3"),
        (..., {"layer_decay": 0, "lr": 1}, ValueError, r"layer_decay=0 must be in \(0, 1\]; use"),
        (..., {"layer_decay": float("nan"), "lr": 1}, ValueError, "layer_decay=nan must be in"),
        (nn.Linear(2, 2), {"layer_decay": 0.5, "lr": 1}, ValueError, "numbered blocks.*patterns"),
        (
            ...,
            {"no_decay": ("norm",)},
            ValueError,
            "no_decay has 'norm', and its kinds are norms, ",
        ),
        (..., {"patterns": {"heda": {}}}, ValueError, r"patterns\['heda'\] matches no .* nearest"),
        (
            ...,
            {"patterns": {"layer1.0.convl": {}}},
            ValueError,
            "nearest are layer1.0.conv1, .*glob",
        ),
        (..., {"patterns": {"layer": {}}}, ValueError, "nearest are layer"),
        (..., {"patterns": {r".*\.bias$": {}}}, ValueError, r"`\*` stands for any characters"),
        (..., {"patterns": ["fc"]}, TypeError, "must be a dict of globs to dicts; use"),
        (..., {"patterns": {"fc": 0.1}}, TypeError, "must be a dict of globs to dicts; use"),
        (
            ...,
            {"patterns": {"fc": {"params": []}}},
            ValueError,
            "sets 'params', which param_groups",
        ),
        (..., {"patterns": {"fc": {"lr": -1}}}, ValueError, "lr=-1.0 must be finite and >= 0"),
        (..., {"patterns": {"fc": {"lr": "auto"}}}, TypeError, "lr='auto' must be one number here"),
    ],
    ids=str,
)
def test_refusals(model, chosen, error, message):
    with pytest.raises(error, match=message):
        param_groups(ResNet() if model is ... else model, **chosen)
