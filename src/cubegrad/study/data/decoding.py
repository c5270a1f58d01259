"""Image files -> bytes: cropped in worker processes on demand, or all kept in memory.

A file that cannot be decoded raises an error when it is first read: checking a million images
before every run would take longer than most runs.
"""

import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from cubegrad.study.data import crops
from cubegrad.study.data.folders import Listing
from cubegrad.study.problem import Split, StudyError, optional
from cubegrad.study.processes import cores, die_with_parent

MOST_WORKERS = 16
FEW = 2000  # this many images are decoded before a worker has started
AT_ONCE = 500  # images per request when all are read into memory


class Batch(NamedTuple):
    images: Tensor  # [count, 3, side, side], values 0 to 255
    labels: Tensor


class Stored(NamedTuple):
    """Whole images as bytes [count, 3, n, m], each in the upper left corner, and their sizes."""

    images: Tensor
    sizes: Any  # numpy, [count, 2]: width and height
    labels: Tensor


class Request(NamedTuple):
    """Images to decode in a worker."""

    part: Split
    indices: list[int]
    epoch: int | None = None  # decides the random crops; None crops the middle


def open_image(path: Path) -> Any:
    """Pillow's image in RGB. Transparency is dropped, and 16 bits become the upper 8."""
    images = optional("PIL.Image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata and palettes
            with images.open(path) as image:
                return _rgb(image)
    except Exception as error:  # on damaged files Pillow may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StudyError(f"{path} cannot be decoded ({reason}); replace it, or delete it") from None


def _rgb(image: Any) -> Any:
    if image.mode.startswith("I"):  # Pillow would make everything above 255 white
        wide = np.asarray(image.convert("I"))
        image = optional("PIL.Image").fromarray((wide >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


@dataclass(frozen=True)
class Crops(Dataset[Batch | str]):
    """Square crops of images, at random places or of the middle."""

    parts: Mapping[Split, Listing]
    seed: int
    side: int
    short: int  # length of the shorter side before cropping the middle

    def __getitem__(self, request: Request) -> Batch | str:
        listing = self.parts[request.part]
        try:
            images = [self._crop(listing, index, request.epoch) for index in request.indices]
        except StudyError as error:
            return str(error)
        labels = torch.from_numpy(listing.labels[request.indices])
        return Batch(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), labels)

    def _crop(self, listing: Listing, index: int, epoch: int | None) -> Any:
        image = open_image(listing.path(index))
        size = np.array([image.size])
        bilinear = optional("PIL.Image").Resampling.BILINEAR
        if epoch is None:
            size = crops.resized(size, self.short)
            image = image.resize(size[0].tolist(), bilinear)
            left, top = crops.middles(size, self.side)[0].tolist()
            return np.asarray(image.crop((left, top, left + self.side, top + self.side)))
        uniform = crops.draws(self.seed, epoch, index, 1)
        boxes, mirrored = crops.random_boxes(size, uniform)
        left, top, width, height = boxes[0].tolist()
        image = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(image.resize((self.side, self.side), bilinear))
        return pixels[:, ::-1] if mirrored[0] else pixels


@dataclass(frozen=True)
class Whole(Dataset[list[Any] | str]):
    """Whole images, shrunk so that no side is longer than `longest`.

    As numpy arrays, which workers send through a pipe: tensors would use shared memory, which is
    scarce in containers.
    """

    parts: Mapping[Split, Listing]
    longest: int

    def __getitem__(self, request: Request) -> list[Any] | str:
        listing = self.parts[request.part]
        try:
            return [self._shrunk(listing.path(index)) for index in request.indices]
        except StudyError as error:
            return str(error)

    def _shrunk(self, path: Path) -> Any:
        image = open_image(path)
        factor = self.longest / max(image.size)
        if factor < 1:
            size = tuple(max(round(length * factor), 1) for length in image.size)
            image = image.resize(size, optional("PIL.Image").Resampling.BILINEAR)
        return np.array(image)


class _Requests:
    """A sampler whose samples can be replaced."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


class Workers:
    """Processes that answer requests, in order; with `count` 0 this process does.

    They start at the first request and live as long as this object.
    """

    def __init__(self, dataset: Dataset[Any], count: int, pinned: bool = False) -> None:
        self.sampler = _Requests()
        self.loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            sampler=self.sampler,
            num_workers=count,
            multiprocessing_context=_context() if count else None,
            persistent_workers=count > 0,
            pin_memory=pinned,
            worker_init_fn=_start_worker,
            collate_fn=_identity,
            generator=Generator(),  # leave the global generator to the run
        )

    def answers(self, requests: Iterable[Request]) -> Iterator[Any]:
        self.sampler.requests = requests
        try:
            for answer in self.loader:
                # Not raised there: torch would put the worker's traceback into the message.
                if isinstance(answer, str):
                    raise StudyError(answer)
                yield answer
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise StudyError(
                "a process that decodes images was killed, perhaps out of memory or of space in "
                "/dev/shm; run the same command again to resume"
            ) from None


def _context() -> Any:
    """Start workers from a server that has imported torch and runs nothing else.

    A fork of a process in which torch has started threads may hang; each spawned process would
    import torch again.
    """
    methods = torch.multiprocessing.get_all_start_methods()
    context = torch.multiprocessing.get_context(
        "forkserver" if "forkserver" in methods else "spawn"
    )
    context.set_forkserver_preload([__name__])
    return context


def _identity(answer: Any) -> Any:
    return answer


def _start_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C, and ends its workers
    die_with_parent()


def worker_count(images: int) -> int:
    """One per core, or none for few images."""
    return 0 if images < FEW else min(cores(), MOST_WORKERS)


def read_all(
    parts: Mapping[Split, Listing], longest: int, device: torch.device
) -> dict[Split, Stored]:
    """Every image of every part, on the device."""
    count = worker_count(sum(len(listing) for listing in parts.values()))
    workers = Workers(Whole(parts, longest), count)
    return {part: _stack(workers, part, listing, device) for part, listing in parts.items()}


def _stack(workers: Workers, part: Split, listing: Listing, device: torch.device) -> Stored:
    count = len(listing)
    starts = range(0, count, AT_ONCE)
    requests = [Request(part, list(range(start, min(start + AT_ONCE, count)))) for start in starts]
    pixels = [image for answer in workers.answers(requests) for image in answer]
    sizes = np.array([(image.shape[1], image.shape[0]) for image in pixels])
    width, height = sizes.max(0).tolist()
    images = np.zeros((count, 3, height, width), dtype=np.uint8)
    for place, image in zip(images, pixels, strict=True):
        place[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
    labels = torch.from_numpy(listing.labels)
    return Stored(torch.from_numpy(images).to(device), sizes, labels.to(device))
