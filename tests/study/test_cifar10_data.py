"""CIFAR-10 is read in every format it is published in, and anything else is refused."""

import os
import pickle
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from published_cifar import BINARY, PYTHON, ROWS, binary, content, md5, pack, publish, write_files

from cubegrad.study import StudyError
from cubegrad.study.data import cifar10 as data

REAL = Path(__file__).parents[3] / "shared" / "data"  # where a checkout has the set beside it


@pytest.mark.parametrize("published", [BINARY, PYTHON], ids=["binary", "python"])
@pytest.mark.parametrize("layout", ["folder", "archive", "itself"])
def test_every_form_gives_the_same_images(tmp_path, published, layout):
    source, files, archive = publish(*published)
    if layout == "archive":
        (tmp_path / source.archive).write_bytes(archive)
    else:
        write_files(tmp_path / source.folder if layout == "folder" else tmp_path, files)
    train, test = data.cifar10(tmp_path, sources=(source,))
    expected = [content(index) for index in range(6)]
    assert train.images.shape == (5 * ROWS, 3, 32, 32)
    assert train.images.dtype == test.images.dtype == torch.uint8
    assert np.array_equal(train.labels, np.concatenate([labels for _, labels in expected[:5]]))
    pixels = np.concatenate([pixels for pixels, _ in expected[:5]])
    assert np.array_equal(train.images.reshape(-1, 3072), pixels)
    assert np.array_equal(test.images.reshape(-1, 3072), expected[5][0])
    assert test.labels.tolist() == expected[5][1].tolist()
    # A row is the red plane, then the green and the blue one, each line by line.
    assert test.images[1, 2, 3, 4] == expected[5][0][1, 2 * 1024 + 3 * 32 + 4]


@pytest.mark.parametrize("layout", ["folder", "archive"])
@pytest.mark.parametrize("published", [BINARY, PYTHON], ids=["binary", "python"])
def test_one_altered_bit_is_found(tmp_path, published, layout):
    source, files, archive = publish(*published)
    write_files(tmp_path / source.folder if layout == "folder" else tmp_path / "elsewhere", files)
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
    write_files(tmp_path / source.folder, files)
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
    write_files(tmp_path / source.folder, files)
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
    write_files(tmp_path, files)
    sums = {name: md5(file) for name, file in files.items()}
    with pytest.raises(StudyError, match=message):
        data.cifar10(tmp_path, sources=(replace(source, files=sums),))


@pytest.mark.exhaustive
@pytest.mark.skipif(not (REAL / "unpack").exists(), reason="CIFAR-10 is not beside the checkout")
def test_the_real_test_set(tmp_path):
    """Byte for byte the published file, so its checksum holds; some of its labels and means."""
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
