"""What processes that work for a run have in common, whatever they do."""

import contextlib
import multiprocessing.process
import os
import signal
import threading
from collections.abc import Iterator


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent() -> None:
    """In a worker: one whose parent was killed would go on for hours beside the one that resumes.

    Torch has its own workers look whether their parent lives, but where they come from a fork
    server that is the server, which lives as long as they do.
    """
    parent = multiprocessing.process.parent_process()
    if parent is not None:
        threading.Thread(target=_die_after, args=(parent,), daemon=True).start()


def _die_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Processes started meanwhile never see Ctrl-C, not even while they import torch."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
