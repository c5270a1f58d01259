"""Small made-up data for the tests of fastmri: slices of discs, and volumes of k-space."""

from dataclasses import replace

import numpy as np
import pytest

from cubegrad.study.problems import fastmri

SMALL = {"network": (1, 4, 2, 2, 1), "low": 4}


def discs(count, side, seed=0):
    """Slices of one disc each, in two shades."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] / side - 0.5
    slices = []
    for _ in range(count):
        radius, top, left = generator.uniform([0.2, -0.1, -0.1], [0.4, 0.1, 0.1])
        away = np.hypot(y - top, x - left)
        slices.append(120 * (away < radius) + 100 * (away < radius / 2))
    return np.array(slices, np.uint8)


def write_slices(data, slices=None, lines=None):
    """By default six subjects with two volumes each, of two slices each."""
    folder = data / "mr-slices"
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"head{subject}/ax{axis}" for subject in range(6) for axis in (0, 1) for _ in "ab"]
    np.save(folder / "slices.npy", discs(24, 32) if slices is None else slices)
    (folder / "volumes.txt").write_text("\n".join(names if lines is None else lines) + "\n")
    return folder


def rss(kspace):
    """The root sum of squares of each slice's coil images, in numpy."""
    axes = (-2, -1)
    images = np.fft.ifft2(np.fft.ifftshift(kspace, axes), norm="ortho")
    return np.sqrt((np.abs(np.fft.fftshift(images, axes)) ** 2).sum(-3))


def write_volume(path, slices=2, coils=3, height=40, width=36, crop=32, seed=0, **other):
    """A file in fastMRI's format; `other` replaces parts of it, and None leaves them out."""
    h5py = pytest.importorskip("h5py")  # not needed by the tests on a GPU
    generator = np.random.default_rng(seed)
    images = discs(slices, height, seed)[:, None, :, :width] / 255.0
    coil_phases = np.exp(1j * generator.uniform(0, 6, (1, coils, 1, 1)))
    shades = generator.uniform(0.3, 1, (1, coils, 1, 1))
    axes = (-2, -1)
    pixels = np.fft.ifftshift(1e-4 * images * shades * coil_phases, axes)
    kspace = np.fft.fftshift(np.fft.fft2(pixels, norm="ortho"), axes).astype(np.complex64)
    top, left = (height - crop) // 2, (width - crop) // 2
    target = rss(kspace)[:, top : top + crop, left : left + crop].astype(np.float32)
    content = {"kspace": kspace, "reconstruction_rss": target, **other}
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in content.items():
            if values is not None and name != "max":
                file[name] = values
        peak = content.get("max", float(target.max()))
        if peak is not None:
            file.attrs["max"] = peak
    return kspace, target


def write_volumes(data):
    """Three volumes for training, of two shapes, and one for testing."""
    write_volume(data / "multicoil_train" / "file1.h5", seed=1)
    write_volume(data / "multicoil_train" / "file2.h5", seed=2, height=48, width=40, coils=2)
    write_volume(data / "multicoil_train" / "file3.h5", seed=3, slices=1)
    write_volume(data / "multicoil_val" / "file4.h5", seed=4)


def small_problem(kind="slices"):
    """The problem with a network of a thousand weights."""
    problem = fastmri.problem()
    like = "cpu" if kind == "slices" else "paper"
    options = {**problem.presets[like].options, **SMALL}
    if kind == "slices":
        options |= {"shrink": 2, "coils": 2, "train": 100, "test": 100}
    preset = replace(problem.presets["cpu"], epochs=3, batch=3, options=options)
    return replace(problem, presets={"cpu": preset})
