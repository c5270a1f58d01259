"""Models whose groups are tested, and what groups are compared by."""

import pytest
from torch import nn


def names(model, groups):
    """The names of the parameters of each group, by the name of the group."""
    known = {id(param): name for name, param in model.named_parameters()}
    return {g["name"]: [known[id(param)] for param in g["params"]] for g in groups}


def options(groups):
    keys = ("params", "name")
    return {g["name"]: {k: v for k, v in g.items() if k not in keys} for g in groups}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.downsample = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.GroupNorm(2, 4))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Residual())
        self.layer2 = nn.Sequential(Residual())
        self.fc = nn.Linear(4, 10)


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 20}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_hidden_layers=2, **changes)
    )
