"""The map in CONTRIBUTING.md names every source file once."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cubegrad"
NAME = r"[\w/]+\.(?:py|c|h|js|css)\b"
# Described as a whole: a new problem, data set or network needs no line of its own.
WHOLE = [SOURCE / "study" / name for name in ("problems", "data", "models")]


def rooms() -> dict[Path, str]:
    """The text of each folder of the map, by the folder."""
    chart = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    chart = chart.split("src/cubegrad/\n", 1)[1].split("\ntests/", 1)[0]
    texts: dict[Path, str] = {}
    outer = room = SOURCE
    for line in chart.splitlines():
        if folder := re.match(r"( {2}| {4})(\w+)/ ", line):
            outer = outer if len(folder[1]) == 4 else SOURCE / folder[2]
            room = outer / folder[2] if len(folder[1]) == 4 else outer
        elif re.match(r" {2}\S", line):
            outer = room = SOURCE
        elif re.match(r" {4}\S", line):
            room = outer
        texts[room] = f"{texts.get(room, '')}{line}\n"
    return texts


FILES = [
    path
    for path in SOURCE.rglob("*")
    if path.suffix in (".py", ".c", ".h", ".js", ".css")
    and path.name != "__init__.py"
    and path.parent not in WHOLE
]


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_map_has_the_file(path: Path) -> None:
    assert re.search(rf"(?<![\w/.]){re.escape(path.name)}\b", rooms()[path.parent])


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_the_map_describes_no_file_twice_or_that_is_not_there(room: Path) -> None:
    text = rooms()[room]
    described = Counter(re.findall(rf"(?<![\w/.])({NAME})(?=:|  )", text))
    assert [name for name, count in described.items() if count > 1] == []
    places = (room, SOURCE, *(other for other in rooms() if room in other.parents))
    for name in re.findall(rf"(?<![\w/.])({NAME})", text):
        assert any((place / name).exists() for place in places), name
