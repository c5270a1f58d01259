"""Write CIFAR-10 as a folder tree of PNG files, for the problem `imagenet`.

    python benchmarks/evidence/cifar10_as_folders.py --data DIR --out DIR/imagenet
    python benchmarks/evidence/cifar10_as_folders.py --data DIR --out small --per-class 60

Uses one process per core. PNG is lossless.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from cubegrad.study import StudyError
from cubegrad.study.data.cifar10 import Images, cifar10

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
AT_ONCE = 500  # images per job

Job = tuple[Path, int, Any]  # the folder, the number of the first image, the images


def jobs(images: Images, out: Path, per_class: int | None) -> Iterator[Job]:
    for label, name in enumerate(CLASSES):
        chosen = images.images[images.labels == label][:per_class].permute(0, 2, 3, 1).numpy()
        for first in range(0, len(chosen), AT_ONCE):
            yield out / name, first, chosen[first : first + AT_ONCE]


def write(job: Job) -> int:
    folder, first, pixels = job
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(pixels, first):
        Image.fromarray(image).save(folder / f"{number:05}.png", compress_level=1)
    return len(pixels)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder of CIFAR-10")
    parser.add_argument("--out", type=Path, required=True, help="gets train/ and val/")
    parser.add_argument("--per-class", type=int, metavar="N", help="training images (all)")
    parser.add_argument("--per-class-val", type=int, metavar="N", help="test images (all)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty; give a new folder")
    start = time.monotonic()
    try:
        train, test = cifar10(options.data)
    except StudyError as error:
        parser.error(str(error))
    work = [
        *jobs(train, options.out / "train", options.per_class),
        *jobs(test, options.out / "val", options.per_class_val),
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        count = sum(pool.map(write, work))
    print(f"{count} images in {options.out}, {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
