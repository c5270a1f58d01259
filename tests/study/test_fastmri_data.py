"""Reading fastMRI's volumes and MR slices, and simulating the k-space of slices."""

import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import refused
from small_mri import discs, rss, write_slices, write_volume, write_volumes
from small_runs import CPU

from cubegrad.study.data import fastmri as scans
from cubegrad.study.data import mr_slices
from cubegrad.study.models.kspace import to_kspace

REAL = Path(__file__).parents[3] / "shared" / "data" / "mr_slices.npz"  # beside some checkouts


def train_refused(data, preset, capsys):
    """The line of error that training ends with, before its first run."""
    words = f"train fastmri --preset {preset} --device cpu --data {data} --out {data / 'runs'}"
    line = refused(words, capsys)
    assert not (data / "runs").exists()
    return line


def test_volumes_are_read_as_written(tmp_path):
    kspace, target = write_volume(tmp_path / "multicoil_train" / "b.h5", slices=3)
    write_volume(tmp_path / "multicoil_train" / "a.h5", slices=2, max=0.25)
    first, second = scans.volumes(tmp_path, "train")
    assert (first.path.name, first.slices, first.peak) == ("a.h5", 2, 0.25)
    assert (second.path.name, second.slices) == ("b.h5", 3)
    assert second.peak == pytest.approx(target.max())
    found, image, peak = scans.read(second, 2)
    assert found.dtype == np.complex64
    assert np.array_equal(found, kspace[2])
    assert np.array_equal(image, target[2])
    assert peak == second.peak


def test_a_volume_without_its_maximum_has_that_of_its_targets(tmp_path):
    _, target = write_volume(tmp_path / "multicoil_val" / "a.h5", max=None)
    (only,) = scans.volumes(tmp_path, "test")
    assert only.peak == pytest.approx(target.max())


def test_scans_come_in_the_order_asked_for(tmp_path):
    write_volumes(tmp_path)
    source = scans.Scans(scans.volumes(tmp_path, "train"), CPU)
    assert len(source) == 5
    batches = list(source.batches([[4, 0], [2], [3, 1]]))
    assert [len(batch) for batch in batches] == [2, 1, 2]
    found = [one for batch in batches for one in batch]
    for place, slices in zip([4, 0, 2, 3, 1], found, strict=True):
        kspace, target, peak = scans.read(*source.places[place])
        assert np.array_equal(slices.kspace[0], kspace)
        assert np.array_equal(slices.target[0], target)
        assert slices.peak.tolist() == [pytest.approx(peak)]
    assert {tuple(one.kspace.shape) for one in found} == {(1, 3, 40, 36), (1, 2, 48, 40)}


def test_a_missing_folder_and_an_empty_one_are_named(tmp_path, capsys):
    line = train_refused(tmp_path, "paper", capsys)
    assert f"{tmp_path / 'multicoil_train'} is missing: unpack fastMRI's" in line
    assert "https://fastmri.med.nyu.edu" in line
    write_volumes(tmp_path)
    (tmp_path / "multicoil_val" / "file4.h5").unlink()
    assert f"{tmp_path / 'multicoil_val'} holds no .h5 files" in train_refused(
        tmp_path, "paper", capsys
    )


def test_a_volume_cut_off_is_reported(tmp_path, capsys):
    write_volumes(tmp_path)
    path = tmp_path / "multicoil_train" / "file2.h5"
    whole = path.read_bytes()
    for kept in (whole[: len(whole) // 2], whole[:100], b"", b"<html>not found</html>"):
        path.write_bytes(kept)
        line = train_refused(tmp_path, "paper", capsys)
        assert f"{path} cannot be read (" in line
        assert "fetch it again" in line


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"kspace": None}, "has no kspace in it"),
        ({"reconstruction_rss": None}, "has no reconstruction_rss in it"),
        ({"kspace": np.zeros((2, 40, 36), np.complex64)}, r"kspace of complex64 (2, 40, 36)"),
        ({"kspace": np.zeros((2, 3, 40, 36), np.float32)}, "kspace of float32 (2, 3, 40, 36)"),
        ({"kspace": np.zeros((2, 3, 40, 16), np.complex64)}, "sides >= 32"),
        ({"kspace": np.zeros((3, 3, 40, 36), np.complex64)}, "3 slices of kspace and 2 of"),
        ({"reconstruction_rss": np.zeros((2, 32), np.float32)}, "real numbers [slices, height"),
        ({"max": 0.0}, "has the maximum 0.0, not a number > 0"),
        ({"max": float("nan")}, "has the maximum nan, not a number > 0"),
        ({"max": "bright"}, "has the maximum bright, not a number > 0"),
    ],
)
def test_a_malformed_volume_is_reported(tmp_path, capsys, other, message):
    write_volumes(tmp_path)
    write_volume(tmp_path / "multicoil_val" / "wrong.h5", **other)
    line = train_refused(tmp_path, "paper", capsys)
    assert str(tmp_path / "multicoil_val" / "wrong.h5") in line
    assert message in line


def test_without_h5py_its_extra_is_named(tmp_path, capsys, monkeypatch):
    write_volumes(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    line = train_refused(tmp_path, "paper", capsys)
    assert "h5py is missing; run pip install '.[problems]' in your clone" in line


def test_slices_need_no_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    write_slices(tmp_path)
    stored = mr_slices.load(tmp_path)
    assert np.array_equal(stored.slices, discs(24, 32))
    assert stored.volumes[:3] == ["head0/ax0", "head0/ax0", "head0/ax1"]


def test_missing_slices_are_reported(tmp_path, capsys):
    assert "slices.npy is missing: put slices.npy (uint8" in train_refused(tmp_path, "cpu", capsys)
    (write_slices(tmp_path) / "volumes.txt").unlink()
    assert "volumes.txt is missing: put" in train_refused(tmp_path, "gpu", capsys)


@pytest.mark.parametrize(
    ("slices", "lines", "message"),
    [
        (discs(24, 32), ["a/1"] * 23, "names 23 volumes and"),
        (discs(24, 32), ["a/1"] * 25, "names 25 volumes and"),
        (discs(24, 32), ["a/1", ""] * 12, "names 12 volumes and"),
        (discs(24, 32).astype(np.float32), None, "holds float32 (24, 32, 32): uint8"),
        (discs(24, 32)[0], None, "holds uint8 (32, 32): uint8 [count, height, width]"),
        (discs(24, 32)[:0], [], "holds uint8 (0, 32, 32)"),
        (discs(24, 32), None, "slices of 32x32: sides must be multiples of 8 and >= 64"),
        (discs(24, 68), None, "slices of 68x68: sides must be multiples of 8"),
        (discs(24, 64), ["a/1", "b/1", "c/1", "d/1"] * 6, "names 4 subjects and needs at least 5"),
        (np.array([{"a": 1}]), ["a/1"], "cannot be read (Array can't be memory-mapped"),
    ],
)
def test_malformed_slices_are_reported(tmp_path, capsys, slices, lines, message):
    write_slices(tmp_path, slices, lines)
    assert message in train_refused(tmp_path, "cpu", capsys)


def test_slices_cut_off_are_reported(tmp_path, capsys):
    path = write_slices(tmp_path) / "slices.npy"
    whole = path.read_bytes()
    for kept in (whole[:-1], whole[:50], b"", b"not an array"):
        path.write_bytes(kept)
        line = train_refused(tmp_path, "cpu", capsys)
        assert f"{path.parent} cannot be read (" in line
        assert "copy it again" in line
    path.write_bytes(whole)
    (path.parent / "volumes.txt").write_bytes(b"\xff\xfe\n")
    assert "cannot be read ('utf-8' codec" in train_refused(tmp_path, "cpu", capsys)


def test_a_subject_is_in_one_split():
    volumes = [f"s{index % 11}/ax{index % 3}" for index in range(66)] + ["alone"]
    whole = mr_slices.split(volumes, hold_out=False)
    held = mr_slices.split(volumes, hold_out=True)
    assert whole["valid"] == []
    assert whole["test"] == held["test"]
    subjects = {part: {volumes[index][:2] for index in places} for part, places in held.items()}
    assert subjects["test"] == {"s4", "s9"}
    assert subjects["valid"] == {"s2", "s7"}
    assert sorted(held["train"] + held["valid"]) == whole["train"]
    assert sorted(whole["train"] + whole["test"]) == list(range(67))


def test_each_subject_is_tested_in_one_fold_and_held_out_in_another():
    volumes = [f"s{index % 13}/ax{index % 3}" for index in range(78)]
    tested, held = [], []
    for fold in range(mr_slices.FOLDS):
        parts = mr_slices.split(volumes, hold_out=True, fold=fold)
        subjects = {
            part: {volumes[index].partition("/")[0] for index in parts[part]} for part in parts
        }
        assert not subjects["train"] & subjects["test"] | subjects["train"] & subjects["valid"]
        assert sorted(chain(*parts.values())) == list(range(78))
        tested += subjects["test"]
        held += subjects["valid"]
    assert sorted(tested) == sorted(held) == sorted(f"s{index}" for index in range(13))
    assert mr_slices.split(volumes, True, 0) == mr_slices.split(volumes, hold_out=True)


def test_a_few_are_chosen_from_everywhere():
    assert mr_slices.evenly_spaced([3, 5, 8], 5) == [3, 5, 8]
    assert mr_slices.evenly_spaced(list(range(100, 110)), 4) == [100, 102, 105, 107]


def test_coils_are_smooth_differ_and_lose_nothing():
    maps = mr_slices.coil_maps(5, 24, 32, CPU)
    torch.testing.assert_close((maps.abs() ** 2).sum(0), torch.ones(24, 32))
    assert (maps.diff(dim=1).abs().max() < 0.25) & (maps.diff(dim=2).abs().max() < 0.25)
    gram = torch.einsum("chw,dhw->cd", maps, maps.conj()) / maps[0].numel()
    assert torch.linalg.eigvalsh(gram).min() > 1e-3  # no coil is a combination of the others


def test_the_target_is_the_slice_and_its_kspace_is_seen_by_every_coil():
    """Without noise, in numpy: the squares of the coils' maps sum to 1."""
    images = torch.from_numpy(discs(2, 16)).float() / 255
    kspace = mr_slices.Scanner(3, (16, 16), CPU, noise=0)(images, [7, 8])
    assert kspace.shape == (2, 3, 16, 16)
    assert kspace.dtype == torch.complex64
    np.testing.assert_allclose(rss(kspace.numpy()), images, atol=1e-6)
    assert not np.allclose(kspace, to_kspace(images.to(kspace.dtype))[:, None], atol=0.1)


def test_noise_is_the_slices_own_and_of_the_size_it_says():
    scanner = mr_slices.Scanner(4, (64, 64), CPU, noise=0.02)
    black = torch.zeros(3, 64, 64)
    noise = scanner(black, [5, 6, 5])
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])
    torch.manual_seed(99)
    assert torch.equal(scanner(black[:1], [6])[0], noise[1])
    for part in (noise.real, noise.imag):
        count = part[:2].numel()
        assert abs(part[:2].mean().item()) < 5 * 0.02 / count**0.5
        assert part[:2].std().item() == pytest.approx(0.02, rel=5 / count**0.5)


def test_slices_are_shrunk_by_their_means_and_peaks_are_the_volumes(tmp_path):
    slices = np.zeros((5, 32, 32), np.uint8)
    slices[0, :2, :2] = [[255, 0], [51, 0]]
    slices[1], slices[2, 4, 4] = 102, 204
    write_slices(tmp_path, slices, ["a/1", "a/1", "b/1", "b/1", "c/1"])
    source = mr_slices.Simulated(mr_slices.load(tmp_path), [0, 1, 2, 3, 4], 2, 2, CPU)
    assert source.images.shape == (5, 16, 16)
    assert source.images[0, 0, 0] == pytest.approx(306 / 4 / 255)
    # 102 of 255 is the brightest of a/1, a quarter of 204 that of b/1, and c/1 is black.
    assert source.peaks.tolist() == pytest.approx([0.4, 0.4, 0.2, 0.2, 1.0])
    (batch,) = source.batches([[3, 0]])
    (pair,) = batch
    assert pair.peak.tolist() == pytest.approx([0.2, 0.4])
    np.testing.assert_allclose(pair.target, rss(pair.kspace.numpy()), rtol=1e-4)


@pytest.mark.skipif(not REAL.exists(), reason="the MR slices are not beside the checkout")
def test_the_real_slices_are_split_by_head():
    parts = mr_slices.split(np.load(REAL)["src"].tolist(), hold_out=True)
    assert {part: len(places) for part, places in parts.items()} == {
        "train": 1350,
        "valid": 468,
        "test": 207,
    }
