"""CIFAR-10, from the publisher's binary or Python archive, packed or unpacked, checked by md5."""

import hashlib
import io
import os
import pickle
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cubegrad.study.problem import StudyError

CHUNK = 2**20
TIMEOUT = 60  # seconds without a byte


class Images(NamedTuple):
    """Images in uint8, [count, 3, 32, 32], and their labels."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Source:
    """One published form of a data set: an archive with one folder in it."""

    url: str
    md5: str  # of the archive
    folder: str
    files: dict[str, str]  # the files to read, in order, and their md5s
    parse: Callable[[bytes], tuple[Any, Any]] = field(repr=False)

    @property
    def archive(self) -> str:
        return self.url.rsplit("/", 1)[-1]


class _PlainArrays(pickle.Unpickler):
    """Reads only lists, dicts, numbers, strings and numpy arrays: a pickle could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.ndarray(0).__reduce__()[0]  # its module's name depends on the release
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a file of images")


def _binary(content: bytes) -> tuple[Any, Any]:
    """Rows of a label and 3,072 pixels: the red plane, then the green, then the blue."""
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:], rows[:, 0]


def _pickled(content: bytes) -> tuple[Any, Any]:
    """A dict, pickled by Python 2, with the same rows under `data` and a list under `labels`."""
    batch = _PlainArrays(io.BytesIO(content), encoding="bytes").load()
    return np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])


CIFAR10_BINARY = Source(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    files={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    parse=_binary,
)
CIFAR10_PYTHON = Source(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    md5="c58f30108f718f92721af3b95e74349a",
    folder="cifar-10-batches-py",
    files={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    parse=_pickled,
)
CIFAR10 = (CIFAR10_BINARY, CIFAR10_PYTHON)


def cifar10(
    data: Path, download: bool = False, sources: tuple[Source, ...] = CIFAR10
) -> tuple[Images, Images]:
    """CIFAR-10's training and test sets, from the first of its forms found in `data`."""
    location = find(data, sources)
    if location is None and download:
        location = fetch(sources[0], data), sources[0]
    if location is None:
        raise StudyError(
            f"CIFAR-10 is not in {data}: allow the download (--download), or put there "
            + " or ".join(f"{source.archive} (from {source.url})" for source in sources)
            + " or a folder unpacked from it"
        )
    *train, test = read(*location)
    return Images(*(torch.cat(part) for part in zip(*train, strict=True))), test


def read(place: Path, source: Source) -> list[Images]:
    """The images in the source's files, checked, from a folder or an archive."""
    try:
        return [_images(name, *_parsed(source, name, raw)) for name, raw in _files(place, source)]
    except OSError as error:
        raise StudyError(
            f"{place} cannot be read ({error}): fix it or use another folder"
        ) from error


def find(data: Path, sources: tuple[Source, ...]) -> tuple[Path, Source] | None:
    """The first folder or archive of one of these sources in `data`, or `data` itself."""
    for source in sources:
        for place in (data / source.folder, data / source.archive, data):
            if place == data and not any((data / name).is_file() for name in source.files):
                continue
            if place.exists():
                return place, source
    return None


def fetch(source: Source, data: Path) -> Path:
    """Download the archive into `data`; it gets its name once it is complete and checked."""
    target = data / source.archive
    part = data / f".{source.archive}.{os.getpid()}"  # other processes may download too
    try:
        data.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            md5 = _copy(source, file)
        if md5 != source.md5:
            raise StudyError(
                f"{source.url} came with md5 {md5} instead of {source.md5}: try again, "
                f"or put {source.archive} into {data} yourself"
            )
        part.replace(target)
    except (OSError, HTTPException) as error:
        raise StudyError(
            f"{source.url} could not be fetched into {data} ({error}): try again, "
            f"or put {source.archive} there yourself"
        ) from error
    finally:
        with suppress(OSError):  # already renamed, or the folder does not exist
            part.unlink()
    return target


def _copy(source: Source, file: Any) -> str:
    """Download into the file, with a progress bar; returns the md5."""
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(source.url, timeout=TIMEOUT) as answer:
        length = int(answer.headers.get("Content-Length") or 0) or None
        pace = 0.1 if sys.stderr.isatty() else 10  # seconds; fewer lines in a log
        with tqdm(
            total=length, unit="B", unit_scale=True, desc=source.archive, mininterval=pace
        ) as bar:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                digest.update(chunk)
                bar.update(len(chunk))
    return digest.hexdigest()


def _files(place: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    """Each file's path, for messages, and its checked content."""
    if place.is_dir():
        for name, md5 in source.files.items():
            file = place / name
            if not file.is_file():
                raise StudyError(f"{file} is missing: unpack {source.archive} again ({source.url})")
            content = file.read_bytes()
            _check(file, hashlib.md5(content, usedforsecurity=False).hexdigest(), md5, source)
            yield str(file), content
        return
    with place.open("rb") as file_object:
        digest = hashlib.file_digest(file_object, lambda: hashlib.md5(usedforsecurity=False))
    _check(place, digest.hexdigest(), source.md5, source)
    with tarfile.open(place) as archive:
        members = {Path(member.name).name: member for member in archive if member.isfile()}
        for name in source.files:
            opened = archive.extractfile(members[name]) if name in members else None
            if opened is None:
                raise StudyError(f"{place} has no {name} in it: fetch {source.url} again")
            yield f"{place}/{name}", opened.read()


def _check(path: Path, md5: str, expected: str, source: Source) -> None:
    if md5 != expected:
        raise StudyError(
            f"{path} is not the published file (md5 {md5} instead of {expected}): "
            f"delete it and download it again from {source.url}"
        )


def _parsed(source: Source, name: str, content: bytes) -> tuple[Any, Any]:
    try:
        return source.parse(content)
    except Exception as error:  # a pickle can raise anything
        raise StudyError(f"{name} cannot be read ({error}): fetch {source.url} again") from error


def _images(name: str, pixels: Any, labels: Any) -> Images:
    rows = len(labels)
    if pixels.dtype != np.uint8 or pixels.shape != (rows, 3072) or not rows:
        raise StudyError(
            f"{name} holds pixels of {pixels.dtype} {pixels.shape} and {rows} labels: "
            "a row of 3,072 bytes for each label is expected"
        )
    if not 0 <= labels.min() <= labels.max() <= 9:
        raise StudyError(f"{name} has the labels {labels.min()} to {labels.max()}, not 0 to 9")
    images = torch.from_numpy(pixels.copy()).view(rows, 3, 32, 32)
    return Images(images, torch.from_numpy(labels.astype(np.int64)))
