"""A sweep as a config.toml: its command, its problem, and long options of that command.

A file is turned into the words of a command line, so its values are checked as those are.
"""

import json
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubegrad.study.files import replacing, writing
from cubegrad.study.problem import StudyError

NOT_OPTIONS = ("command", "config", "dry_run", "given", "problem")


def words(path: Path, options: Namespace) -> list[str]:
    """What the file has and the command has not, as words: the problem first, then options."""
    values = _read(path)
    command = values.pop("command", options.command)
    if command != options.command:
        raise StudyError(
            f"{path} is of `cubegrad {command}`; use cubegrad {command} --config {path}"
        )
    known = [name.replace("_", "-") for name in vars(options) if name not in NOT_OPTIONS]
    problem = values.pop("problem", None)
    result = [str(problem)] if options.problem is None and problem is not None else []
    for key, value in values.items():
        if key not in known:
            raise StudyError(f"{path} has an unknown key {key!r}; use {', '.join(known)}")
        if isinstance(value, bool):
            if not isinstance(getattr(options, key.replace("-", "_")), bool):
                raise StudyError(
                    f"{path} has {key} = {_toml(value)}; give it a value, or leave it out"
                )
            result += [f"--{key}"] if value else []
        elif key.replace("-", "_") not in getattr(options, "given", {}):
            result.append(f"--{key}={_word(path, key, value)}")
    return result


def text(values: Mapping[str, Any]) -> str:
    """TOML; None is left out."""
    lines = [
        f"{key.replace('_', '-')} = {_toml(value)}\n"
        for key, value in values.items()
        if value is not None
    ]
    return "".join(lines)


def keep(folder: Path, text: str) -> None:
    """Write config.toml, or config-2.toml and so on beside those of other sweeps."""
    with writing(folder):
        for number in range(1, 10_000):
            path = folder / ("config.toml" if number == 1 else f"config-{number}.toml")
            if not path.exists():
                with replacing(path) as file:
                    file.write(text.encode())
                return
            if path.read_bytes() == text.encode():
                return


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StudyError(
            f"--config {path} cannot be read ({error.strerror}); give the config.toml of a sweep"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StudyError(f"--config {path} is not TOML ({error}); see docs/study.md") from None


def _word(path: Path, key: str, value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_word(path, key, one) for one in value)
    if not isinstance(value, (str, int, float)):
        raise StudyError(f"{path} has {key} = {value!r}; use text, a number, or a list of them")
    return str(value)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's strings, numbers and booleans are TOML's, except that DEL must be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
