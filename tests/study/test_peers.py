"""Other people's optimizers in the study: made as their authors recommend, resumed, reported."""

import sys
from dataclasses import replace

import pytest
import torch
import toy_problem
from killed import killed_and_resumed
from small_runs import curve_text, settings_of
from torch import nn

from cubegrad.study import Preset, StudyError, methods, peers
from cubegrad.study.methods import METHODS, Entry, entry, make
from cubegrad.study.problem import Task
from cubegrad.study.train import Place, run

PACKAGES = {name: method.package for name, method in METHODS.items() if method.package}
PEERS = [*PACKAGES, "dog", "ldog"]
STAGED = Preset(epochs=10, batch=8, schedule="tenthing:5")
each_peer = pytest.mark.parametrize("name", PEERS)


@pytest.fixture(autouse=True)
def _installed(request):
    """Skip the cases of packages that are missing."""
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])


def weights():
    return nn.Parameter(torch.linspace(-1.0, 1.0, 8))


@each_peer
def test_a_peer_goes_downhill_without_a_learning_rate(name, capsys):
    param = weights()
    optimizer = make(name, [param], METHODS[name].lrs[1], 0.01)
    task = Task(nn.Module(), lambda _: [], lambda *_: param.sum(), lambda *_: {}, 1)
    peers.begin_training(optimizer, task)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (param - 2).square().sum()
        loss.backward()
        optimizer.step()
    peers.begin_evaluation(optimizer, task, 0)
    assert (param - 2).square().sum() < 0.9 * (weights() - 2).square().sum()
    assert capsys.readouterr().out == ""
    if methods.estimates(name):
        assert 0 < peers.estimated_lr(optimizer) < 10


@each_peer
def test_a_peer_has_the_factor_and_the_decay(name):
    (group,) = make(name, [weights()], 0.5, 0.01).param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.01)


def test_the_authors_schedules_unless_another_is_asked_for(monkeypatch):
    monkeypatch.setattr(peers, "check_installed", lambda _: None)
    own = {name: entry(name, STAGED).schedule for name in PEERS}
    assert own == {
        "prodigy": "cosine", "dadapt-adam": "tenthing:5", "schedulefree-adamw": "warmup:5%",
        "dog": "flat", "ldog": "flat",
    }  # fmt: skip
    assert entry("prodigy@staged", STAGED) == Entry("prodigy", "tenthing:5")


@pytest.mark.parametrize("name", ["prodigy"])
def test_prodigy_is_told_of_a_warm_up(name):
    for warm_up in (False, True):
        (group,) = make(name, [weights()], 1.0, 0.0, warm_up=warm_up).param_groups
        assert group["safeguard_warmup"] == warm_up


def test_dog_starts_with_larger_steps_if_there_is_batch_norm():
    firsts = [
        make("dog", [weights()], 1.0, 0.0, batch_norm=norm).param_groups[0]["first_distance"]
        for norm in (False, True)
    ]
    assert firsts == [1e-6, 1e-4]


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StudyError, match=r"prodigyopt is missing; run pip install '\.\[peers\]'"):
        entry("prodigy", STAGED)
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(StudyError, match=r"schedulefree is missing; .*\[peers\]"):
        make("schedulefree-adamw", [weights()], 1.0, 0.0)


@each_peer
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_a_killed_run_ends_with_the_same_numbers(name, decay, tmp_path):
    problem = toy_problem.problem()
    settings = settings_of(
        problem, method=name, lr=METHODS[name].lrs[0], decay=decay, schedule="warmup:5%"
    )
    place = Place(save_every=0)
    resumed = killed_and_resumed(problem, settings, place, tmp_path / "x.pt", after=2)
    whole = run(problem, settings, place)
    assert whole.status == "finished"
    assert curve_text(resumed) == curve_text(whole)


@pytest.mark.parametrize("name", ["dog", "schedulefree-adamw"])
def test_batch_norm_is_evaluated_with_the_statistics_of_the_average(name):
    """The second layer of a linear net sees inputs scaled by the first layer's weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.BatchNorm1d(1))
    inputs = torch.randn(64, 3)

    def loss(model, batch):
        return model(batch).square().mean() + model[0].weight.square().sum()

    task = Task(model, lambda _: 100 * [inputs], loss, lambda *_: {}, 100)
    optimizer = make(name, model.parameters(), 1.0, 0.0, batch_norm=True)
    peers.begin_training(optimizer, task)
    for batch in task.batches(0):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    peers.begin_evaluation(optimizer, task, 0)
    seen = model[0](inputs)
    assert not model.training
    # What is left of older statistics: 0.9^50 = 0.005.
    torch.testing.assert_close(model[1].running_mean, seen.mean(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(model[1].running_var, seen.var(0), rtol=0.02, atol=0.02)


def test_frozen_parameters_are_not_given_to_the_optimizer():
    problem = toy_problem.problem()

    def build(setup):
        task = problem.build(setup)
        first, *_ = task.model.parameters()
        first.requires_grad = False
        return task

    record = run(replace(problem, build=build), settings_of(problem, method="dog", lr=1.0), Place())
    assert record.status == "finished"
