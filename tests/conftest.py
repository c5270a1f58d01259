import importlib.util
import os
import sys
import zlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
# In the processes that tests start. With as many threads as cores in each, a step waits for threads
# that do not run: beside other tests, speed/step_time.py took 46 s, and with one thread 8.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the GPU as well
sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the tests run in parallel processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="of each parametrized test run N cases: those whose names have the smallest CRC-32",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    left_out = set[pytest.Item]()
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and getattr(callspec.params.get("backend"), "interpreted", False):
            item.add_marker("compilation")
        if "CUBEGRAD_EXAMPLES" not in os.environ and item.get_closest_marker("thorough"):
            left_out.add(item)
            item.add_marker(
                pytest.mark.skip("only in `make test-all`, or with CUBEGRAD_EXAMPLES=1")
            )
    yield  # pytest deselects by marker
    if limit := config.getoption("cases"):
        kept = set(sample([item for item in items if item not in left_out], limit))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def sample(items: list[pytest.Item], limit: int) -> list[pytest.Item]:
    """A checksum picks cases from all over a grid, and the same ones in every run."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    picked = []
    for cases in tests.values():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        picked += cases[:limit]
    return picked
