"""CIFAR-10 is downloaded when that is allowed, checked, and never left half written."""

import urllib.request
from http.client import IncompleteRead

import pytest
import torch
from published_cifar import BINARY, ROWS, publish

from cubegrad.study import StudyError
from cubegrad.study.data import cifar10 as data


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """Only file: addresses may be opened."""
    opened = urllib.request.urlopen

    def local(url, **options):
        assert url.startswith("file:"), f"{url} was asked for"
        return opened(url, **options)

    monkeypatch.setattr(urllib.request, "urlopen", local)


def test_missing_data_is_not_fetched_unasked(tmp_path):
    with pytest.raises(StudyError) as error:
        data.cifar10(tmp_path / "nowhere")
    message = str(error.value)
    assert "\n" not in message
    for part in (
        str(tmp_path / "nowhere"),
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        "allow the download",
    ):
        assert part in message
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def mirror(tmp_path):
    """A source to download from, its file, and the folder to download to."""
    (tmp_path / "mirror").mkdir()
    source, _, archive = publish(*BINARY, address=(tmp_path / "mirror").as_uri() + "/")
    (tmp_path / "mirror" / source.archive).write_bytes(archive)
    return source, tmp_path / "mirror" / source.archive, tmp_path / "deep" / "data"


def test_a_download_is_shown_checked_and_kept(mirror, capsys):
    source, address, folder = mirror
    train, _ = data.cifar10(folder, download=True, sources=(source,))
    assert len(train.labels) == 5 * ROWS
    (archive,) = folder.iterdir()
    assert archive.name == "cifar-10-binary.tar.gz"
    assert archive.read_bytes() == address.read_bytes()
    shown = capsys.readouterr().err
    assert "cifar-10-binary.tar.gz: 100%" in shown
    address.unlink()
    again, _ = data.cifar10(folder, download=True, sources=(source,))
    assert torch.equal(again.images, train.images)


def test_a_wrong_download_is_not_kept(mirror):
    source, address, folder = mirror
    address.write_bytes(address.read_bytes()[:-1])
    with pytest.raises(StudyError, match=r"came with md5 .* instead of .*: try again") as error:
        data.cifar10(folder, download=True, sources=(source,))
    assert source.md5 in str(error.value)
    assert list(folder.iterdir()) == []


class Broken:
    """A response that breaks off."""

    headers: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, end):
        self.chunks = [b"begun", end]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def read(self, _):
        chunk = self.chunks.pop(0)
        if isinstance(chunk, BaseException):
            raise chunk
        return chunk


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        (ConnectionResetError("reset by peer"), StudyError),
        (TimeoutError("timed out"), StudyError),
        (IncompleteRead(b""), StudyError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_broken_download_leaves_nothing(mirror, monkeypatch, end, seen):
    source, _, folder = mirror
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Broken(end))
    with pytest.raises(seen) as error:
        data.cifar10(folder, download=True, sources=(source,))
    assert list(folder.iterdir()) == []
    if seen is StudyError:
        assert source.url in str(error.value)
        assert f"put {source.archive} there yourself" in str(error.value)


def test_an_address_that_does_not_answer_is_named(mirror):
    source, address, folder = mirror
    address.unlink()
    with pytest.raises(StudyError, match="could not be fetched") as error:
        data.cifar10(folder, download=True, sources=(source,))
    assert source.url in str(error.value)
    folder.rmdir()
    folder.write_bytes(b"a file in the way")
    with pytest.raises(StudyError, match="could not be fetched into"):
        data.cifar10(folder, download=True, sources=(source,))
