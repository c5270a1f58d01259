"""Files that are written whole or not at all, whatever the disk does."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cubegrad.study.problem import StudyError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk or a read-only folder becomes a StudyError."""
    try:
        yield
    except OSError as error:
        raise StudyError(
            f"{path} cannot be written ({error.strerror or error}); free space or make it "
            "writable, and the same command goes on where it was"
        ) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is whole; on a failure nothing changes."""
    # Not the process's number, which those of two nodes may share.
    scratch = path.with_suffix(f".tmp{uuid.uuid4().hex}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with scratch.open("w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file and sync; on a failure the file is as it was before."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            rest = memoryview(data)
            try:
                while rest:  # the last bytes of a disk take a part of it, without an error
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException as error:
                # Ctrl-C while it syncs finds a whole line, which is worth keeping.
                if rest or isinstance(error, OSError):
                    file.truncate(before)
                raise
        if new and os.name == "posix":  # the file's name has to survive a power cut too
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
