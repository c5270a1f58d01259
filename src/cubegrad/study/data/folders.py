"""Images in folders: train/CLASS/*.JPEG and val/CLASS/*.JPEG, the usual layout of ImageNet."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cubegrad.study.problem import Split, StudyError

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
EVERY = 10  # one in ten images of each class is held out
LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"

Files = list[list[str]]  # by class, sorted paths relative to the part's folder


@dataclass(frozen=True)
class Listing:
    """The images of one part.

    Names are one array of bytes: every worker gets a copy, and 1.3 million Python strings would be
    larger and slower to send.
    """

    folder: Path
    names: Any  # a numpy array of bytes
    labels: Any  # a numpy array of int64

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(bytes(self.names[index]))


@dataclass(frozen=True)
class Tree:
    classes: tuple[str, ...]
    parts: dict[Split, Listing]


def read_tree(
    data: Path,
    most_classes: int | None = None,
    most_images: tuple[int | None, int | None] = (None, None),
    hold_out: bool = False,
) -> Tree:
    """The images in the folder `data`, or in `data/imagenet`.

    Limits keep the first classes, and the first images per class to train and test with. If there
    is no val/, a tenth of every class in train/ is the test set.
    """
    root = find(data)
    try:
        classes, train, test = _parts(root, most_classes)
    except OSError as error:
        raise StudyError(
            f"{root} cannot be read ({error}); fix it or use another folder"
        ) from error
    folder = root / "train"
    parts: dict[Split, tuple[Path, Files]] = {}
    if test is None:
        train, test = _split(train, classes, folder, "there is no val/ to test with")
        parts["test"] = folder, test
    else:
        parts["test"] = root / "val", test
    if hold_out:
        train, valid = _split(train, classes, folder, "some are held out for validation")
        parts["valid"] = folder, valid
    parts["train"] = folder, train
    for_training, for_testing = most_images
    return Tree(
        tuple(classes),
        {
            part: _listing(below, files, for_training if part == "train" else for_testing)
            for part, (below, files) in parts.items()
        },
    )


def find(data: Path) -> Path:
    for root in (data / "imagenet", data):
        if (root / "train").is_dir():
            return root
    raise StudyError(
        f"there is no folder of images {data / 'imagenet' / 'train'}, nor {data / 'train'}; "
        f"put your images there as {LAYOUT}, or set --data to their folder"
    )


def _parts(root: Path, most: int | None) -> tuple[list[str], Files, Files | None]:
    """The classes, and the images of each in train/ and, if it exists, in val/."""
    classes = _folders(root / "train")
    if len(classes) < 2:
        raise StudyError(
            f"{root / 'train'} has {len(classes)} folders of images, and a class is a folder; "
            f"lay out at least 2, as {LAYOUT}"
        )
    has_val = (root / "val").is_dir()
    if has_val:
        _compare(root, classes, _folders(root / "val"))
    classes = classes[:most]
    train = [_images(root / "train", name) for name in classes]
    return classes, train, [_images(root / "val", name) for name in classes] if has_val else None


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
        folders = sorted(entry.name for entry in visible if entry.is_dir())
    if not folders and any(_is_image(entry.name) for entry in visible):
        raise StudyError(
            f"{folder} has images and no folders, so their classes are unknown; "
            f"move each into the folder of its class, as {LAYOUT}"
        )
    return folders


def _compare(root: Path, train: Sequence[str], val: Sequence[str]) -> None:
    for part, here, there in (("val", val, train), ("train", train, val)):
        missing = sorted(set(there) - set(here))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StudyError(
                f"{root / part} has no folder {missing[0]!r}{more}; "
                f"train/ and val/ must have the same classes"
            )


def _images(folder: Path, name: str) -> list[str]:
    """A class's images, including those in subfolders."""
    images = []
    for place, folders, files in os.walk(folder / name, onerror=_raise):
        folders[:] = [below for below in folders if not below.startswith(".")]
        below = os.path.relpath(place, folder)
        images += [os.path.join(below, file) for file in files if _is_image(file)]  # noqa: PTH118
    if not images:
        raise StudyError(
            f"{folder / name} has no images ({', '.join(SUFFIXES)}); "
            "put some there, or delete the folder"
        )
    return sorted(images)


def _raise(error: OSError) -> None:
    raise error


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _split(files: Files, classes: Sequence[str], folder: Path, reason: str) -> tuple[Files, Files]:
    """Hold out every tenth image of each class; returns the others and the held-out ones."""
    for name, images in zip(classes, files, strict=True):
        if len(images) < 2:
            raise StudyError(f"{folder / name} has one image and {reason}; it needs at least 2")
    kept = [[name for i, name in enumerate(images) if not _held(i, images)] for images in files]
    held = [[name for i, name in enumerate(images) if _held(i, images)] for images in files]
    return kept, held


def _held(index: int, images: Sequence[str]) -> bool:
    return index % EVERY == min(EVERY, len(images)) - 1


def _listing(folder: Path, files: Files, most: int | None) -> Listing:
    chosen = [images[:most] for images in files]
    names = [os.fsencode(name) for images in chosen for name in images]
    labels = np.repeat(np.arange(len(chosen)), [len(images) for images in chosen])
    return Listing(folder, np.array(names), labels)
