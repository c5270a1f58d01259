"""One run: its numbers, how it ends when it diverges, and when it saves checkpoints."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import toy_problem
from small_runs import curve_text, settings_of

from cubegrad.study import Preset, Problem, StudyError, Task, train
from cubegrad.study.records import Record, Settings
from cubegrad.study.train import Place, run, set_lr

PLACE = Place(save_every=0.0)  # a checkpoint after each epoch
SETTINGS = settings_of(
    toy_problem.problem(), schedule="tenthing:50%-75%", lr=0.05, decay=1e-4, seed=3
)


def test_seeds_differ_and_the_same_seed_does_not() -> None:
    one, again = (run(toy_problem.problem(), SETTINGS, PLACE) for _ in range(2))
    assert curve_text(one) == curve_text(again)
    other = run(toy_problem.problem(), replace(SETTINGS, seed=4), PLACE)
    assert one.curve != other.curve


def test_a_diverged_run_is_a_result() -> None:
    settings = replace(SETTINGS, method="sgd", lr=1e30)
    ticks: list[int] = []
    record = run(toy_problem.problem(), settings, PLACE, None, lambda: ticks.append(1))
    assert record.status == "diverged"
    assert record.curve["train_loss"][-1] is None
    assert record.last("loss") is None
    assert len(ticks) == 4  # a progress bar still ends full


def worked_out(lr: float, schedule: str) -> Record:
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
    record = worked_out(0.5, "tenthing:2")
    xs = [0.5, 0.25, 0.25 * 0.95, 0.25 * 0.95**2]
    assert record.curve["x"] == pytest.approx(xs, rel=1e-12)
    # A step's loss is computed before the step.
    assert record.curve["train_loss"] == pytest.approx([x**2 / 2 for x in [1.0, *xs[:3]]])
    assert record.settings.lr == 0.5


def test_a_record_says_what_it_ran_on() -> None:
    record = worked_out(0.5, "flat")
    assert record.machine["torch"] == torch.__version__
    assert record.machine.keys() >= {"kind", "commit", "cubegrad", "python", "threads", "date"}
    assert record.about == {
        "description": "x²/2", "metric": "x", "higher_is_better": False, "unit": "", "paper": "",
        "beside": [],
    }  # fmt: skip
    assert record.seconds >= 0


def test_a_task_may_have_its_own_step_and_state(tmp_path: Path) -> None:
    """The hook for loss scaling and clipping, with state that a checkpoint must hold."""

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
    assert whole.curve != run(toy_problem.problem(), SETTINGS, PLACE).curve
    again = run(problem, SETTINGS, PLACE, tmp_path / "one.pt")  # from the last epoch's checkpoint
    assert (counters[-1].count, curve_text(again)) == (16, curve_text(whole))


def test_a_record_says_which_weights_its_run_began_with(tmp_path: Path) -> None:
    def problem_from(start: str) -> Problem:
        def build(setup):
            return replace(toy_problem.build(setup), start=start)

        return replace(toy_problem.problem(), build=build)

    assert "start" not in run(toy_problem.problem(), SETTINGS, PLACE).machine
    checkpoint = tmp_path / "one.pt"
    run(problem_from("first"), SETTINGS, PLACE, checkpoint, until=2)
    resumed = run(problem_from("second"), SETTINGS, PLACE, checkpoint)
    assert (resumed.status, resumed.machine["start"]) == ("finished", "first")
    assert run(problem_from("second"), SETTINGS, PLACE).machine["start"] == "second"


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
    """With a clock on which an epoch takes a second and a save `cost` seconds."""
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


@pytest.mark.parametrize("name", ["loss", "step"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1.0"), (None, "None"), ("1", "'1'"), (torch.ones(3, 1), r"a tensor of shape \(3, 1\)")],
)
def test_a_loss_that_is_no_scalar_is_reported(name: str, value: object, shown: str) -> None:
    def build(setup):
        return replace(toy_problem.build(setup), **{name: lambda *_: value})

    problem = replace(toy_problem.problem(), build=build)
    message = f"Task.{name} returns {shown}; return the mean loss, a tensor of one element"
    with pytest.raises(StudyError, match=message):
        run(problem, SETTINGS, PLACE)


@pytest.mark.parametrize("start", [5, None, b"sha256"])
def test_a_start_that_no_checkpoint_could_hold_is_refused(start: object) -> None:
    def build(setup):
        return replace(toy_problem.build(setup), start=start)

    problem = replace(toy_problem.problem(), build=build)
    with pytest.raises(StudyError, match=f"start={start!r} of a Task must be text; use"):
        run(problem, SETTINGS, PLACE)


@pytest.mark.parametrize("batches", [0, 3])
def test_a_wrong_number_of_batches_is_reported(batches: int) -> None:
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
