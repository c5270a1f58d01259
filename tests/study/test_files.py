"""A full disk or a folder that cannot be written is reported, and files stay as they were."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_records import CIFAR10_RECORDS, toy_record

from cubegrad.study import StudyError, cli, files, report
from cubegrad.study.records import Runs

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def file_size_limited_to(size: int) -> Iterator[None]:
    """Limit the size of any file; a write past the limit is cut short, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_append_without_room_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.append(toy_record(0))
    before = runs.path.read_bytes()
    saved = runs.checkpoint(toy_record(1).settings)
    saved.parent.mkdir()
    saved.write_bytes(b"state")
    with (
        file_size_limited_to(len(before) + 100),
        pytest.raises(StudyError, match=r"records\.jsonl cannot be written \(File too large\);"),
    ):
        runs.append(toy_record(1))
    assert runs.path.read_bytes() == before
    assert saved.exists(), "a run that is not recorded still needs its checkpoint"
    runs.append(toy_record(1))
    assert len(runs.load()[0]) == 2


def test_broken_lines_stay_where_they_are_if_they_cannot_be_set_aside(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for seed in range(3):
        runs.append(toy_record(seed))
    torn = runs.path.read_bytes()[:-20]
    runs.path.write_bytes(torn)
    with file_size_limited_to(300), pytest.raises(StudyError, match="cannot be written"):
        runs.repair()
    assert runs.path.read_bytes() == torn
    assert {path.name for path in tmp_path.iterdir()} <= {"records.jsonl", "records.broken"}
    assert len(runs.repair()) == 1


def test_a_new_file_takes_its_place_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    with files.replacing(path) as file:
        file.write(b"old")
    with (
        file_size_limited_to(1000),
        pytest.raises(StudyError, match=r"file\.txt cannot be written"),
        files.replacing(path) as file,
    ):
        file.write(bytes(5000))
    with pytest.raises(ZeroDivisionError), files.replacing(path) as file:  # any other failure
        file.write(b"%d" % (1 // 0))
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.plots
@pytest.mark.parametrize("size", [0, 30_000])
def test_a_report_without_room_keeps_the_old_one(size: int, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    report.write(CIFAR10_RECORDS, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert max(map(len, before.values())) > 30_000
    with file_size_limited_to(size), pytest.raises(StudyError, match="report cannot be written"):
        report.write(CIFAR10_RECORDS[:3], folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


def test_the_command_ends_with_one_line_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--lr", "0.01,0.1", "--widen", "0", "--workers", "1", "--out", "out"]
    words = ["sweep", "toy_problem:problem", *options]
    append, left = files.append, iter(range(3))

    def full(path: Path, data: bytes) -> None:
        if next(left, None) is None:
            with files.writing(path):
                raise OSError(errno.ENOSPC, "No space left on device")
        append(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("cubegrad.study.records.append", full)
        assert cli.main(words) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors == (
        "cubegrad: error: out/records.jsonl cannot be written (No space left on device); free space"
        " or make it writable, then run the same command again to resume\n"
    )
    assert len(Runs(tmp_path / "out").load()[0]) == 2  # the command's own line was the third
    assert cli.main(words) == 0
    assert len(Runs(tmp_path / "out").load()[0]) == 4


@pytest.mark.parametrize("name", ["report", "records.jsonl", "commands.txt", "checkpoints"])
def test_a_file_where_a_folder_should_be_and_the_other_way_round(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    if name in ("report", "checkpoints"):
        (out / name).write_text("mine")
    else:
        (out / name).mkdir()
    words = "sweep toy_problem:problem --lr 0.1 --methods sgd --workers 1 --out out --save-every 0"
    assert cli.main(words.split()) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"out/{name}" in errors
    assert "cannot be" in errors
