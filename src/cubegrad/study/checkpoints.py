"""Checkpoints of unfinished runs: written atomically, and checked before they are used.

A file is what torch.save writes, followed by a line with the SHA-256 of everything before it. The
CRC-32s in torch's zip do not suffice: torch.load ignores them, and they do not cover the headers.
"""

import hashlib
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cubegrad.study.files import replacing
from cubegrad.study.problem import StudyError

FIELDS = frozenset({"key", "epoch", "seconds", "curve", "model", "optimizer", "keeps"})
FOOTER = b"\ncubegrad sha256 %s\n"
FOOTER_SIZE = len(FOOTER % bytes(64))
CHUNK = 1 << 20


def save(path: Path, state: dict[str, Any]) -> None:
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # After a failed write torch raises its own error about missing bytes.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.write(FOOTER % _digest(file, file.tell()))


def load(path: Path) -> dict[str, Any] | None:
    """The state in a checkpoint; None if the file is missing or damaged.

    Raises StudyError for an intact file that is not one of our checkpoints.
    """
    if not path.exists() or damage(path) is not None:
        return None
    foreign = f"{path} is not a checkpoint of cubegrad; delete it or use another --out"
    if _stored(path) is None:
        raise StudyError(foreign)
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and match:
            raise StudyError(
                f"{path} has {match[1]} in it; delete it, and let Task.keeps hold tensors, "
                "numbers, text, lists and dicts only"
            ) from None
        # If it is a whole file of torch's, the fault lies elsewhere: with memory or the GPU.
        if isinstance(error, (OSError, MemoryError)) or _is_of_torch(path):
            raise
        state = None  # torch.load raises almost anything for another program's file
    if not isinstance(state, dict) or not state.keys() >= FIELDS:
        raise StudyError(foreign)
    return state


def _is_of_torch(path: Path) -> bool:
    """Whether torch can read the file, but for its numbers, which take memory and perhaps a GPU."""
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except Exception:
        return False
    return True


def damage(path: Path) -> str | None:
    """What is wrong with the bytes of a checkpoint, if anything is."""
    stored = _stored(path)
    if stored is None:  # a truncated file lacks the end of torch's zip too
        return None if zipfile.is_zipfile(path) else "it is truncated"
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - FOOTER_SIZE
        return None if _digest(file, size) == stored else "its checksum does not match"


def _stored(path: Path) -> bytes | None:
    """The checksum at the end of the file."""
    with path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - FOOTER_SIZE, 0))
        match = re.fullmatch(FOOTER % b"([0-9a-f]{64})", file.read())
    return match[1] if match else None


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the first `size` bytes; leaves the file position after them."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(min(size, CHUNK)):  # empty too if the file was truncated meanwhile
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest().encode()
