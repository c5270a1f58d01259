from collections.abc import Iterator

import pytest

from cubegrad.study.data import translation
from cubegrad.study.problems import bookwiki, cifar10, fastmri, imagenet


@pytest.fixture(autouse=True)
def _forget_data() -> Iterator[None]:
    """The problems keep the data of the last run in memory; no test may see another's."""
    yield
    for cached in (
        bookwiki.parts,
        cifar10.parts,
        fastmri.scans,
        fastmri.simulated,
        imagenet.stored,
        translation.prepared,
    ):
        cached.cache_clear()
