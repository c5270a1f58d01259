"""Our optimizers in the tests that torch has for its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")
SCRIPT = Path(__file__).parents[1] / "support" / "torch_own.py"
# A checkout of the installed version of torch, since wheels do not contain its tests.
CHECKOUT = os.environ.get("TORCH_CHECKOUT")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_what_torch_refuses_for_all_optimizers_is_refused():
    done = run()
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split()


@pytest.mark.skipif(CHECKOUT is None, reason="TORCH_CHECKOUT is not set")
def test_torchs_own_tests_pass():
    done = run(CHECKOUT)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
