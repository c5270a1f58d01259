"""The networks of CIFAR-10: their sizes, and one block computed by hand."""

import pytest
import torch
from torch import nn

from cubegrad.study.models.preact import STAGES_18, STAGES_152, Block, PreActResNet
from cubegrad.study.problems import cifar10


def on_meta(*shape):
    with torch.device("meta"):
        return PreActResNet(*shape)


@pytest.mark.parametrize(
    ("shape", "parameters", "layers"),
    [
        ((STAGES_152, True, 64, 10, False), 58_144_842, 152),
        ((STAGES_18, False), 11_172_170, 18),
    ],
)
def test_the_networks_have_their_sizes(shape, parameters, layers):
    model = on_meta(*shape)
    assert sum(param.numel() for param in model.parameters()) == parameters
    weighted = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([name for name in weighted if "shortcut" not in name]) == layers
    last = ["last_norm"] if len(shape) == 2 else []  # the paper's has none
    names = [name for name, _ in model.named_children()]
    assert names == ["first", "blocks", *last, "classifier"]
    assert all(m.bias is None for m in model.modules() if isinstance(m, nn.Conv2d))
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert model.blocks(model.first(torch.empty(2, 3, 32, 32, device="meta"))).shape[2:] == (4, 4)


def test_a_block_by_hand():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, 8, dtype=torch.float64)

    def active(norm, value):
        mean, var = value.mean((0, 2, 3), keepdim=True), value.var((0, 2, 3), False, keepdim=True)
        return ((value - mean) / (var + norm.eps).sqrt()).clamp(min=0)

    same = Block(6, 6, 1, bottleneck=False).double()
    assert same.shortcut is None
    a, b = same.convolutions
    expected = x + b(active(same.norms[1], a(active(same.norms[0], x))))
    torch.testing.assert_close(same(x), expected)

    halved = Block(6, 5, 2, bottleneck=True).double()
    first = active(halved.norms[0], x)
    out = first
    for norm, convolution in zip([*halved.norms[1:], None], halved.convolutions, strict=True):
        out = convolution(out)
        out = active(norm, out) if norm else out
    assert out.shape == (4, 20, 4, 4)
    torch.testing.assert_close(halved(x), out + halved.shortcut(first))


@pytest.mark.parametrize("name", ["cpu", "gpu", "paper"])
def test_a_preset_says_its_size(name):
    preset = cifar10.problem().presets[name]
    options = preset.options
    shape = (options["stages"], options["bottleneck"], options["width"], 10)
    model = on_meta(*shape, options["last_norm"])
    count = sum(param.numel() for param in model.parameters())
    assert f"{count:,} parameters" in preset.size
