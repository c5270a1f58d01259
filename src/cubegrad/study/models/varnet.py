"""The end-to-end variational network: unrolled reconstruction of multi-coil MR images.

The paper gives 12,931,532 parameters over 273 layers. Thirteen U-Nets of 21 convolutions with
biases match that exactly: 18 channels in the twelve cascades, 8 in the network of the coils'
sensitivities, each with 4 poolings, bilinear upsampling and three 1x1 convolutions at the end.
"""

import torch
from torch import Tensor, nn
from torch.fft import fft2, ifft2, ifftshift
from torch.nn.functional import instance_norm, interpolate, max_pool2d, pad, relu

from cubegrad.study.models.kspace import TINY, central, root_sum_of_squares, to_images


class Block(nn.Module):
    """Convolution, instance norm and ReLU, twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(instance_norm(self.first(x)))
        return relu(instance_norm(self.second(x)))


class UNet(nn.Module):
    """Each pooling halves the image and, except the last, doubles the channels."""

    def __init__(self, channels: int, pools: int, ends: int = 2) -> None:
        super().__init__()
        widths = [channels << level for level in range(pools)]
        down = zip([ends, *widths], widths, strict=False)
        self.down = nn.ModuleList(Block(*shape) for shape in down)
        self.bottom = Block(widths[-1], widths[-1])
        up = zip(reversed(widths), [*reversed(widths[:-1]), channels], strict=True)
        self.up = nn.ModuleList(Block(2 * inputs, outputs) for inputs, outputs in up)
        self.last = nn.Sequential(
            nn.Conv2d(channels, channels // 2, 1),
            nn.Conv2d(channels // 2, ends, 1),
            nn.Conv2d(ends, ends, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = max_pool2d(x, 2)
        x = self.bottom(x)
        for block in self.up:
            skip = skips.pop()
            x = interpolate(x, skip.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skip], 1))
        out: Tensor = self.last(x)
        return out


class ComplexUNet(nn.Module):
    """A U-Net for complex images [count, height, width]: real and imaginary part are two channels.

    Each part is normalised to mean 0 and deviation 1, and scaled back afterwards. `mixed` runs the
    U-Net in bfloat16.
    """

    def __init__(self, channels: int, pools: int, mixed: bool = False) -> None:
        super().__init__()
        self.unet = UNet(channels, pools)
        self.multiple = 1 << pools
        self.mixed = mixed

    def forward(self, images: Tensor) -> Tensor:
        parts = torch.view_as_real(images)
        x = parts.permute(0, 3, 1, 2).contiguous()
        deviation, mean = torch.std_mean(x, (2, 3), keepdim=True)
        deviation = deviation.clamp_min(TINY)
        height, width = x.shape[-2:]
        below, right = -height % self.multiple, -width % self.multiple
        top, left = below // 2, right // 2
        x = pad((x - mean) / deviation, (left, right - left, top, below - top))
        # No cast cache: it would outlive a graph's capture, and each weight is cast only once.
        kind = parts.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            x = self.unet(x)
        x = x.to(parts.dtype)[..., top : top + height, left : left + width] * deviation + mean
        return torch.view_as_complex(x.permute(0, 2, 3, 1).contiguous())


class Cascade(nn.Module):
    """k ← k - strength · [measured](k - measurement) - F S U(Sᴴ F⁻¹ k).

    F is `fft2`, without shifts: VarNet gives k-space and lines in its coordinates.
    """

    def __init__(self, channels: int, pools: int, mixed: bool = False) -> None:
        super().__init__()
        self.refine = ComplexUNet(channels, pools, mixed)
        self.strength = nn.Parameter(torch.ones(1))  # weight of data consistency

    def forward(self, kspace: Tensor, measurement: Tensor, lines: Tensor, maps: Tensor) -> Tensor:
        image = (ifft2(kspace) * maps.conj()).sum(1)
        correction: Tensor = fft2(self.refine(image)[:, None] * maps)
        # k - strength · [measured](k - measurement), in one kernel
        parts = torch.view_as_real(kspace), torch.view_as_real(measurement)
        consistent = torch.lerp(*parts, (self.strength * lines)[:, None])
        return torch.view_as_complex(consistent) - correction


class VarNet(nn.Module):
    """Measured lines of k-space [count, coils, height, width] -> magnitude images."""

    def __init__(
        self,
        cascades: int,
        channels: int,
        pools: int,
        map_channels: int,
        map_pools: int,
        *,
        mixed: bool = False,
    ) -> None:
        super().__init__()
        self.maps = ComplexUNet(map_channels, map_pools, mixed)
        self.cascades = nn.ModuleList(Cascade(channels, pools, mixed) for _ in range(cascades))

    def sensitivities(self, measurement: Tensor, low: int) -> Tensor:
        """Each coil's map, from the `low` central lines; their squares sum to 1 at every pixel."""
        centre = central(measurement.shape[-1], low, measurement.device)
        rough = to_images(measurement * centre)
        maps: Tensor = self.maps(rough.flatten(0, 1)).view_as(rough)
        return maps / root_sum_of_squares(maps)[:, None]

    def forward(self, measurement: Tensor, lines: Tensor, low: int) -> Tensor:
        maps = self.sensitivities(measurement, low)
        # Cascades only weigh and add k-space, so they can work in the coordinates and the scale of
        # `fft2`: it is converted here once, instead of with four shifts in each cascade.
        measurement = fft2(to_images(measurement))
        lines = ifftshift(lines)
        kspace = measurement
        for cascade in self.cascades:
            kspace = cascade(kspace, measurement, lines, maps)
        return root_sum_of_squares(ifft2(kspace))
