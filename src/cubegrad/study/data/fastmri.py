"""fastMRI's multi-coil k-space as published: one HDF5 file per volume."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cubegrad.study.models.kspace import Slices
from cubegrad.study.problem import StudyError, optional

URL = "https://fastmri.med.nyu.edu"
FOLDERS = {"train": "multicoil_train", "test": "multicoil_val"}  # its test set has no targets

LEAST = 32  # pixels per side: 2 are left after the network's 4 poolings
READERS = 4  # threads; the next batch is read while this one trains


class Volume(NamedTuple):
    path: Path
    slices: int
    peak: float  # the brightest value of the volume's targets


def volumes(data: Path, part: str) -> list[Volume]:
    """The volumes of "train" or "test", sorted by name, with their shapes checked."""
    folder = data / FOLDERS[part]
    if not folder.is_dir():
        raise StudyError(
            f"{folder} is missing: unpack fastMRI's {FOLDERS[part]} there ({URL}, on request)"
        )
    paths = sorted(folder.glob("*.h5"))
    if not paths:
        raise StudyError(f"{folder} holds no .h5 files: unpack {FOLDERS[part]} there ({URL})")
    library = optional("h5py")
    return [_volume(library, path) for path in paths]


def read(volume: Volume, index: int) -> tuple[Any, Any, float]:
    """A slice's k-space, complex64 [coils, height, width], its target, float32, and the peak."""
    try:
        with optional("h5py").File(volume.path, "r") as file:
            kspace, target = file["kspace"][index], file["reconstruction_rss"][index]
    except (OSError, KeyError) as error:
        raise _unreadable(volume.path, error) from None
    return kspace.astype(np.complex64), target.astype(np.float32), volume.peak


class Scans:
    """Slices of some volumes, read from disk on demand."""

    def __init__(self, volumes: Sequence[Volume], device: torch.device) -> None:
        self.places = [(volume, index) for volume in volumes for index in range(volume.slices)]
        self.device = device

    def __len__(self) -> int:
        return len(self.places)

    def batches(self, wanted: Sequence[Sequence[int]]) -> Iterator[list[Slices]]:
        """Each slice of a batch by itself: shapes differ, and one slice fills a GPU."""
        pool = ThreadPoolExecutor(READERS)
        try:
            reading: list[Any] = []
            for batch in [*wanted, ()]:
                ready = reading
                reading = [pool.submit(read, *self.places[index]) for index in batch]
                if ready:
                    yield [self._on_device(*one.result()) for one in ready]
        finally:
            pool.shutdown(cancel_futures=True)

    def _on_device(self, kspace: Any, target: Any, peak: float) -> Slices:
        return Slices(
            torch.from_numpy(kspace)[None].to(self.device),
            torch.from_numpy(target)[None].to(self.device),
            torch.tensor([peak], device=self.device),
        )


def _volume(library: Any, path: Path) -> Volume:
    try:
        with library.File(path, "r") as file:
            for name, rank, kind in (("kspace", 4, "c"), ("reconstruction_rss", 3, "f")):
                _check(path, file, name, rank, kind)
            count, targets = file["kspace"].shape[0], file["reconstruction_rss"]
            height, width = file["kspace"].shape[2:]
            if min(height, width) < LEAST or not file["kspace"].shape[1]:
                raise StudyError(
                    f"{path} holds kspace of {file['kspace'].shape}: at least one coil and sides "
                    f">= {LEAST} are needed; leave this volume out"
                )
            if not count or count != targets.shape[0]:
                raise StudyError(
                    f"{path} holds {count} slices of kspace and {targets.shape[0]} of "
                    "reconstruction_rss: both must be equal and >= 1; fetch it again"
                )
            peak: Any = file.attrs["max"] if "max" in file.attrs else targets[()].max()
    except OSError as error:
        raise _unreadable(path, error) from None
    if not isinstance(peak, (float, np.number)) or not 0 < peak < np.inf:
        raise StudyError(f"{path} has the maximum {peak}, not a number > 0: fetch it again")
    return Volume(path, count, float(peak))


def _check(path: Path, file: Any, name: str, rank: int, kind: str) -> None:
    if name not in file or not hasattr(file[name], "shape"):
        raise StudyError(
            f"{path} has no {name} in it: use a volume of fastMRI's multicoil_train or "
            f"multicoil_val ({URL})"
        )
    dataset = file[name]
    if len(dataset.shape) != rank or dataset.dtype.kind != kind:
        axes = "[slices, coils, height, width]" if rank == 4 else "[slices, height, width]"
        numbers = "complex" if kind == "c" else "real"
        raise StudyError(
            f"{path} holds {name} of {dataset.dtype} {dataset.shape}: "
            f"{numbers} numbers {axes} are expected"
        )


def _unreadable(path: Path, error: Exception) -> StudyError:
    reason = " ".join(str(error).split())
    return StudyError(f"{path} cannot be read ({reason}): fetch it again ({URL})")
