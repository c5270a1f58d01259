"""The driver of lightbench over a package of the same form, and the page made of its records."""

import importlib
import json
import sys
from pathlib import Path

import lightbench_cpu
import lightbench_runs
import lightbench_table
import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "lightbench"

UTILS = """
import inspect, os, time
import torch

class Stop(Exception): ...
class SkipConfig(ValueError): ...

class Validator:
    warmup, ema_patience, ema_start, ema_index = 256, 2, 0, 4

class Objective:
    def __init__(self, model, opt, win):
        self.model, self.opt, self.win, self.loss = model, opt, win, None
        self.validator = Validator({4: -0.5}, {100: 2, 1600: 1}, 40)
        self.end = time.time() + int(os.environ["HEAVYBALL_BENCHMARK_TIMEOUT"])

    def win_condition(self, loss=None):
        self.loss = self.loss if loss is None else loss
        return self.win(self.loss)

    def _inner(self, params):
        optimizer_of, validator = inspect.signature(self.opt).parameters, self.validator.new()
        given = {"lr": params[0], "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0}
        given = {"warmup_steps": 2, "beta": 0.9, **given}
        with torch.no_grad():
            self.model.fill_(1.0)
        optimizer = self.opt([self.model], **{k: v for k, v in given.items() if k in optimizer_of})
        for _ in range(40):
            if hasattr(optimizer, "train"):
                optimizer.train()
            optimizer.zero_grad()
            loss = self.model.square().mean()
            loss.backward()
            optimizer.step()
            assert not validator(loss.detach()).item()
            if self.win_condition(loss.item()):
                break
        return validator.ema_states.min().item(), self.model, loss.item()

    def objective(self, params):
        value = self._inner(params)[0]
        if time.time() > self.end:
            raise Stop
        return value

def trial(model, win, opt, trials, *, device="cuda"):
    torch.cuda.synchronize()
    assert device == "cpu"
    objective = Objective(model, opt[0], win)
    for lr in [1e-9, 1e-6, 0.1, 0.2][:trials]:
        objective.objective((lr, 0.1, 0.01, 0.5))
        if objective.win_condition():
            return
"""
BOWL = """
import torch
from lightbench.utils import SkipConfig, trial

GOALS = {"trivial": 0.9, "easy": 1e-30}

def main(dtype: str = "float32", steps=1, weight_decay=0, opt=(), trials=1,
         win_condition_multiplier=1.0, config=None):
    if config == "hard":
        raise SkipConfig
    size = (64, 64) if config == "medium" else (3,)
    model = torch.zeros(size, device="cuda", dtype=getattr(torch, dtype)).cuda().requires_grad_()
    trial(model, lambda loss: loss < GOALS.get(config, 0.9), opt, trials)
"""
RUNNER = 'def main():\n    return ["bowl.py", "dish.py"]\n'
PUBLISHED = """
| Benchmark | Optimizer | Cautious | Mars | Success | Runtime | Loss | Attempts | Seed | Config |
|:---|:---|:---|:---|:---|:---|---:|---:|---:|:---|
| bowl-trivial | AdamW | No | No | ✓ | 0.2s | 1e-5 | 7 | 0 | |
| bowl-trivial | AdamW | Yes | No | ✓ | 0.2s | 1e-5 | 3 | 0 | |
| bowl-trivial | ForeachSFAdamW | No | No | ✗ | 0.2s | inf | 1000 | 0 | nan |
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A lightbench of one problem, whose third learning rate wins."""
    folder = tmp_path / "site" / "lightbench"
    folder.mkdir(parents=True)
    files = {"utils": UTILS, "bowl": BOWL, "dish": BOWL, "run_all_benchmarks": RUNNER}
    for name, text in {"__init__": "", **files}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "benchmark_results.md").write_text(PUBLISHED)
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    threads = torch.get_num_threads()
    yield folder
    torch.set_num_threads(threads)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightbench"]:
        del sys.modules[name]


@pytest.fixture
def sweep(package, tmp_path, capsys):
    assert package.is_dir()

    def run(*words):
        lightbench_runs.main(["--out", str(tmp_path / "out"), *words])
        records = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
        return [json.loads(line) for line in records], capsys.readouterr()

    return run


def test_runs_are_recorded_once_and_tabulated(sweep):
    zeros = torch.zeros
    words = ["--problems", "bowl", "--difficulties", "easy", "trivial", "medium", "--steps", "40"]
    records, shown = sweep(*words)
    assert torch.zeros is zeros
    assert torch.nn.Module.cuda.__name__ == "cuda"
    again, _ = sweep(*words)
    assert again == records
    by_key = {(one["difficulty"], one["optimizer"]): one for one in records}
    names = list(lightbench_runs.OPTIMIZERS)
    # The goal of easy is out of reach, and who loses does not try the next one.
    assert list(by_key) == [(level, name) for level in ("trivial", "easy") for name in names]
    for name in names:
        won, lost = by_key["trivial", name], by_key["easy", name]
        assert (won["end"], won["trials"], won["lr"]) == ("won", 3, 0.1)
        assert (lost["end"], lost["trials"], lost["won"]) == ("trials", 4, False)
        assert lost["best_loss"] < 0.9
        assert won["published"] == {"won_by": 2, "of": 3, "AdamW": 7, "schedule-free AdamW": None}
        assert won["limits"] == {"trials": 1000, "steps": 40, "timeout": 3600}
    assert by_key["easy", "MADGRADW, compact"]["same_as"] == "MADGRADW"
    assert "same_as" not in by_key["easy", "MADGRADW"]
    assert f"| {names[0]} | 1 of 1 | 0 of 1 | 1 of 2 | 3.0 |" in shown.out
    assert "| 7 / – | – / – | 2 / – of 3 |" in shown.out
    assert "bowl, trivial, AdamW: won, 3 trials" in shown.err


def test_a_large_tensor_is_run_with_codes(sweep):
    words = ["--problems", "bowl", "--difficulties", "medium"]
    records, _ = sweep(*words, "--optimizers", "MADGRADW", "MADGRADW, compact")
    assert [one["trials"] for one in records] == [3, 3]
    assert "same_as" not in records[1]


def test_what_ends_a_run_without_a_win(sweep, package):
    records, _ = sweep("--problems", "bowl", "--difficulties", "hard", "--optimizers", "AdamW")
    assert records[0]["end"] == "skipped"
    (package / "dish.py").write_text("def main(dtype: list = (), **_):\n    1 / 0\n")
    records, shown = sweep(
        "--problems",
        "all",
        "--difficulties",
        "trivial",
        "--optimizers",
        "MADGRAD",
        "--timeout",
        "-1",
    )
    ends = {one["problem"]: one["end"] for one in records if one["optimizer"] == "MADGRAD"}
    assert ends["bowl"] == "time"
    assert ends["dish"] == "ZeroDivisionError: division by zero"
    assert not any(one["won"] for one in records)
    assert "dish, trivial, MADGRAD: ZeroDivisionError" in shown.err


def made_up(problem, difficulty, **trials):
    return [
        {
            "problem": problem,
            "difficulty": difficulty,
            "optimizer": name,
            "won": number is not None,
            "trials": number or 9,
            "end": "won" if number else "trials",
            "published": None,
        }
        for name, number in trials.items()
    ]


def test_who_loses_has_lost_what_is_harder():
    records = [
        *made_up("bowl", "trivial", A=2, B=4),
        *made_up("bowl", "easy", A=2, B=None),
        *made_up("bowl", "hard", A=5),
        *made_up("dish", "trivial", A=None, B=None),
        *made_up("cup", "trivial", A=1),
    ]
    assert lightbench_table.outcomes(records) == {
        ("bowl", "trivial"): {"A": 2, "B": 4},
        ("bowl", "easy"): {"A": 2, "B": None},
        ("bowl", "hard"): {"A": 5, "B": None},
        ("dish", "trivial"): {"A": None, "B": None},
    }
    text = lightbench_table.tables(records)
    assert "| A | 1 of 2 | 1 of 1 | 1 of 1 | 3 of 4 | 2.0 |" in text
    assert "| B | 1 of 2 | 0 of 1 | 0 of 1 | 1 of 4 | 4.0 |" in text
    assert "| `bowl` | 2 / 2 / 5 | 4 / – / – |" in text
    assert lightbench_table.tables([]) == "nothing is complete yet"


def stops_at(losses, patience):
    """The step at which a trial is given up, by loops over pairs of means."""
    means, failures = [0.0] * 20, dict.fromkeys(patience, 0)
    for step, loss in enumerate(losses, 1):
        for i in range(20):
            rate = 0.5 ** (i + 1)
            means[i] += rate / (1 - (1 - rate) ** step) * (loss - means[i])
        pairs = [(fast, slow) for i, fast in enumerate(means) for slow in means[i + 1 :]]
        for limit, change in patience.items():
            worse = any(fast > slow * (1 - change) for fast, slow in pairs)
            failures[limit] = failures[limit] + 1 if worse else 0
        if step >= 256 and any(count >= 2 * limit for limit, count in failures.items()):
            return step
    return None


@pytest.mark.parametrize("shape", ["falls", "steady", "grows", "jumps", "noise"])
def test_a_trial_is_given_up_when_the_package_would(shape):
    patience, time = {64: -0.01, 2: -0.75}, np.arange(320)
    losses = {
        "falls": np.exp(-time / 80),
        "steady": np.ones(320),
        "grows": 1 + time / 300,
        "jumps": np.where(time < 280, 1.0, 5.0),
        "noise": 1 + 0.3 * np.random.default_rng(0).standard_normal(320),
    }[shape]
    wanted = stops_at(losses.tolist(), patience)
    assert (wanted is not None) == (shape in ("grows", "jumps"))
    first = lightbench_cpu.Validator(patience, {100: 2, 1600: 1}, 320)
    for validator in (first.new(), first.new()):  # one trial leaves nothing to the next
        steps = (step for step, loss in enumerate(losses, 1) if validator(loss).item())
        assert next(steps, None) == wanted


def test_trials_that_earlier_ones_could_end_are_refused():
    with pytest.raises(ValueError, match="steps=409600 must be below 409600; use fewer"):
        lightbench_cpu.Validator({1: -0.5}, {100: 2, 1600: 1}, 409_600)


def test_another_version_of_the_package_is_refused(package):
    utils = importlib.import_module(f"{package.name}.utils")
    utils.Validator.warmup = 128
    with pytest.raises(SystemExit, match="'warmup': 128"), lightbench_cpu.stand_ins(utils):
        pass


def test_the_page_has_the_tables_of_the_committed_records():
    tables = lightbench_table.tables(lightbench_runs.load(RESULTS / "runs.jsonl"))
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for table in tables.split("\n\n"):
        assert table in page, f"docs/results/lightbench/README.md does not have\n{table}"
