"""Folders of images: what is found in them, how they are split, and what is refused."""

import os

import numpy as np
import pytest
from small_images import photo, write_images

from cubegrad.study import StudyError
from cubegrad.study.data.folders import read_tree


def names(tree, part):
    listing = tree.parts[part]
    paths = [listing.path(index) for index in range(len(listing))]
    return [str(path.relative_to(listing.folder)) for path in paths]


def touch(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"")


def refusal(data, **options):
    """The one line of error that reading these folders ends with."""
    with pytest.raises(StudyError) as error:
        read_tree(data, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("where", [".", "imagenet"])
def test_classes_and_images_come_in_the_order_of_their_names(tmp_path, where):
    root = tmp_path / where
    touch(root, "train/n2/b.jpg", "train/n2/a.JPEG", "train/n10/x.png", "train/n10/deep/y.PNG")
    touch(root, "train/n2/notes.txt", "train/n2/._a.JPEG", "train/.cache/z.png", "train/list.csv")
    touch(root, "val/n10/v.webp", "val/n2/v.bmp")
    tree = read_tree(tmp_path)
    assert tree.classes == ("n10", "n2")
    assert names(tree, "train") == ["n10/deep/y.PNG", "n10/x.png", "n2/a.JPEG", "n2/b.jpg"]
    assert tree.parts["train"].labels.tolist() == [0, 0, 1, 1]
    assert names(tree, "test") == ["n10/v.webp", "n2/v.bmp"]
    assert tree.parts["train"].labels.dtype == np.int64
    assert all(tree.parts["train"].path(index).is_file() for index in range(4))


def test_names_need_not_be_ascii_or_even_text(tmp_path):
    strange = os.fsdecode(b"\xff\xfe.jpg")
    touch(
        tmp_path, "train/Äpfel/grün 1.jpg", f"train/b/{strange}", "val/Äpfel/x.jpg", "val/b/y.jpg"
    )
    tree = read_tree(tmp_path)
    assert sorted(names(tree, "train")) == sorted(["Äpfel/grün 1.jpg", f"b/{strange}"])
    assert all(tree.parts["train"].path(index).is_file() for index in range(2))


def test_every_tenth_is_held_out_of_each_class(tmp_path):
    write_images(tmp_path, train=25, val=0, classes=("a", "b"))
    write_images(tmp_path / "third", train=3, val=0, classes=("c",))
    (tmp_path / "third/train/c").rename(tmp_path / "train/c")
    tree = read_tree(tmp_path)
    expected = [f"{name}/{index:03}.JPEG" for name in "ab" for index in (9, 19)]
    assert names(tree, "test") == [*expected, "c/002.JPEG"]
    assert len(names(tree, "train")) == 23 + 23 + 2
    assert not set(names(tree, "train")) & set(names(tree, "test"))
    held = read_tree(tmp_path, hold_out=True)
    assert names(held, "test") == names(tree, "test")
    assert len(names(held, "valid")) == 2 + 2 + 1
    together = names(held, "train") + names(held, "valid")
    assert sorted(together) == sorted(names(tree, "train"))


def test_val_stays_whole_when_a_part_is_held_out(tmp_path):
    write_images(tmp_path, train=10, val=4)
    tree = read_tree(tmp_path, hold_out=True)
    assert {part: len(listing) for part, listing in tree.parts.items()} == {
        "train": 27,
        "valid": 3,
        "test": 12,
    }
    assert tree.parts["valid"].folder == tree.parts["train"].folder == tmp_path / "train"
    assert tree.parts["test"].folder == tmp_path / "val"


def test_fewer_classes_and_images_are_the_first(tmp_path):
    write_images(tmp_path, train=6, val=5)
    tree = read_tree(tmp_path, 2, (4, 3))
    assert tree.classes == ("blue", "green")
    assert names(tree, "train") == [f"{c}/{i:03}.JPEG" for c in ("blue", "green") for i in range(4)]
    assert tree.parts["test"].labels.tolist() == [0] * 3 + [1] * 3


def test_no_tree(tmp_path):
    message = refusal(tmp_path / "nowhere")
    for part in ("nowhere/imagenet/train", "nowhere/train", "val/CLASS/*.JPEG", "--data"):
        assert part in message


@pytest.mark.parametrize("classes", [(), ("only",)])
def test_one_class_is_not_enough(tmp_path, classes):
    (tmp_path / "train").mkdir()
    if classes:
        write_images(tmp_path, classes=classes)
    message = refusal(tmp_path)
    assert f"has {len(classes)} folders" in message
    assert "at least 2" in message


@pytest.mark.parametrize("part", ["train", "val"])
def test_images_outside_class_folders_are_refused(tmp_path, part):
    """ImageNet's archive of validation images has no folders."""
    write_images(tmp_path)
    (tmp_path / part).rename(tmp_path / "aside")
    touch(tmp_path, f"{part}/ILSVRC2012_val_00000001.JPEG")
    message = refusal(tmp_path)
    assert f"{tmp_path / part} has images and no folders" in message
    assert "move each into the folder of its class" in message


@pytest.mark.parametrize("part", ["train", "val"])
def test_an_empty_class(tmp_path, part):
    write_images(tmp_path)
    folder = tmp_path / part / "green"
    for image in folder.iterdir():
        image.rename(image.with_suffix(".txt"))
    assert refusal(tmp_path).startswith(f"{folder} has no images (.jpeg, .jpg, .png")


def test_val_with_other_classes(tmp_path):
    write_images(tmp_path)
    (tmp_path / "val" / "red").rename(tmp_path / "val" / "rouge")
    message = refusal(tmp_path)
    assert f"{tmp_path / 'val'} has no folder 'red'; train/ and val/ must have the same" in message
    (tmp_path / "train" / "red").rename(tmp_path / "train" / "rouge")
    (tmp_path / "val" / "black").mkdir()
    (tmp_path / "val" / "white").mkdir()
    assert f"{tmp_path / 'train'} has no folder 'black' and 1 more; " in refusal(tmp_path)


def test_one_image_cannot_be_held_out(tmp_path):
    write_images(tmp_path, train=1, val=0)
    assert "train/blue has one image and there is no val/" in refusal(tmp_path)
    write_images(tmp_path / "second", train=1, val=1)
    assert len(read_tree(tmp_path / "second").parts["test"]) == 3
    assert "it needs at least 2" in refusal(tmp_path / "second", hold_out=True)


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    write_images(tmp_path, train=2)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", denied)
    message = refusal(tmp_path)
    assert f"{tmp_path} cannot be read" in message
    assert "Permission denied" in message


def test_a_link_to_a_folder_is_a_class(tmp_path):
    write_images(tmp_path, train=2, classes=("a",))
    (tmp_path / "elsewhere").mkdir()
    photo().save(tmp_path / "elsewhere" / "x.png")
    for part in ("train", "val"):
        (tmp_path / part / "b").symlink_to(tmp_path / "elsewhere")
    assert read_tree(tmp_path).classes == ("a", "b")
    assert names(read_tree(tmp_path), "train")[-1] == "b/x.png"
