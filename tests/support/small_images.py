"""Folders of made-up images, and the problem `imagenet` in small."""

from dataclasses import replace

import numpy as np
from PIL import Image

from cubegrad.study.problems import imagenet

COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 60), "red": (210, 50, 40)}
TINY = {"stages": (1, 1), "width": 4, "side": 16, "short": 18}


def photo(size=(40, 30), colour=(120, 120, 120), seed=0):
    """Noise around a colour, with a bright corner that shows where a crop was taken."""
    generator = np.random.default_rng(seed)
    pixels = np.clip(generator.normal(colour, 20, (size[1], size[0], 3)), 0, 255)
    pixels[: size[1] // 4, : size[0] // 4] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def write_images(root, train=20, val=6, classes=COLOURS):
    """Folders root/train and root/val with so many images of each class; no val/ if it is 0."""
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(classes if count else ()):
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                size = (32 + index % 5, 28 + index % 7)
                seed = 1000 * label + index + (500 if part == "val" else 0)
                image = photo(size, COLOURS.get(name, (99, 99, 99)), seed)
                image.save(folder / f"{index:03}.JPEG", "JPEG")
    return root


def small_problem(**options):
    """The problem on all images of a folder, with a net of a few hundred weights."""
    problem = imagenet.problem()
    preset = problem.presets["cpu"]
    options = {**preset.options, **TINY, "train": None, "test": None, **options}
    preset = replace(preset, epochs=3, batch=16, options=options)
    return replace(problem, presets={"cpu": preset})
