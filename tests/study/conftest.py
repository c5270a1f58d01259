from collections.abc import Iterator
from pathlib import Path

import pytest
import small_cifar
import small_text

from cubegrad.study import Problem
from cubegrad.study.data import translation
from cubegrad.study.problems import bookwiki, cifar10, fastmri, finetune, imagenet


@pytest.fixture(autouse=True)
def _forget_data() -> Iterator[None]:
    """The problems keep the data of the last run in memory; no test may see another's."""
    yield
    for cached in (
        bookwiki.parts,
        cifar10.parts,
        fastmri.scans,
        fastmri.simulated,
        finetune.parts,
        imagenet.stored,
        translation.prepared,
    ):
        cached.cache_clear()


@pytest.fixture
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_cifar10(monkeypatch: pytest.MonkeyPatch) -> Problem:
    return small_cifar.small_problem(monkeypatch)


@pytest.fixture
def small_bookwiki(tmp_path: Path) -> tuple[Problem, Path]:
    """The problem on made-up novels, and their folder."""
    return small_text.small_problem(tmp_path), tmp_path
