"""Image files of every mode, damaged ones, and the worker processes that read them."""

import io
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from linux_processes import is_running, needs_proc
from PIL import Image
from small_images import photo, write_images
from small_runs import CPU

from cubegrad.study import StudyError
from cubegrad.study.data import decoding
from cubegrad.study.data.decoding import Crops, Request, Whole, Workers, open_image, read_all
from cubegrad.study.data.folders import read_tree

TWO = min(2, os.cpu_count() or 1)  # torch warns of more workers than cores


def pixels(path):
    image = open_image(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_rgb_stays_as_it_is(tmp_path):
    photo().save(tmp_path / "x.png")
    assert np.array_equal(pixels(tmp_path / "x.png"), np.asarray(photo()))


def test_grey_and_one_bit(tmp_path):
    grey = photo().convert("L")
    grey.save(tmp_path / "x.png")
    assert np.array_equal(pixels(tmp_path / "x.png"), np.repeat(np.asarray(grey)[..., None], 3, 2))
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bit.png")
    assert pixels(tmp_path / "bit.png").tolist() == [[[255] * 3, [0] * 3]]


def test_sixteen_bits_keep_the_upper_eight(tmp_path):
    Image.fromarray(np.array([[0, 255, 256, 0x80FF, 0xFFFF]], dtype=np.uint16)).save(
        tmp_path / "x.png"
    )
    assert pixels(tmp_path / "x.png")[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_a_palette_with_and_without_transparency(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "x.gif")
    image.save(tmp_path / "x.png", transparency=b"\x00\x80")
    for name in ("x.gif", "x.png"):
        assert pixels(tmp_path / name).tolist() == [[[10, 20, 30], [200, 100, 50]]]


def test_alpha_is_dropped(tmp_path):
    Image.new("RGBA", (1, 1), (10, 20, 30, 0)).save(tmp_path / "x.png")
    assert pixels(tmp_path / "x.png").tolist() == [[[10, 20, 30]]]


def test_cmyk(tmp_path):
    """Cyan has no red, black no colour at all."""
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "cyan.jpg")
    Image.new("CMYK", (8, 8), (0, 0, 0, 255)).save(tmp_path / "black.jpg")
    assert np.abs(pixels(tmp_path / "cyan.jpg").astype(int) - [0, 255, 255]).max() <= 2
    assert pixels(tmp_path / "black.jpg").max() <= 2


def saved(kind):
    file = io.BytesIO()
    photo((64, 64)).save(file, kind)
    return file.getvalue()


DAMAGED = {
    "cut.JPEG": saved("JPEG")[:900],
    "cut.png": saved("PNG")[:900],
    "header.JPEG": saved("JPEG")[:20],
    "text.JPEG": b"404: not found\n",
    "empty.JPEG": b"",
    "altered.png": saved("PNG")[:60] + b"\x00\x01\x02" + saved("PNG")[63:],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named_in_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(DAMAGED[name])
    with pytest.raises(StudyError) as error:
        open_image(tmp_path / name)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / name} cannot be decoded (")
    assert message.endswith("; replace it, or delete it")
    assert "\n" not in message


def test_a_missing_file_and_a_missing_library(tmp_path, monkeypatch):
    with pytest.raises(StudyError, match=r"gone\.JPEG cannot be decoded \(.*No such file"):
        open_image(tmp_path / "gone.JPEG")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(StudyError, match=r"PIL.* is missing; run pip install"):
        open_image(tmp_path / "gone.JPEG")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return read_tree(write_images(tmp_path_factory.mktemp("images"), train=8, val=4))


def requests():
    """Two epochs of three batches, and the test set between them."""
    order = np.random.default_rng(0).permutation(24).tolist()
    batches = [order[:10], order[10:20], order[20:]]
    train = [Request("train", indices, epoch) for epoch in (0, 1) for indices in batches]
    return [*train[:3], Request("test", list(range(12))), *train[3:]]


@pytest.mark.processes
def test_any_number_of_workers_gives_the_same_batches(tree):
    crops = Crops(tree.parts, seed=4, side=16, short=18)
    alone = list(Workers(crops, 0).answers(requests()))
    several = Workers(crops, TWO)
    shared = list(several.answers(requests()))
    assert len(alone) == len(shared) == 7
    for one, other, wanted in zip(alone, shared, requests(), strict=True):
        assert torch.equal(one.images, other.images)
        assert (
            one.labels.tolist()
            == [index // (4 if wanted.epoch is None else 8) for index in wanted.indices]
            == other.labels.tolist()
        )
        assert one.images.shape == (len(wanted.indices), 3, 16, 16)
        assert one.images.dtype == torch.uint8
        assert one.images.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(alone[0].images, alone[4].images)
    # The same processes answer again after an iteration that was abandoned.
    abandoned = several.answers(requests())
    next(abandoned)
    del abandoned
    (again,) = several.answers(requests()[5:6])
    assert torch.equal(again.images, alone[5].images)


def test_the_test_crop_is_the_resized_middle(tree):
    (batch,) = Workers(Crops(tree.parts, 0, 16, 18), 0).answers([Request("test", [5])])
    with Image.open(tree.parts["test"].path(5)) as image:
        assert image.size == (33, 29)
        middle = image.resize((20, 18), Image.Resampling.BILINEAR).crop((2, 1, 18, 17))
    assert np.array_equal(batch.images[0].permute(1, 2, 0), np.asarray(middle))


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_one_line(tmp_path, workers):
    tree = read_tree(write_images(tmp_path, train=4, val=2))
    damaged = tree.parts["train"].path(6)
    damaged.write_bytes(damaged.read_bytes()[:700])
    for dataset in (Crops(tree.parts, 0, 16, 18), Whole(tree.parts, 64)):
        asked = Workers(dataset, workers)
        answers = asked.answers([Request("train", [0, 1], 0), Request("train", [5, 6], 0)])
        assert len(next(answers)) == 2
        with pytest.raises(StudyError, match=r"^\S+green/002\.JPEG cannot be decoded") as error:
            next(answers)
        assert "\n" not in str(error.value)


@pytest.mark.processes
def test_a_killed_worker_is_reported(tree, monkeypatch):
    workers = Workers(Crops(tree.parts, 0, 16, 18), 1)
    list(workers.answers([Request("train", [0], 0)]))
    (process,) = workers.loader._iterator._workers
    # How often torch looks whether its workers live: every 5 s, and this test waits for it twice.
    monkeypatch.setattr(type(workers.loader._iterator)._try_get_data, "__defaults__", (0.2,))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(StudyError, match="a process that decodes images was killed") as error:
        list(workers.answers([Request("train", [0], 0)]))
    assert "\n" not in str(error.value)


ENDLESS = """
import sys, time
from pathlib import Path
from cubegrad.study.data.decoding import Crops, Request, Workers
from cubegrad.study.data.folders import read_tree

workers = Workers(Crops(read_tree(Path(sys.argv[1])).parts, 0, 16, 18), 1)
next(workers.answers(Request("train", [0], epoch) for epoch in range(10**9)))
print(workers.loader._iterator._workers[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.processes
@needs_proc
def test_workers_do_not_outlive_a_killed_run(tree):
    root = str(tree.parts["train"].folder.parent)
    command = [sys.executable, "-c", ENDLESS, root]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        pid = int(process.stdout.readline())
        assert is_running(pid)
        process.kill()
    end = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)


def test_all_images_in_memory(tree, monkeypatch):
    monkeypatch.setattr(decoding, "AT_ONCE", 5)
    stored = read_all(tree.parts, 64, CPU)
    images, sizes, labels = stored["train"]
    # 8 images of each of 3 classes, from 32 to 36 wide and from 28 to 34 high
    assert images.shape == (24, 3, 34, 36)
    assert labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    for index in (0, 6, 23):
        expected = pixels(tree.parts["train"].path(index))
        height, width, _ = expected.shape
        assert sizes[index].tolist() == [width, height]
        assert np.array_equal(images[index, :, :height, :width].permute(1, 2, 0), expected)
        assert not images[index, :, height:].any()
        assert not images[index, :, :, width:].any()
    assert len(stored["test"].labels) == 12


def test_large_images_are_shrunk_to_fit(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        for index in range(2):
            photo((200, 100)).save(tmp_path / "train" / name / f"{index}.png")
    stored = read_all(read_tree(tmp_path).parts, 50, CPU)["train"]
    assert stored.sizes.tolist() == [[50, 25]] * 2
    expected = np.asarray(photo((200, 100)).resize((50, 25), Image.Resampling.BILINEAR))
    assert np.array_equal(stored.images[1].permute(1, 2, 0), expected)


def test_workers_are_one_a_core_unless_images_are_few(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert decoding.worker_count(decoding.FEW - 1) == 0
    assert decoding.worker_count(decoding.FEW) == 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert decoding.worker_count(10**6) == decoding.MOST_WORKERS == 16
