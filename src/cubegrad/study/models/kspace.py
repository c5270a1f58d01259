"""Images and k-space: centred orthonormal transforms, coils, and the measured lines.

Arrays end in [height, width]; frequency 0 is at index [height // 2, width // 2].
"""

from typing import NamedTuple

import torch
from torch import Tensor

AXES = (-2, -1)
TINY = 1e-30  # below the square of any measured value; avoids the infinite slope of √ at 0


class Slices(NamedTuple):
    """Fully sampled slices of one shape."""

    kspace: Tensor  # complex64 [count, coils, height, width]
    target: Tensor  # float32 [count, height, width]; height and width may be smaller
    peak: Tensor  # [count], the brightest value of each slice's volume


def to_kspace(images: Tensor) -> Tensor:
    shifted = torch.fft.ifftshift(images, AXES)
    kspace: Tensor = torch.fft.fftshift(torch.fft.fft2(shifted, norm="ortho"), AXES)
    return kspace


def to_images(kspace: Tensor) -> Tensor:
    shifted = torch.fft.ifftshift(kspace, AXES)
    images: Tensor = torch.fft.fftshift(torch.fft.ifft2(shifted, norm="ortho"), AXES)
    return images


def root_sum_of_squares(coils: Tensor) -> Tensor:
    """Over the coils of complex images [..., coils, height, width]."""
    squares = torch.view_as_real(coils).square().sum(-1).sum(-3)
    return squares.clamp_min(TINY).sqrt()


def central(width: int, low: int, device: torch.device | None = None) -> Tensor:
    """The `low` columns around frequency 0, as a mask [width]."""
    first = (width - low + 1) // 2
    column = torch.arange(width, device=device)
    return (column >= first) & (column < first + low)


def measured(
    width: int, low: int, acceleration: int, offset: int, device: torch.device | None = None
) -> Tensor:
    """Columns at frequencies offset, offset ± acceleration, …, and the central ones: [width].

    With acceleration 4 and offset 1, a frequency and its negative are never both on the lattice.
    An image with little phase has nearly symmetric k-space, so half of it is then known.
    """
    frequency = torch.arange(width, device=device) - width // 2
    return (frequency % acceleration == offset) | central(width, low, device)


def centre_crop(images: Tensor, height: int, width: int) -> Tensor:
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    return images[..., top : top + height, left : left + width]
