"""The sizes of ResNet-50 and ResNet-18, and their outputs compared with another library's."""

import pytest
import torch
from torch import nn

from cubegrad.study.models.resnet import STAGES_18, STAGES_50, Plain, ResNet, Stem


def count(model):
    return sum(param.numel() for param in model.parameters())


def test_the_published_number_of_parameters():
    model = ResNet()
    assert STAGES_50 == (3, 4, 6, 3)
    assert count(model) == 25_557_032
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 53
    assert len(list(model.parameters())) == 161
    assert count(ResNet(STAGES_18, bottleneck=False)) == 11_689_512


def test_a_thin_one_by_hand():
    # 7x7: 147 * 4 + 8. First block: 4*4 + 9*16 + 4*16 weights, a projection 4*16, and norms of
    # 4, 4, 16 and 16 channels, two numbers each. Second: 16*8 + 9*64 + 8*32, 16*32, and norms of
    # 8, 8, 32 and 32. Classifier: 32 * 3 + 3.
    first = 147 * 4 + 8
    block1 = 16 + 144 + 64 + 64 + 2 * 40
    block2 = 128 + 576 + 256 + 512 + 2 * 80
    assert count(ResNet((1, 1), 4, 3)) == first + block1 + block2 + 99


def test_the_side_is_halved_five_times_and_the_stride_is_in_the_3x3():
    model = ResNet(width=4, classes=7).eval()
    shapes = []
    for index in (2, 6, 12, 15):  # the last of each stage
        model.blocks[index].register_forward_hook(lambda *args: shapes.append(args[2].shape[1:]))
    assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 7)
    assert shapes == [(16, 56, 56), (32, 28, 28), (64, 14, 14), (128, 7, 7)]
    for block, stride in zip(model.blocks, [1] * 3 + [2] + [1] * 3 + [2] + [1] * 5, strict=False):
        assert block.reduce.stride == block.expand.stride == (1, 1)
        assert block.filter.stride == (stride, stride)


@pytest.mark.parametrize(
    ("stem", "side", "first"),
    [
        (Stem(), 2, 147),
        (Stem(7, 2, pool=False), 4, 147),
        (Stem(3, 1), 4, 27),
        (Stem(3, 1, False), 8, 27),
    ],
)
def test_a_stem_decides_what_the_last_stage_sees(stem, side, first):
    model = ResNet(width=4, classes=7, stem=stem).eval()
    shapes = []
    model.blocks.register_forward_hook(lambda *args: shapes.append(args[2].shape[1:]))
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    assert shapes == [(128, side, side)]
    assert model.first.weight.numel() == 4 * first


def test_first_weights():
    """Normal, with the variance 2 / (outputs * kernel area) that keeps gradients level."""
    torch.manual_seed(0)
    model = ResNet(width=16, classes=10)
    for convolution in (model.first, model.blocks[8].filter):
        outputs, _, kernel, _ = convolution.weight.shape
        expected = (2 / (outputs * kernel**2)) ** 0.5
        assert convolution.weight.std().item() == pytest.approx(expected, rel=0.06)
    assert all((block.norm3.weight == 1).all() for block in model.blocks)


def pieces(model):
    """Its convolutions and norms by block, the shortcut's last."""
    for block in model.blocks:
        if isinstance(block, Plain):
            yield from (block.filter1, block.norm1, block.filter2, block.norm2)
        else:
            yield from (block.reduce, block.norm1, block.filter, block.norm2)
            yield from (block.expand, block.norm3)
        yield from block.shortcut.children()


def their_pieces(encoder):
    for stage in encoder.stages:
        for block in stage.layers:
            for layer in block.layer:
                yield from (layer.convolution, layer.normalization)
            if not isinstance(block.shortcut, nn.Identity):
                yield from (block.shortcut.convolution, block.shortcut.normalization)


@pytest.mark.parametrize(("stages", "bottleneck"), [(STAGES_50, True), (STAGES_18, False)])
def test_it_computes_what_another_library_computes(stages, bottleneck):
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[32, 64, 128, 256] if bottleneck else [8, 16, 32, 64],
        depths=list(stages),
        layer_type="bottleneck" if bottleneck else "basic",
        downsample_in_bottleneck=False,
        num_labels=5,
    )
    torch.manual_seed(0)
    theirs = transformers.ResNetForImageClassification(config)
    ours = ResNet(stages, width=8, classes=5, bottleneck=bottleneck)
    embedder = theirs.resnet.embedder.embedder
    pairs = [
        (ours.first, embedder.convolution),
        (ours.norm, embedder.normalization),
        *zip(pieces(ours), their_pieces(theirs.resnet.encoder), strict=True),
        (ours.classifier, theirs.classifier[1]),
    ]
    for mine, other in pairs:
        other.load_state_dict(mine.state_dict())
    images = torch.randn(4, 3, 64, 64)
    for training in (True, False):  # with the batch's statistics, and with the running ones
        found = ours.train(training)(images)
        expected = theirs.train(training)(pixel_values=images).logits
        assert found.std() > 0.01
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
