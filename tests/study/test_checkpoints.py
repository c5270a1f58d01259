"""Checkpoints: a killed run continues from one exactly, and a damaged one is never used."""

import datetime
import errno
import hashlib
import io
import math
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_problem
from killed import kill_after
from small_runs import curve_text, settings_of

from cubegrad.study import StudyError, checkpoints
from cubegrad.study.records import Runs
from cubegrad.study.train import Place, run

PLACE = Place(save_every=0.0)  # a checkpoint after each epoch
SETTINGS = settings_of(
    toy_problem.problem(), schedule="tenthing:50%-75%", lr=0.05, decay=1e-4, seed=3
)
STATE = {name: {} for name in checkpoints.FIELDS} | {"model": {"w": torch.arange(64.0)}}


@pytest.fixture(scope="module")
def whole() -> str:
    return curve_text(run(toy_problem.problem(), SETTINGS, PLACE))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a run that was killed after its second epoch."""
    path = tmp_path / "one.pt"
    kill_after(2, toy_problem.problem(), SETTINGS, PLACE, path)
    return path


def resumed(checkpoint: Path) -> str:
    """The curve of a run that continues from this file, or "refused"."""
    try:
        return curve_text(run(toy_problem.problem(), SETTINGS, PLACE, checkpoint))
    except StudyError as error:
        return "refused" if "is not a checkpoint of cubegrad" in str(error) else str(error)


@pytest.mark.parametrize("method", ["madgrad", "mirror-madgrad", "sgd", "adam", "adagrad", "da"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_killed_run_continues_with_the_same_numbers(
    method: str, epochs: int, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, method=method)
    whole = run(toy_problem.problem(), settings, PLACE)
    checkpoint = tmp_path / "deep" / "one.pt"
    kill_after(epochs, toy_problem.problem(), settings, PLACE, checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["one.pt"]
    torch.rand(5)  # a resumed run must not depend on torch's random state
    ticks: list[int] = []
    resumed = run(toy_problem.problem(), settings, PLACE, checkpoint, lambda: ticks.append(1))
    assert curve_text(resumed) == curve_text(whole)
    assert len(ticks) == 4
    assert len(whole.curve["loss"]) == 4
    assert len({*whole.curve["loss"]}) > 1


def test_a_resumed_run_trains_only_the_epochs_that_are_left(checkpoint: Path, whole: str) -> None:
    def build(setup):
        task = toy_problem.build(setup)

        def batches(epoch: int):
            assert epoch >= 2, "epochs 0 and 1 are in the checkpoint"
            return task.batches(epoch)

        return replace(task, batches=batches)

    problem = replace(toy_problem.problem(), build=build)
    assert curve_text(run(problem, SETTINGS, PLACE, checkpoint)) == whole


def test_a_file_that_is_no_checkpoint_at_all_is_ignored(checkpoint: Path, whole: str) -> None:
    checkpoint.write_bytes(b"torn")
    assert resumed(checkpoint) == whole


def test_a_checkpoint_of_other_settings_is_not_used(checkpoint: Path) -> None:
    other = replace(SETTINGS, lr=0.1)
    found = run(toy_problem.problem(), other, PLACE, checkpoint)
    assert curve_text(found) == curve_text(run(toy_problem.problem(), other, PLACE))


def test_a_checkpoint_of_another_model_is_reported(checkpoint: Path) -> None:
    def build(setup):
        return replace(toy_problem.build(setup), model=torch.nn.Linear(4, 1))

    with pytest.raises(StudyError, match=r"another model of this name; delete it, or use"):
        run(replace(toy_problem.problem(), build=build), SETTINGS, PLACE, checkpoint)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.exhaustive
def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Also in the zip's headers and padding, which its own checksums do not cover."""
    path = tmp_path / "one.pt"
    checkpoints.save(path, STATE)
    data = path.read_bytes()
    got = checkpoints.load(path)
    assert got is not None
    assert torch.equal(got["model"]["w"], STATE["model"]["w"])
    refused = 0
    for bit in range(8 * len(data)):
        path.write_bytes(flipped(data, bit))
        try:
            assert checkpoints.load(path) is None
        except StudyError:
            refused += 1
    assert 0 < refused <= 8 * checkpoints.FOOTER_SIZE  # flips in the checksum itself


def test_a_damaged_checkpoint_never_gives_another_curve(checkpoint: Path, whole: str) -> None:
    data, draw = checkpoint.read_bytes(), random.Random(0)
    tensors = data.index(b"data/0")
    places = [draw.randrange(8 * len(data)) for _ in range(20)]
    places += [draw.randrange(8 * tensors, 8 * len(data)) for _ in range(20)]
    for place in places:
        checkpoint.write_bytes(flipped(data, place))
        assert resumed(checkpoint) in (whole, "refused")


@pytest.mark.parametrize("kept", [0, 4, 0.5, -1, -40, -100])
def test_a_checkpoint_that_was_cut_short_never_gives_another_curve(
    kept: float, checkpoint: Path, whole: str
) -> None:
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[: int(kept * len(data)) if kept == 0.5 else int(kept)])
    only_the_checksum = kept in (-1, -40)
    assert resumed(checkpoint) == ("refused" if only_the_checksum else whole)


@pytest.mark.parametrize("other", [[1, 2], {"state_dict": {}}, torch.ones(3), None])
def test_a_foreign_file_is_reported_and_left_alone(
    other: object, checkpoint: Path, whole: str
) -> None:
    torch.save(other, checkpoint)
    data = checkpoint.read_bytes()
    with pytest.raises(StudyError, match=r"one\.pt is not a checkpoint of cubegrad; delete it or"):
        run(toy_problem.problem(), SETTINGS, PLACE, checkpoint)
    assert checkpoint.read_bytes() == data
    checkpoint.unlink()
    assert curve_text(run(toy_problem.problem(), SETTINGS, PLACE, checkpoint)) == whole


def test_a_value_that_cannot_be_read_back_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    checkpoints.save(path, STATE | {"keeps": {"clock": datetime.timedelta(1)}})
    with pytest.raises(StudyError, match=r"has datetime\.timedelta in it; delete it, and let"):
        checkpoints.load(path)


def test_another_optimizers_state_is_reported(checkpoint: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    state["optimizer"] = {"state": {}, "param_groups": []}
    checkpoints.save(checkpoint, state)
    with pytest.raises(StudyError, match="is of another model of this name"):
        run(toy_problem.problem(), SETTINGS, PLACE, checkpoint)


def test_state_of_a_task_that_is_not_in_the_checkpoint_is_reported(checkpoint: Path) -> None:
    def build(setup):
        return replace(toy_problem.build(setup), keeps={"scaler": torch.amp.GradScaler("cpu")})

    with pytest.raises(StudyError, match="is of another model of this name"):
        run(replace(toy_problem.problem(), build=build), SETTINGS, PLACE, checkpoint)


LOSSES: dict[str, object] = {"train_loss": [2.0, 1.0], "loss": [2.0, 1.0]}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epoch", "a", "its epoch is 'a' and must be one of 1 to 4; delete it to restart the run"),
        *(("epoch", value, "and must be one of 1 to 4") for value in (99, 0, -1, True, 1.5, None)),
        ("epoch", 5, "its epoch is 5 and must be one of 1 to 4"),
        ("epoch", 1, "its train_loss has 2 values for 1 epochs"),
        ("epoch", 3, "its train_loss has 2 values for 3 epochs"),
        *(("seconds", s, "must be a number >= 0") for s in ("a", math.nan, math.inf, -1.0, None)),
        ("start", 5, "its start is 5 and must be text"),
        *(("curve", curve, "its curve has no train_loss") for curve in ([1.0], None, {})),
        ("curve", LOSSES | {"loss": ["a", "b"]}, "its loss is not a list of numbers"),
        ("curve", LOSSES | {"loss": [1.0, math.nan]}, "its loss is not a list of numbers"),
        ("curve", LOSSES | {"loss": [None, 1.0]}, "its loss is not a list of numbers"),
        ("curve", LOSSES | {"loss": torch.ones(2)}, "its loss is tensor"),
        ("curve", LOSSES | {"loss": [1.0] * 3}, "its loss has 3 values for 2 epochs"),
        ("curve", {**LOSSES, 3: [1.0]}, "3 is not plain text"),
        ("curve", LOSSES | {"a\n": [1.0]}, "is not plain text"),
    ],
)
def test_a_field_that_no_run_leaves_is_refused(
    field: str, value: object, message: str, checkpoint: Path
) -> None:
    state = torch.load(checkpoint, weights_only=True)
    checkpoints.save(checkpoint, state | {field: value})
    data, ticks = checkpoint.read_bytes(), []
    with pytest.raises(StudyError) as refused:
        run(toy_problem.problem(), SETTINGS, PLACE, checkpoint, lambda: ticks.append(1))
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"{checkpoint} cannot be of this run: ")
    assert not ticks
    assert checkpoint.read_bytes() == data


def test_a_diverged_run_that_was_killed_before_its_record_is_not_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, method="sgd", lr=1e30)
    whole = run(toy_problem.problem(), settings, PLACE)
    kill_after(1, toy_problem.problem(), settings, PLACE, tmp_path / "one.pt")
    resumed = run(toy_problem.problem(), settings, PLACE, tmp_path / "one.pt")
    assert (resumed.status, curve_text(resumed)) == ("diverged", curve_text(whole))


@pytest.mark.parametrize("method", ["madgrad", "sgd"])
@pytest.mark.parametrize("field", ["model", "optimizer"])
@pytest.mark.parametrize("value", [3, [], {}, {"state": 3, "param_groups": []}, None])
def test_a_state_of_the_wrong_kind_is_refused(
    method: str, field: str, value: object, tmp_path: Path
) -> None:
    path, settings = tmp_path / "one.pt", replace(SETTINGS, method=method)
    kill_after(1, toy_problem.problem(), settings, PLACE, path)
    checkpoints.save(path, torch.load(path, weights_only=True) | {field: value})
    with pytest.raises(StudyError, match="is of another model of this name; delete it"):
        run(toy_problem.problem(), settings, PLACE, path)


def zipped(files: dict[str, bytes]) -> bytes:
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    return result.getvalue()


def without_a_tensor(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return zipped({n: file.read(n) for n in file.namelist() if not n.endswith("/data/0")})


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda _: b"hello",
    "nothing": lambda _: b"",
    "cut": lambda data: data[:3000],
    "behind other bytes": lambda data: b"xx" + data,
    "arrays of numpy": lambda _: zipped({"a.npy": b"numbers"}),
    "an empty zip": lambda _: zipped({}),
    "a tensor missing": without_a_tensor,
}


@pytest.mark.parametrize("content", FOREIGN)
def test_a_checksum_does_not_make_a_checkpoint(content: str, checkpoint: Path) -> None:
    data = FOREIGN[content](checkpoint.read_bytes()[: -checkpoints.FOOTER_SIZE])
    digest = hashlib.sha256(data).hexdigest().encode()
    checkpoint.write_bytes(data + checkpoints.FOOTER % digest)
    with pytest.raises(StudyError, match=r"one\.pt is not a checkpoint of cubegrad; delete it or"):
        run(toy_problem.problem(), SETTINGS, PLACE, checkpoint)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), OSError("I/O"), MemoryError()])
def test_an_error_that_is_not_the_files_does_not_ask_to_delete_it(
    error: Exception, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch.load

    def failing(*arguments: Any, **options: Any) -> Any:
        if "map_location" in options:  # needs neither memory nor GPU
            return load(*arguments, **options)
        raise error

    monkeypatch.setattr(torch, "load", failing)
    with pytest.raises(type(error)):
        checkpoints.load(checkpoint)


@pytest.mark.parametrize("room", [0, 700, 4000])
def test_a_full_disk_keeps_the_last_checkpoint(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.pt"
    checkpoints.save(path, STATE)
    data, save = path.read_bytes(), torch.save

    class Full:
        def __init__(self, file) -> None:
            self.file, self.left = file, room

        def write(self, part) -> int:
            self.left -= len(part)
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(part)

        def flush(self) -> None:
            self.file.flush()

    monkeypatch.setattr(torch, "save", lambda state, file: save(state, Full(file)))
    bigger = STATE | {"model": {"w": torch.ones(4096)}}
    with pytest.raises(StudyError, match=r"one\.pt cannot be written \(No space left on device\);"):
        checkpoints.save(path, bigger)
    assert [one.name for one in tmp_path.iterdir()] == ["one.pt"]
    assert path.read_bytes() == data


def test_a_damaged_checkpoint_is_reported_before_its_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    path = runs.checkpoint(SETTINGS)
    checkpoints.save(path, STATE)
    assert runs.repair() == []
    path.write_bytes(flipped(path.read_bytes(), 5000))
    (message,) = runs.repair()
    assert message == f"{path} is damaged (its checksum does not match): its run starts again"
