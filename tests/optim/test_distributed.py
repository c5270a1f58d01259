"""A run over several processes equals that of one; sharded_*.py have the scenarios."""

import json
from pathlib import Path

import pytest
import ranks
from filelock import FileLock

pytestmark = pytest.mark.processes

MODULES = (
    *("sharded_steps", "sharded_training", "sharded_checkpoints", "sharded_auto"),
    *("sharded_compact", "sharded_codes_saved", "sharded_release", "sharded_rounding"),
    *("sharded_shared", "sharded_edits"),
)
CASES = [(world, name) for world in (2, 3, 4) for name in ranks.scenarios(MODULES, world)]


def outcomes(world: int, folder: Path) -> dict[str, str]:
    """The report on each scenario; they run once for all tests and all pytest-xdist workers."""
    if world == 3:
        outcomes(2, folder)  # 3 processes load what 2 processes saved
    with FileLock(folder / "distributed.lock"):
        done = folder / f"distributed-{world}.json"
        if not done.exists():
            done.write_text(json.dumps(ranks.run(MODULES, world, folder / "distributed")))
        return json.loads(done.read_text())


@pytest.mark.parametrize(("world", "name"), CASES)
def test_processes(world, name, tmp_path_factory, worker_id):
    base = tmp_path_factory.getbasetemp()
    reports = outcomes(world, base if worker_id == "master" else base.parent)
    report = reports.get(name, f"not reached:\n{reports}")
    assert report == ranks.REACHED, report
