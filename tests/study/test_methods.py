"""The methods, and the paper's tables as data."""

import math

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

import cubegrad
from cubegrad import cautions, family
from cubegrad.study import Preset, StudyError, schedules
from cubegrad.study.methods import FIGURES, METHODS, PAPER, Entry, entry, make

PEERS = ("prodigy", "dadapt-adam", "dog", "ldog", "schedulefree-adamw")  # test_peers.py
OURS = [name for name in METHODS if name not in PEERS]
OF_TORCH = (cubegrad.MADGRAD, cubegrad.MirrorMADGRAD, cubegrad.MADGRADW)
STAGED = Preset(epochs=300, batch=128, schedule="tenthing:150-225")


@pytest.mark.parametrize("name", OURS)
def test_every_method_steps_with_its_lr_and_decay(name: str) -> None:
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make(name, [param], 0.01, 1e-4)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[0]["weight_decay"] == 1e-4
    param.grad = torch.tensor([0.5, -0.5])
    optimizer.step()
    # Downhill; weight decay acts in the same direction.
    assert param[0] < 1.0
    assert param[1] > -2.0
    assert param.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_a_search_of_decays_is_not_warned_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cautions, "_has_warned_of_decay", False)
    make("madgrad", [torch.nn.Parameter(torch.ones(1))], 0.01, 0.05)
    assert cautions._has_warned_of_decay  # it came to the warning
    papers = [problem.best["madgrad"].decay for problem in PAPER.values()]
    assert max(papers) < cautions.LARGE_DECAY


def test_all_of_the_family_and_the_methods_of_the_paper_are_there() -> None:
    made = {type(make(name, [torch.nn.Parameter(torch.ones(1))], 0.1, 0.0)) for name in OURS}
    wanted = {
        one
        for one in vars(family).values()
        if isinstance(one, type) and issubclass(one, family.DualAveraging)
    } - {family.DualAveraging}
    assert len(wanted) >= 9
    assert made - wanted == {*OF_TORCH, SGD, Adam, AdamW, Adagrad}
    assert made >= wanted


@pytest.mark.parametrize("name", ["madgrad", "madgrad-auto", "mirror-madgrad", "madgradw"])
def test_a_compact_method_differs_by_its_form_of_the_state_alone(name: str) -> None:
    param = [torch.nn.Parameter(torch.ones(1))]
    plain, compact = (make(form, param, 0.5, 1e-4) for form in (name, f"{name}-compact"))
    assert type(plain) is type(compact)
    assert not plain.defaults["compact"]
    assert plain.defaults | {"compact": True} == compact.defaults
    assert METHODS[f"{name}-compact"].lrs == METHODS[name].lrs
    assert METHODS[f"{name}-compact"].estimates == METHODS[name].estimates


def test_decoupled_decay_shrinks_the_weights_whatever_the_gradients() -> None:
    params = [torch.nn.Parameter(torch.ones(1)) for _ in "ab"]
    for name, param in zip(("madgrad-decoupled", "adamw"), params, strict=True):
        optimizer = make(name, [param], 0.1, 0.5)
        for _ in range(3):
            param.grad = torch.zeros(1)
            optimizer.step()
    torch.testing.assert_close(*params)
    assert params[0].item() == pytest.approx(0.95**3)


def test_a_method_without_a_range_of_its_own_takes_that_of_the_method_it_is_like() -> None:
    preset = Preset(1, 1, lrs={"madgrad": (1.0, 2.0), "adam": (3.0, 4.0)})
    found = {name: Entry(name, "flat").lrs(preset) for name in OURS}
    like = {name for name, lrs in found.items() if lrs == (1.0, 2.0)}
    mirror = {"mirror-madgrad", "mirror-madgrad-compact"}
    assert like == {"madgrad", "madgrad-compact", "madgrad-decoupled", *mirror}
    like_adam = {name for name, lrs in found.items() if lrs == (3.0, 4.0)}
    with_w = {"madgradw", "madgradw-compact", "madgradw-schedule-free"}
    assert like_adam == {"adam", "adamw", *with_w}
    own = Preset(1, 1, lrs={"madgrad": (1.0, 2.0), "mirror-madgrad": (5.0, 6.0)})
    assert all(Entry(name, "flat").lrs(own) == (5.0, 6.0) for name in mirror)
    assert Entry("adamw", "flat").lrs(own) == METHODS["adamw"].lrs


def test_momentum_is_the_papers() -> None:
    param = [torch.nn.Parameter(torch.ones(1))]
    momenta = {name: make(name, param, 0.1, 0.0).param_groups[0].get("momentum") for name in OURS}
    assert momenta["sgd"] == momenta["madgrad"] == 0.9
    assert momenta["sgd-plain"] == 0


# The appendix "Parameter settings", by problem: MADGRAD, AdaGrad, Adam, SGD, as (lr, decay).
APPENDIX = {
    "CIFAR10": [(2.5e-4, 1e-4), (0.01, 1e-4), (0.00025, 1e-4), (0.1, 1e-4)],
    "ImageNet": [(0.001, 2.5e-5), (0.01, 1e-4), (0.00025, 1e-4), (0.1, 1e-4)],
    "fastMRI": [(0.01, 0.0), (0.25, 0.0), (0.00025, 0.0), (0.01, 0.0)],
    "IWSLT14": [(0.025, 5e-6), (0.25, 1e-5), (0.01, 0.05), (1.0, 1e-5)],
    "BookWiki": [(0.005, 0.0), (0.01, 0.0), (0.001, 0.0), (1.0, 0.0)],
}


def test_the_papers_settings() -> None:
    found = {
        problem: [table.best[name][:2] for name in ("madgrad", "adagrad", "adam", "sgd")]
        for problem, table in PAPER.items()
    }
    assert found == APPENDIX
    assert {name: table.seeds for name, table in PAPER.items()} == {
        "CIFAR10": 10, "ImageNet": 5, "fastMRI": 5, "IWSLT14": 10, "BookWiki": 5,
    }  # fmt: skip
    assert PAPER["IWSLT14"].best["madgrad"].result == 4.33
    assert PAPER["BookWiki"].best["adam"].result == 2.09
    assert PAPER["CIFAR10"].best["sgd"].result is None
    for table in PAPER.values():
        schedules.check(table.schedule)


def test_an_entry_is_a_method_under_a_schedule() -> None:
    assert entry("madgrad", STAGED) == Entry("madgrad", "tenthing:150-225")
    assert entry("sgd@flat", STAGED) == Entry("sgd", "flat")
    assert entry("sgd@staged", STAGED) == Entry("sgd", "tenthing:150-225")
    # A problem without stages gets the paper's, as fractions of its epochs.
    assert entry("sgd@staged", Preset(8, 16)) == Entry("sgd", "tenthing:50%-75%")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("madgard", "unknown method 'madgard'; use one of madgrad, "),
        ("sgd@slow", "unknown schedule 'slow'; use flat, "),
    ],
)
def test_unknown_entries(text: str, message: str) -> None:
    with pytest.raises(StudyError) as error:
        entry(text, STAGED)
    assert str(error.value).startswith(message)


def test_the_search_of_a_sqrt_schedule_starts_with_the_same_first_steps() -> None:
    low, high = METHODS["sgd-plain"].lrs
    assert Entry("sgd-plain", "sqrt:10000").lrs(STAGED) == (100 * low, 100 * high)
    scaled = Entry("sgd-plain", "sqrt:10").lrs(STAGED)
    assert scaled == pytest.approx((math.sqrt(10) * low, math.sqrt(10) * high))
    own = Preset(1, 1, lrs={"sgd": (1.0, 2.0)})
    assert Entry("sgd", "flat").lrs(own) == (1.0, 2.0)


def test_the_figures_of_the_paper() -> None:
    flat, staged = FIGURES["dual-averaging"]
    for row, schedule in ((flat, "flat"), (staged, "tenthing:150-225")):
        entries = [entry(text, STAGED) for text in row]
        assert [e.method for e in entries] == ["da", "adagrad-da", "adagrad", "sgd-plain"]
        assert {e.schedule for e in entries} == {schedule}
    (row,) = FIGURES["sqrt-decay"]
    entries = [entry(text, STAGED) for text in row]
    assert {e.method for e in entries} == {"sgd-plain"}  # "No momentum is used"
    assert [e.schedule for e in entries] == [
        "tenthing:150-225", "sqrt:1", "sqrt:10", "sqrt:100", "sqrt:1000", "sqrt:10000",
    ]  # fmt: skip
