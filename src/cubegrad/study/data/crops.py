"""Where images are cropped, and the resampling of a crop on any device.

A box is (left, top, width, height) in pixels, a size is (width, height). Both are arrays with one
row per image: the boxes of a whole epoch are drawn at once, and equal those drawn one by one.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALE = (0.08, 1.0)  # of the image's area
RATIO = (3 / 4, 4 / 3)  # width to height
TRIES = 10
DRAWS = 2 * TRIES + 4  # uniforms per image: areas and ratios, left, top, mirror, one unused
BLOCK = 4  # numbers that Philox draws at a time


def draws(seed: int, epoch: int, first: int, count: int) -> Any:
    """Uniform numbers for the `count` images from index `first` on, the same in any process.

    Philox computes them from a key and a counter, so no image needs those before it.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=first * DRAWS // BLOCK)
    return np.random.Generator(bits).random((count, DRAWS))


def random_boxes(sizes: Any, uniform: Any) -> tuple[Any, Any]:
    """Boxes of random area, ratio and place in images of (width, height), and which to mirror.

    The first of ten tries that fits into the image; if none does, as much of the middle as the
    ratios allow.
    """
    widths, heights = sizes[:, :1].astype(np.float64), sizes[:, 1:].astype(np.float64)
    areas = widths * heights * (SCALE[0] + (SCALE[1] - SCALE[0]) * uniform[:, :TRIES])
    low, high = (math.log(ratio) for ratio in RATIO)
    ratios = np.exp(low + (high - low) * uniform[:, TRIES : 2 * TRIES])
    across, down = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (across > 0) & (across <= widths) & (down > 0) & (down <= heights)
    rows, first = np.arange(len(sizes)), fits.argmax(1)
    middle = ~fits.any(1)
    widths, heights = widths[:, 0], heights[:, 0]
    width = np.where(middle, np.minimum(widths, np.rint(heights * RATIO[1])), across[rows, first])
    height = np.where(middle, np.minimum(heights, np.rint(widths / RATIO[0])), down[rows, first])
    free = np.stack([widths - width, heights - height], 1)
    places = np.floor(uniform[:, 2 * TRIES : 2 * TRIES + 2] * (free + 1))
    places = np.where(middle[:, None], free // 2, places)
    boxes = np.concatenate([places, width[:, None], height[:, None]], 1)
    return boxes.astype(np.int64), uniform[:, 2 * TRIES + 2] < 0.5


def resized(sizes: Any, short: int) -> Any:
    """The sizes after scaling the shorter side to `short`."""
    shorter = sizes.min(1, keepdims=True)
    return (short * sizes / shorter).astype(np.int64)


def middles(sizes: Any, side: int) -> Any:
    """Left and top of the squares in the middle."""
    return np.rint((sizes - side) / 2).astype(np.int64)


def middle_boxes(sizes: Any, short: int, side: int) -> Any:
    """The boxes in the original images that equal a resize followed by a crop of the middle."""
    to = resized(sizes, short)
    shrunk = sizes / to
    return np.concatenate([middles(to, side) * shrunk, side * shrunk], 1)


def weights(start: Tensor, length: Tensor, low: Tensor, high: Tensor, side: int, n: int) -> Tensor:
    """[images, side, n]: the weight of each of n input pixels in each output pixel, on one axis.

    A triangle as wide as two output pixels, or two input pixels if those are wider: Pillow's
    "bilinear". Pixels outside `low` to `high` have weight 0.
    """
    scale = length / side
    outputs = torch.arange(side, device=start.device, dtype=start.dtype) + 0.5
    inputs = torch.arange(n, device=start.device, dtype=start.dtype) + 0.5
    centres = start[:, None] + outputs * scale[:, None]
    reach = scale.clamp(min=1)[:, None, None]
    triangle = (1 - (inputs - centres[:, :, None]).abs() / reach).clamp(min=0)
    inside = triangle * ((inputs > low[:, None]) & (inputs < high[:, None]))[:, None, :]
    return inside / inside.sum(2, keepdim=True)


def resample(images: Tensor, boxes: Tensor, bounds: Tensor, mirrored: Tensor, side: int) -> Tensor:
    """Resample boxes of byte images [count, 3, n, m] to float [count, 3, side, side].

    `bounds` are the boxes that may be read: the image, or the crop if it is cut out first.
    """
    left, top, width, height = boxes.unbind(1)
    low_x, low_y, span_x, span_y = bounds.unbind(1)
    across = weights(left, width, low_x, low_x + span_x, side, images.shape[3])
    across = torch.where(mirrored[:, None, None], across.flip(1), across)
    down = weights(top, height, low_y, low_y + span_y, side, images.shape[2])
    lines = images.to(across.dtype) @ across.transpose(1, 2)[:, None]
    return down[:, None] @ lines
