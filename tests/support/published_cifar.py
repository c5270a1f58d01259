"""CIFAR-10 in the formats it is published in, with four images a file."""

import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cubegrad.study.data import cifar10 as data

ROWS = 4


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, as in the published files."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_bytes(self, value):
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)

    dispatch[bytes] = save_bytes


def pickled(pixels, labels):
    file = io.BytesIO()
    batch = {b"batch_label": b"some", b"labels": labels.tolist(), b"data": pixels}
    Python2Pickler(file, protocol=2).dump(batch)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def binary(pixels, labels):
    return np.concatenate([labels[:, None].astype(np.uint8), pixels], 1).tobytes()


def content(index):
    generator = np.random.default_rng(index)
    pixels = generator.integers(256, size=(ROWS, 3072), dtype=np.uint8)
    return pixels, generator.integers(10, size=ROWS)


def md5(raw):
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def pack(files, folder):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name, file in {**files, "readme.html": b"about"}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(file)
            archive.addfile(member, io.BytesIO(file))
    return raw.getvalue()


def publish(published: data.Source, write: Callable[..., bytes], address: str = ""):
    """A small data set in a published format: its source, files and archive."""
    files = {name: write(*content(index)) for index, name in enumerate(published.files)}
    archive = pack(files, published.folder)
    sums = {name: md5(file) for name, file in files.items()}
    source = replace(published, files=sums, md5=md5(archive))
    return replace(source, url=address + source.archive), files, archive


def write_files(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        (folder / name).write_bytes(file)


BINARY = (data.CIFAR10_BINARY, binary)
PYTHON = (data.CIFAR10_PYTHON, pickled)
