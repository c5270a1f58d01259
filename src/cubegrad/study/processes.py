"""What worker processes have in common: cores, interrupts, and the death of their parent."""

import contextlib
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Iterator


def cores() -> int:
    """The number of cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent() -> None:
    """Called in a worker: exit when the parent does.

    Otherwise it would run on for hours after its parent was killed, beside the run that resumes.
    Torch's data workers watch their parent process, but with a fork server that is the server,
    which lives as long as they do.
    """
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        threading.Thread(target=_die_after, args=(parent,), daemon=True).start()


def _die_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C, even while they import torch."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
