"""CIFAR-10 is read from every form it is published in, and never from anything else.

The files of these tests have the publisher's formats, with four images each.
"""

import hashlib
import io
import os
import pickle
import runpy
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.client import IncompleteRead
from pathlib import Path

import numpy as np
import pytest
import torch

from cubegrad.study import StudyError
from cubegrad.study.data import cifar10 as data

REAL = Path(__file__).parents[3] / "shared" / "data"  # where a checkout has the set beside it
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
    """A small set in the form of a published one: its source, files and archive."""
    files = {name: write(*content(index)) for index, name in enumerate(published.files)}
    archive = pack(files, published.folder)
    sums = {name: md5(file) for name, file in files.items()}
    source = replace(published, files=sums, md5=md5(archive))
    return replace(source, url=address + source.archive), files, archive


def lay(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        (folder / name).write_bytes(file)


BINARY = (data.CIFAR10_BINARY, binary)
PYTHON = (data.CIFAR10_PYTHON, pickled)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    opened = urllib.request.urlopen

    def local(url, **options):
        assert url.startswith("file:"), f"{url} was asked for"
        return opened(url, **options)

    monkeypatch.setattr(urllib.request, "urlopen", local)


@pytest.mark.parametrize("published", [BINARY, PYTHON], ids=["binary", "python"])
@pytest.mark.parametrize("layout", ["folder", "archive", "itself"])
def test_every_form_gives_the_same_images(tmp_path, published, layout):
    source, files, archive = publish(*published)
    if layout == "archive":
        (tmp_path / source.archive).write_bytes(archive)
    else:
        lay(tmp_path / source.folder if layout == "folder" else tmp_path, files)
    train, test = data.cifar10(tmp_path, sources=(source,))
    expected = [content(index) for index in range(6)]
    assert train.images.shape == (5 * ROWS, 3, 32, 32)
    assert train.images.dtype == test.images.dtype == torch.uint8
    assert np.array_equal(train.labels, np.concatenate([labels for _, labels in expected[:5]]))
    pixels = np.concatenate([pixels for pixels, _ in expected[:5]])
    assert np.array_equal(train.images.reshape(-1, 3072), pixels)
    assert np.array_equal(test.images.reshape(-1, 3072), expected[5][0])
    assert test.labels.tolist() == expected[5][1].tolist()
    # A row is the red plane, the green and the blue, each line after line.
    assert test.images[1, 2, 3, 4] == expected[5][0][1, 2 * 1024 + 3 * 32 + 4]


def test_missing_data_is_not_fetched_unasked(tmp_path):
    with pytest.raises(StudyError) as error:
        data.cifar10(tmp_path / "nowhere")
    message = str(error.value)
    assert "\n" not in message
    for part in (
        str(tmp_path / "nowhere"),
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "allow the download",
    ):
        assert part in message
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("layout", ["folder", "archive"])
@pytest.mark.parametrize("published", [BINARY, PYTHON], ids=["binary", "python"])
def test_one_altered_bit_is_found(tmp_path, published, layout):
    source, files, archive = publish(*published)
    lay(tmp_path / source.folder if layout == "folder" else tmp_path / "elsewhere", files)
    path = tmp_path / source.archive
    if layout == "folder":
        path = tmp_path / source.folder / list(files)[2]
    whole = files[path.name] if layout == "folder" else archive
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StudyError, match="is not the published file") as error:
        data.cifar10(tmp_path, sources=(source,))
    message = str(error.value)
    for part in (str(path), md5(whole), md5(path.read_bytes()), source.url):
        assert part in message


def test_a_missing_file_is_named(tmp_path):
    source, files, _ = publish(*BINARY)
    lay(tmp_path / source.folder, files)
    (tmp_path / source.folder / "data_batch_4.bin").unlink()
    with pytest.raises(StudyError, match=r"data_batch_4\.bin is missing: unpack cifar-10-binary"):
        data.cifar10(tmp_path, sources=(source,))
    del files["test_batch.bin"]
    archive = pack(files, source.folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / source.archive).write_bytes(archive)
    with pytest.raises(StudyError, match=r"has no test_batch\.bin in it"):
        data.cifar10(tmp_path / "other", sources=(replace(source, md5=md5(archive)),))


class Malice:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_a_pickle_runs_no_code(tmp_path):
    source, files, _ = publish(*PYTHON)
    files["data_batch_1"] = pickle.dumps({b"data": Malice(str(tmp_path / "ran"))})
    sums = {name: md5(file) for name, file in files.items()}
    lay(tmp_path / source.folder, files)
    with pytest.raises(StudyError, match="has no place in a file of images"):
        data.cifar10(tmp_path, sources=(replace(source, files=sums),))
    assert not (tmp_path / "ran").exists()
    pickle.loads(files["data_batch_1"])
    assert (tmp_path / "ran").exists()  # the file was dangerous


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (binary(content(0)[0], np.array([0, 9, 10, 1])), "labels 0 to 10, not 0 to 9"),
        (b"", "holds pixels of uint8"),
        (b"x" * 3074, "cannot be read"),
    ],
)
def test_content_that_cannot_be_images_is_refused(tmp_path, raw, message):
    source, files, _ = publish(*BINARY)
    files["data_batch_1.bin"] = raw
    lay(tmp_path, files)
    sums = {name: md5(file) for name, file in files.items()}
    with pytest.raises(StudyError, match=message):
        data.cifar10(tmp_path, sources=(replace(source, files=sums),))


@pytest.fixture
def shop(tmp_path):
    """An address to fetch from, and the folder to fetch to."""
    (tmp_path / "shop").mkdir()
    source, _, archive = publish(*BINARY, address=(tmp_path / "shop").as_uri() + "/")
    (tmp_path / "shop" / source.archive).write_bytes(archive)
    return source, tmp_path / "shop" / source.archive, tmp_path / "deep" / "data"


def test_a_download_is_shown_checked_and_kept(shop, capsys):
    source, address, folder = shop
    train, _ = data.cifar10(folder, download=True, sources=(source,))
    assert len(train.labels) == 5 * ROWS
    (archive,) = folder.iterdir()
    assert archive.name == "cifar-10-binary.tar.gz"
    assert archive.read_bytes() == address.read_bytes()
    shown = capsys.readouterr().err
    assert "cifar-10-binary.tar.gz: 100%" in shown
    address.unlink()
    again, _ = data.cifar10(folder, download=True, sources=(source,))
    assert torch.equal(again.images, train.images)


def test_a_wrong_download_is_not_kept(shop):
    source, address, folder = shop
    address.write_bytes(address.read_bytes()[:-1])
    with pytest.raises(StudyError, match=r"came with md5 .* instead of .*: try again") as error:
        data.cifar10(folder, download=True, sources=(source,))
    assert source.md5 in str(error.value)
    assert list(folder.iterdir()) == []


class Broken:
    """An answer that ends in the middle."""

    headers: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, end):
        self.chunks = [b"begun", end]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def read(self, _):
        chunk = self.chunks.pop(0)
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        (ConnectionResetError("reset by peer"), StudyError),
        (TimeoutError("timed out"), StudyError),
        (IncompleteRead(b""), StudyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_broken_download_leaves_nothing(shop, monkeypatch, end, seen):
    source, _, folder = shop
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Broken(end))
    with pytest.raises(seen) as error:
        data.cifar10(folder, download=True, sources=(source,))
    assert list(folder.iterdir()) == []
    if seen is StudyError:
        assert source.url in str(error.value)
        assert f"put {source.archive} there yourself" in str(error.value)


def test_an_address_that_does_not_answer_is_named(shop):
    source, address, folder = shop
    address.unlink()
    with pytest.raises(StudyError, match="could not be fetched") as error:
        data.cifar10(folder, download=True, sources=(source,))
    assert source.url in str(error.value)
    folder.rmdir()
    folder.write_bytes(b"a file in the way")
    with pytest.raises(StudyError, match="could not be fetched into"):
        data.cifar10(folder, download=True, sources=(source,))


@pytest.mark.skipif(not (REAL / "unpack").exists(), reason="CIFAR-10 is not beside the checkout")
def test_the_real_test_set(tmp_path):
    """The published file byte for byte; its labels and pixels as they are known."""
    packed = np.load(REAL / "cifar10_lossless_test.npz")
    pixels = runpy.run_path(str(REAL / "unpack"))["decode"](packed).reshape(-1, 3072)
    (tmp_path / "test_batch.bin").write_bytes(binary(pixels, packed["y"]))
    only = {"test_batch.bin": data.CIFAR10_BINARY.files["test_batch.bin"]}
    (test,) = data.read(tmp_path, replace(data.CIFAR10_BINARY, files=only))
    assert test.images.shape == (10_000, 3, 32, 32)
    assert test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert test.labels.bincount().tolist() == [1000] * 10
    means = test.images.double().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4942, 0.4851, 0.4504], abs=1e-4)
