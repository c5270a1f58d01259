"""The source distribution has every file of the repository, so its tests and examples run."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def tracked() -> list[str]:
    """The files that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.processes
def test_it_has_the_files_of_the_repository(tmp_path: Path) -> None:
    names = tracked()
    for name in names:  # a copy, as building writes into the folder
        target = tmp_path / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path],
        cwd=tmp_path / "clone",
        capture_output=True,
        check=True,
    )
    (archive,) = tmp_path.glob("cubegrad-*.tar.gz")
    with tarfile.open(archive) as packed:
        files = {member.name.partition("/")[2] for member in packed if member.isfile()}
    assert set(names) - files == set()
    made = {name for name in files - set(names) if ".egg-info/" not in name}
    assert made == {"PKG-INFO", "setup.cfg"}
