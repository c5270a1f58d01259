"""One run: its numbers, its end when it diverges, and that a killed one goes on with the same."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy_problem

from cubegrad.study import Preset, Problem, StudyError, Task, train
from cubegrad.study.records import Record, Settings, from_line, to_line
from cubegrad.study.train import Place, run, set_lr

PLACE = Place(save_every=0.0)  # a checkpoint after each epoch
SETTINGS = Settings("toy", "cpu", 4, 16, "madgrad", "tenthing:50%-75%", 0.05, 1e-4, seed=3)


class KilledError(Exception):
    pass


def killed_after(epochs: int, settings: Settings, checkpoint: Path) -> None:
    """Run until so many epochs are over."""
    left = iter(range(epochs))

    def tick() -> None:
        if next(left, None) is None:
            raise KilledError

    with pytest.raises(KilledError):
        run(toy_problem.problem(), settings, PLACE, checkpoint, tick)


def curve(record: Record) -> str:
    return json.dumps(record.curve)  # every bit of every number


@pytest.mark.parametrize("method", ["madgrad", "mirror-madgrad", "sgd", "adam", "adagrad", "da"])
@pytest.mark.parametrize("epochs", [0, 2])
def test_a_killed_run_goes_on_to_the_same_numbers(method: str, epochs: int, tmp_path: Path) -> None:
    settings = replace(SETTINGS, method=method)
    whole = run(toy_problem.problem(), settings, PLACE)
    checkpoint = tmp_path / "deep" / "one.pt"
    killed_after(epochs, settings, checkpoint)
    assert checkpoint.exists()
    assert [path.name for path in checkpoint.parent.iterdir()] == ["one.pt"]
    torch.rand(5)  # whatever else moved torch's random state meanwhile
    ticks: list[int] = []
    resumed = run(toy_problem.problem(), settings, PLACE, checkpoint, lambda: ticks.append(1))
    assert curve(resumed) == curve(whole)
    assert len(ticks) == 4
    assert len(whole.curve["loss"]) == 4
    assert whole.curve["loss"] != sorted(set(whole.curve["loss"]))[:1] * 4


def test_resuming_does_not_train_again(tmp_path: Path) -> None:
    """With the trained epochs gone from the problem, only the checkpoint can have them."""
    checkpoint = tmp_path / "one.pt"
    killed_after(2, SETTINGS, checkpoint)

    def build(setup):
        task = toy_problem.build(setup)
        asked = task.batches

        def batches(epoch: int):
            assert epoch >= 3, "epochs 0 to 2 were done before"
            return asked(epoch)

        return replace(task, batches=batches)

    problem = replace(toy_problem.problem(), build=build)
    resumed = run(problem, SETTINGS, PLACE, checkpoint)
    assert curve(resumed) == curve(run(toy_problem.problem(), SETTINGS, PLACE))


@pytest.mark.parametrize("harm", [b"", b"torn", None])
def test_a_checkpoint_that_cannot_be_read_is_done_again(harm: bytes | None, tmp_path: Path) -> None:
    checkpoint = tmp_path / "one.pt"
    killed_after(2, SETTINGS, checkpoint)
    data = checkpoint.read_bytes()
    checkpoint.write_bytes(data[: len(data) // 2] if harm is None else harm)
    assert curve(run(toy_problem.problem(), SETTINGS, PLACE, checkpoint)) == curve(
        run(toy_problem.problem(), SETTINGS, PLACE)
    )


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    checkpoint = tmp_path / "one.pt"
    killed_after(2, SETTINGS, checkpoint)
    other = replace(SETTINGS, lr=0.1)
    assert curve(run(toy_problem.problem(), other, PLACE, checkpoint)) == curve(
        run(toy_problem.problem(), other, PLACE)
    )


def test_a_checkpoint_of_another_model_is_told_of(tmp_path: Path) -> None:
    checkpoint = tmp_path / "one.pt"
    killed_after(2, SETTINGS, checkpoint)

    def build(setup):
        return replace(toy_problem.build(setup), model=torch.nn.Linear(4, 1))

    with pytest.raises(StudyError, match=r"another model of this name; delete it, or use"):
        run(replace(toy_problem.problem(), build=build), SETTINGS, PLACE, checkpoint)


def test_seeds_differ_and_the_same_seed_does_not() -> None:
    one, again = (run(toy_problem.problem(), SETTINGS, PLACE) for _ in range(2))
    assert curve(one) == curve(again)
    assert curve(one) != curve(run(toy_problem.problem(), replace(SETTINGS, seed=4), PLACE))


def test_a_diverged_run_is_a_result() -> None:
    settings = replace(SETTINGS, method="sgd", lr=1e30)
    ticks: list[int] = []
    record = run(toy_problem.problem(), settings, PLACE, None, lambda: ticks.append(1))
    assert record.status == "diverged"
    assert record.curve["train_loss"][-1] is None
    assert record.last("loss") is None
    assert len(ticks) == 4  # a bar over epochs still ends full


def hand(lr: float, schedule: str) -> Record:
    """f(x) = x²/2 by plain SGD from x = 1, a step an epoch: x shrinks by 1 - lr·factor."""

    def build(_: object) -> Task:
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.ones_(model.weight)
        return Task(
            model,
            lambda _: [None],
            lambda model, _: model.weight.square().sum() / 2,
            lambda model, _: {"x": model.weight.item()},
            steps_per_epoch=1,
        )

    problem = Problem("hand", "x²/2", build, {"cpu": Preset(4, 1)}, metric="x")
    return run(problem, Settings("hand", "cpu", 4, 1, "sgd-plain", schedule, lr, 0.0, 0), PLACE)


def test_a_run_worked_out_by_hand() -> None:
    record = hand(0.5, "tenthing:2")
    xs = [0.5, 0.25, 0.25 * 0.95, 0.25 * 0.95**2]
    assert record.curve["x"] == pytest.approx(xs, rel=1e-12)
    # The loss of a step is taken before it.
    assert record.curve["train_loss"] == pytest.approx([x**2 / 2 for x in [1.0, *xs[:3]]])
    assert record.settings.lr == 0.5


def test_a_record_says_what_it_ran_on() -> None:
    record = hand(0.5, "flat")
    assert record.machine["torch"] == torch.__version__
    assert record.machine.keys() >= {"kind", "commit", "cubegrad", "python", "threads", "date"}
    assert record.about == {
        "description": "x²/2", "metric": "x", "higher_is_better": False, "unit": "", "paper": "",
        "beside": [],
    }  # fmt: skip
    assert record.seconds >= 0


def test_a_task_may_step_and_keep_things_itself(tmp_path: Path) -> None:
    """The hook of loss scaling and clipping, with state that a checkpoint has to hold."""

    class Counter:
        count = 0

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    counters: list[Counter] = []

    def build(setup):
        task, counter = toy_problem.build(setup), Counter()
        counters.append(counter)

        def step(optimizer, batch):
            counter.count += 1
            optimizer.zero_grad()
            loss = task.loss(task.model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        return replace(task, step=step, keeps={"counter": counter})

    problem = replace(toy_problem.problem(), build=build)
    whole = run(problem, SETTINGS, PLACE, tmp_path / "one.pt")
    assert counters[-1].count == 16
    assert curve(whole) != curve(run(toy_problem.problem(), SETTINGS, PLACE))
    again = run(problem, SETTINGS, PLACE, tmp_path / "one.pt")  # from the last epoch's checkpoint
    assert (counters[-1].count, curve(again)) == (16, curve(whole))


@pytest.mark.parametrize(
    ("cost", "every", "saves"),
    [
        (0.1, 10.0, [10, 20.1, 30.2]),  # ten seconds after the last save was over
        (2.0, 10.0, [10, 52]),  # 40 s of training after 2 s of saving
        (2.0, 0.0, [1, 4, 7, 10]),  # each epoch, as asked
    ],
)
def test_saving_takes_a_twentieth_of_the_time_at_most(
    cost: float, every: float, saves: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own, on which an epoch takes a second and a save what it is said to."""
    now, begun = 0.0, []

    def build(setup):
        task = toy_problem.build(setup)

        def batches(epoch: int):
            nonlocal now
            now += 1
            return task.batches(epoch)

        return replace(task, batches=batches)

    def save(*_: object) -> None:
        nonlocal now
        begun.append(now)
        now += cost

    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(train._Run, "save", save)
    problem = replace(toy_problem.problem(), build=build)
    settings = replace(SETTINGS, epochs=35 if cost < 1 else 60 if every else 4, schedule="flat")
    run(problem, settings, Place(save_every=every), tmp_path / "one.pt")
    assert begun == pytest.approx(saves)


def test_a_wrong_metric_is_told_of() -> None:
    wrong = replace(toy_problem.problem(), metric="bleu")
    with pytest.raises(StudyError, match=r"judged by 'bleu' and its evaluate returns loss; return"):
        run(wrong, SETTINGS, PLACE)


def evaluated(metrics: object) -> Record:
    def build(setup):
        return replace(toy_problem.build(setup), evaluate=lambda *_: metrics)

    settings = replace(SETTINGS, epochs=1, schedule="flat")
    return run(replace(toy_problem.problem(), build=build), settings, PLACE)


@pytest.mark.parametrize(
    "value",
    [0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5]),
     torch.tensor(0.5, dtype=torch.bfloat16), Fraction(1, 2)],
    ids=repr,
)  # fmt: skip
def test_a_metric_may_be_any_real_number(value: object) -> None:
    record = evaluated({"loss": value, "count": np.int64(3), "won": True})
    assert record.curve["loss"] == [0.5]
    assert (record.curve["count"], record.curve["won"]) == ([3.0], [1.0])
    assert {type(x) for values in record.curve.values() for x in values} == {float}
    assert from_line(to_line(record)) == record


@pytest.mark.parametrize(
    "value", [float("nan"), np.float32("inf"), torch.tensor(-math.inf), 10**400]
)
def test_a_metric_that_is_not_finite_is_a_run_that_diverged(value: object) -> None:
    assert evaluated({"loss": value}).status == "diverged"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "0.5"}, r"evaluate of problem 'toy' returns loss = '0\.5'; return a real number"),
        ({"loss": None}, "returns loss = None; return a real number"),
        ({"loss": 1j}, "returns loss = 1j; return a real number"),
        ({"loss": torch.ones(2)}, r"returns loss = tensor\(\[1\., 1\.\]\); return a real number"),
        ({"loss": np.ones(2)}, r"returns loss = array\(\[1\., 1\.\]\); return a real number"),
        ({"loss": [0.5]}, r"returns loss = \[0\.5\]; return a real number"),
        (0.5, r"returns 0\.5; return a dict such as"),
        (None, "returns None; return a dict such as"),
        ({"loss": 0.5, 3: 0.5}, "a metric named 3; use plain text other than train_loss and"),
        ({"loss": 0.5, "train_loss": 0.5}, "a metric named 'train_loss'; use plain text other"),
        ({"loss": 0.5, "estimated_lr": 0.5}, "a metric named 'estimated_lr'; use plain text"),
        ({"loss": 0.5, "a\n": 0.5}, r"a metric named 'a\\n'; use plain text"),
    ],
)
def test_what_is_not_a_number_is_told_of_after_the_first_epoch(
    metrics: object, message: str
) -> None:
    with pytest.raises(StudyError, match=message):
        evaluated(metrics)


@pytest.mark.parametrize("batches", [0, 3])
def test_a_wrong_number_of_batches_is_told_of(batches: int) -> None:
    def build(setup):
        index = torch.arange(8)
        return replace(toy_problem.build(setup), batches=lambda _: [index] * batches)

    problem = replace(toy_problem.problem(), build=build)
    with pytest.raises(StudyError, match=f"has {batches} batches in epoch 0 and steps_per_epoch=4"):
        run(problem, SETTINGS, PLACE)


def test_a_tensor_lr_is_filled_in_place() -> None:
    lr = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=lr)
    set_lr(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
