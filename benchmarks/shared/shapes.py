"""The parameters of published models, as shapes."""

from collections.abc import Iterator

Shape = tuple[int, ...]


def gpt2(layers: int, width: int, vocabulary: int, positions: int) -> list[Shape]:
    """GPT-2 with its head tied to the token embedding, in the order of its modules."""
    norm = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    block = [*norm, *attention, *norm, *mlp]
    return [(vocabulary, width), (positions, width), *block * layers, *norm]


def resnet50(width: int, classes: int) -> list[Shape]:
    """ResNet-50: bottlenecks of 3, 4, 6 and 3 in stages that double the width."""
    shapes = [*_conv_and_norm(3, width, 7)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            shapes += _conv_and_norm(channels, inner, 1)
            shapes += _conv_and_norm(inner, inner, 3)
            shapes += _conv_and_norm(inner, 4 * inner, 1)
            if block == 0:  # the shortcut has to change its number of channels too
                shapes += _conv_and_norm(channels, 4 * inner, 1)
            channels = 4 * inner
    return [*shapes, (classes, channels), (classes,)]


def _conv_and_norm(channels: int, filters: int, size: int) -> Iterator[Shape]:
    yield filters, channels, size, size
    yield (filters,)
    yield (filters,)
