"""Magnitude MR slices, and a simulated scanner that turns them into multi-coil k-space.

A folder `mr-slices` holds `slices.npy`, uint8 [count, height, width], and `volumes.txt`, one line
per slice: `subject/volume`, or only a name. All slices of a subject are in one split.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d

from cubegrad.study.models.kspace import Slices, root_sum_of_squares, to_images, to_kspace
from cubegrad.study.problem import StudyError

FOLDER = "mr-slices"
FOLDS = 5  # of each five subjects, in file order, the ones at these places are held out in fold 0
TEST, VALID = 4, 2
DISTANCE = 1.3  # of the coils from the centre, in half widths of the image
REACH = 0.8  # of a coil, in half widths
NOISE = 0.005  # deviation of real and imaginary part of k-space; slices are in [0, 1]
SEED = 1_000_003  # of phases and noise, the same for every run


class Stored(NamedTuple):
    slices: Any  # uint8 [count, height, width], memory-mapped
    volumes: list[str]


def load(data: Path) -> Stored:
    """The slices and volumes in the folder, checked."""
    path, names = data / FOLDER / "slices.npy", data / FOLDER / "volumes.txt"
    for needed in (path, names):
        if not needed.is_file():
            raise StudyError(
                f"{needed} is missing: put slices.npy (uint8 [count, height, width]) and "
                f"volumes.txt (one line per slice) into {data / FOLDER}"
            )
    try:
        slices = np.load(path, mmap_mode="r")
        volumes = names.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise StudyError(f"{path.parent} cannot be read ({reason}): copy it again") from None
    if slices.dtype != np.uint8 or slices.ndim != 3 or not slices.size:
        raise StudyError(
            f"{path} holds {slices.dtype} {slices.shape}: uint8 [count, height, width] is expected"
        )
    if len(volumes) != len(slices) or not all(volumes):
        raise StudyError(
            f"{names} names {sum(map(bool, volumes))} volumes and {path} holds {len(slices)} "
            "slices: one line per slice is expected"
        )
    return Stored(slices, volumes)


def split(volumes: list[str], hold_out: bool, fold: int = 0) -> dict[str, list[int]]:
    """The indices of the slices of "train", "valid" and "test", split by subject.

    The next fold holds out the next subjects; over all folds each is tested once.
    """
    subjects = dict.fromkeys(volume.partition("/")[0] for volume in volumes)
    place = {name: (index - fold) % FOLDS for index, name in enumerate(subjects)}
    parts: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    for index, volume in enumerate(volumes):
        turn = place[volume.partition("/")[0]]
        part = "test" if turn == TEST else "valid" if hold_out and turn == VALID else "train"
        parts[part].append(index)
    return parts


def check(data: Path, stored: Stored, shrink: int, least: int) -> None:
    """Raise StudyError for slices too small to shrink, or too few subjects to split."""
    _, height, width = stored.slices.shape
    if height % shrink or width % shrink or min(height, width) < shrink * least:
        raise StudyError(
            f"{data / FOLDER / 'slices.npy'} holds slices of {height}x{width}: sides must be "
            f"multiples of {shrink} and >= {shrink * least}; crop or pad them"
        )
    subjects = len({volume.partition("/")[0] for volume in stored.volumes})
    if subjects <= TEST:
        raise StudyError(
            f"{data / FOLDER / 'volumes.txt'} names {subjects} subjects and needs at least "
            f"{TEST + 1}, so that one is left to test with; add slices of others"
        )


def evenly_spaced(places: list[int], count: int) -> list[int]:
    """At most `count` of them, at even distances, so that all subjects take part."""
    step = max(len(places) / count, 1.0)
    return [places[int(index * step)] for index in range(min(count, len(places)))]


def coil_maps(coils: int, height: int, width: int, device: torch.device) -> Tensor:
    """Coils around the image: strong nearby, each with its own phase; squares sum to 1."""
    y = torch.linspace(-1, 1, height, device=device)[:, None]
    x = torch.linspace(-1, 1, width, device=device)
    maps = []
    for coil in range(coils):
        angle = 2 * math.pi * coil / coils
        down, right = math.sin(angle), math.cos(angle)
        away = (y - DISTANCE * down) ** 2 + (x - DISTANCE * right) ** 2
        phase = angle + y * down + x * right
        maps.append(torch.polar(torch.exp(-away / (2 * REACH**2)), phase))
    together = torch.stack(maps)
    return together / root_sum_of_squares(together)


class Scanner:
    """Turns slices into k-space: smooth phase, coils, noise, drawn from (SEED, slice) alone."""

    def __init__(
        self, coils: int, size: tuple[int, int], device: torch.device, noise: float = NOISE
    ) -> None:
        height, width = size
        self.maps = coil_maps(coils, height, width, device)
        self.noise = noise
        self.generator = Generator(device)
        y = torch.linspace(-1, 1, height, device=device)[:, None].expand(height, width)
        x = torch.linspace(-1, 1, width, device=device).expand(height, width)
        self.waves = torch.stack([torch.ones_like(x), x, y, x * y, x * x, y * y])

    def __call__(self, images: Tensor, places: Sequence[int]) -> Tensor:
        """Images [count, height, width] in [0, 1] of these slices -> complex [count, coils, …]."""
        terms = len(self.waves)
        drawn = images.new_empty(len(places), terms + 2 * self.maps.numel())
        for row, place in zip(drawn, places, strict=True):
            torch.randn(row.shape, generator=self.generator.manual_seed(SEED + place), out=row)
        phase = torch.einsum("nt,thw->nhw", drawn[:, :terms], self.waves)
        kspace = to_kspace(torch.polar(images, phase)[:, None] * self.maps)
        noise = torch.view_as_complex(drawn[:, terms:].view(len(places), *self.maps.shape, 2))
        return kspace + self.noise * noise


class Simulated:
    """Slices on the device; k-space is computed per batch."""

    def __init__(
        self, stored: Stored, places: list[int], shrink: int, coils: int, device: torch.device
    ) -> None:
        self.places = places
        pixels = torch.from_numpy(np.array(stored.slices[places])).to(device)
        # In pieces: before shrinking, the whole set in float32 takes four times its bytes.
        shrunk = [
            avg_pool2d(some[:, None].float() / 255, shrink) for some in torch.split(pixels, 64)
        ]
        self.images = torch.cat(shrunk)[:, 0]
        self.peaks = self._peaks([stored.volumes[place] for place in places])
        self.scanner = Scanner(coils, (self.images.shape[1], self.images.shape[2]), device)

    def _peaks(self, volumes: list[str]) -> Tensor:
        """The brightest value of each slice's volume, among these slices; 1 if all is black."""
        brightest: dict[str, float] = {}
        for volume, value in zip(volumes, self.images.amax((1, 2)).tolist(), strict=True):
            brightest[volume] = max(value, brightest.get(volume, 0.0))
        peaks = [brightest[volume] or 1.0 for volume in volumes]
        return torch.tensor(peaks, device=self.images.device)

    def __len__(self) -> int:
        return len(self.places)

    def batches(self, wanted: Sequence[Sequence[int]]) -> Iterator[list[Slices]]:
        # One copy for all batches: the host waits for the device at each.
        together = torch.tensor([one for batch in wanted for one in batch]).to(self.images.device)
        each = torch.split(together, [len(batch) for batch in wanted])
        for batch, index in zip(wanted, each, strict=True):
            kspace = self.scanner(self.images[index], [self.places[one] for one in batch])
            # As in fastMRI: the root sum of squares of all lines, noise included.
            target = root_sum_of_squares(to_images(kspace))
            yield [Slices(kspace, target, self.peaks[index])]
