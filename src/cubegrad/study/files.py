"""Files are written completely or not at all, even if the disk fails."""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cubegrad.study.problem import StudyError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk or a read-only folder, into a StudyError."""
    try:
        yield
    except OSError as error:
        remedy = "free space or make it writable, then run the same command again to resume"
        if error.errno in (errno.EISDIR, errno.EEXIST, errno.ENOTDIR, errno.ENOENT):
            remedy = "give another path, or remove what is in the way"
        raise StudyError(
            f"{path} cannot be written ({error.strerror or error}); {remedy}"
        ) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` on success; a failure changes nothing."""
    # Not the process id: processes on two nodes may have the same.
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
    """Append and sync; a failure leaves the file unchanged."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            rest = memoryview(data)
            try:
                while rest:  # a nearly full disk writes only a part, without an error
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except BaseException as error:
                # On Ctrl-C during the sync the data is complete, so it stays.
                if rest or isinstance(error, OSError):
                    file.truncate(before)
                raise
        if new and os.name == "posix":  # so that the directory entry survives a power cut too
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
