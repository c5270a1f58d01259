"""Records survive torn lines, altered bytes and two writers."""

import hashlib
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_records import toy_record

from cubegrad.study import StudyError, checkpoints
from cubegrad.study.records import Runs, existing, from_line, to_line

DOCS = Path(__file__).parents[2] / "docs" / "results"


def test_a_record_comes_back_bit_for_bit() -> None:
    line = to_line(toy_record(3))
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert from_line(line) == toy_record(3)


@pytest.mark.parametrize(
    "harm",
    [
        lambda line: line[: len(line) // 2],
        lambda line: line.replace(b"0.30000000000000004", b"0.30000000000000014"),
        lambda line: line.replace(b'"seed": 1', b'"seed": 9'),
        lambda _: b"\xff\x00\x85 not text",
        lambda _: b"3",
        lambda _: b'{"check": 0}',
    ],
    ids=["torn", "altered number", "altered seed", "bytes", "a number", "no record"],
)
def test_a_broken_line_is_found_and_set_aside(tmp_path: Path, harm) -> None:
    runs = Runs(tmp_path)
    for seed in range(3):
        runs.append(toy_record(seed))
    lines = runs.path.read_bytes().split(b"\n")
    lines[1] = harm(lines[1])
    runs.path.write_bytes(b"\n".join(lines))
    (message,) = runs.repair()
    assert message.startswith(f"{runs.path} line 2 is broken (")
    assert (tmp_path / "records.broken").stat().st_size > 0
    records, broken = runs.load()
    assert [r.settings.seed for r in records.values()] == [0, 2]
    assert broken == []


@pytest.mark.parametrize("kept", [0.5, -1])
def test_a_line_torn_at_the_end_never_spoils_the_next(tmp_path: Path, kept: float) -> None:
    runs = Runs(tmp_path)
    runs.append(toy_record(0))
    whole = to_line(toy_record(1)).encode()
    cut = int(len(whole) * kept) if kept > 0 else -1  # half a line, or all but its end
    runs.path.write_bytes(runs.path.read_bytes() + whole[:cut])
    assert len(runs.repair()) == (kept > 0)
    runs.append(toy_record(2))
    seeds = [r.settings.seed for r in runs.load()[0].values()]
    assert seeds == ([0, 2] if kept > 0 else [0, 1, 2])
    assert runs.load()[1] == []


def test_a_finished_run_leaves_no_checkpoint(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    path = runs.checkpoint(toy_record(0).settings)
    path.parent.mkdir()
    path.write_bytes(b"state")
    runs.append(toy_record(0))
    assert not path.exists()


def test_checkpoints_of_no_further_use_are_deleted(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.append(toy_record(0))
    done, under_way = (runs.checkpoint(toy_record(seed).settings) for seed in (0, 1))
    mine = done.with_name("notes.txt")
    checkpoints.save(under_way, {})
    for path in (done, mine, under_way.with_suffix(".tmp123"), tmp_path / "records.tmp123"):
        path.touch()
    assert runs.repair() == []
    assert set(done.parent.iterdir()) == {under_way, mine}
    assert not list(tmp_path.glob("*.tmp*"))


def test_two_sweeps_may_not_share_a_directory(tmp_path: Path) -> None:
    with Runs(tmp_path).locked(), pytest.raises(StudyError, match=r"in use.*another --out"):
        Runs(tmp_path).locked().__enter__()
    with Runs(tmp_path).locked():
        assert (tmp_path / ".lock").exists()


def test_a_directory_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"is not a directory of runs.*give the --out"):
        existing(tmp_path)


def test_commands_are_kept_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for command in ("cubegrad sweep toy", "cubegrad sweep toy", "cubegrad report"):
        runs.log(command)
    assert runs.commands() == ["cubegrad sweep toy", "cubegrad report"]


def forged(**changes: object) -> str:
    """A line with a correct checksum, whatever its content."""
    body = json.loads(to_line(toy_record(1)))
    del body["check"]
    settings = {name: value for name, value in changes.items() if name in body["settings"]}
    body["settings"] |= settings
    body |= {name: value for name, value in changes.items() if name not in settings}
    text = json.dumps(body["settings"], sort_keys=True)
    body["key"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    body["check"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    return json.dumps(body)


def test_a_forged_line_is_one_that_is_read() -> None:
    assert from_line(forged()) == toy_record(1)
    assert from_line(forged(problem="other")).settings.problem == "other"


@pytest.mark.parametrize(
    "changes",
    [
        {"problem": "/tmp/evil"},
        {"problem": "../evil"},
        {"problem": "\ud800"},
        {"problem": 3},
        {"preset": "/tmp/evil"},
        {"preset": "a/../../b"},
        {"method": "\x1b[2J"},
        {"epochs": "2"},
        {"epochs": True},
        {"epochs": 2**63},
        {"batch": -(2**63)},
        {"lr": None},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"seed": 0.5},
        {"hold_out": 1},
        {"options": "a\r=cmd|'/C calc'!A0"},
        {"options": "\ud800"},
        {"status": "done"},
        {"status": ["finished"]},
        {"seconds": "long"},
        {"machine": []},
        {"curve": {}},
        {"curve": [1.0]},
        {"curve": {"train_loss": 1.0}},
        {"curve": {"train_loss": [10**400]}},
        {"curve": {"train_loss": [1.0], "loss": ["1"]}},
        {"curve": {"train_loss": [1.0], "\x1b[2J": [1.0]}},
        {"status": "finished", "curve": {"train_loss": [None]}},
        {"status": "finished", "curve": {"train_loss": []}},
        {"about": None},
        {"about": {"metric": 3}},
        {"about": {"higher_is_better": "no"}},
        {"about": {"beside": "loss"}},
        {"about": {"unit": "\r"}},
        {"about": {"description": "\ud800"}},
    ],
    ids=str,
)
def test_a_line_that_no_run_wrote_is_broken(tmp_path: Path, changes: dict[str, object]) -> None:
    line = forged(**changes)
    with pytest.raises(ValueError, match=r"its |the name|plain text|surrogates"):
        from_line(line)
    runs = Runs(tmp_path)
    runs.path.write_text(f"{to_line(toy_record(0))}{line}\n")
    records, (message,) = runs.load()
    assert [one.settings.seed for one in records.values()] == [0]
    assert message.startswith(f"{runs.path} line 2 is broken (")


def test_a_line_of_a_newer_version_names_what_is_unknown() -> None:
    body = json.loads(to_line(toy_record(0)))
    body["settings"]["shape"] = 1
    with pytest.raises(ValueError, match=r"unknown fields \['shape'\]; another version"):
        from_line(json.dumps(body))


def test_the_published_records_can_be_read() -> None:
    folders = [path.parent for path in DOCS.glob("*/records.jsonl")]
    assert folders
    for folder in folders:
        records, broken = Runs(folder).load()
        assert records
        assert broken == []


def test_a_record_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    wrong = replace(toy_record(0), about={"metric": None})
    with pytest.raises(ValueError, match="its metric is None"):
        Runs(tmp_path).append(wrong)
    assert not list(tmp_path.iterdir())
