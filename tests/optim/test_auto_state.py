"""lr="auto": state dicts and copies keep the estimate."""

import copy
import itertools
import math
from typing import Any

import cases
import pytest
import torch
from auto_classifier import Classifier, two_groups
from short_runs import ones, through_a_file, through_pickle

from cubegrad import MADGRAD, MADGRADW


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("how", ["state_dict", "file", "pickle", "deepcopy"])
@pytest.mark.parametrize("cls", [MADGRAD, MADGRADW, cases.ScheduleFreeMADGRADW])
def test_a_run_continues_bit_for_bit(cls: type, how: str, flags: dict[str, Any]) -> None:
    flags = {**flags, "cls": cls}
    whole = Classifier(two_groups, **flags).train(range(20))
    first = Classifier(two_groups, **flags)
    first.train(range(11))
    second = Classifier(two_groups, **flags)
    second.net.load_state_dict(first.net.state_dict())
    saved = first.optimizer.state_dict()
    if how in ("state_dict", "file"):
        copied = through_a_file if how == "file" else copy.deepcopy
        second.optimizer.load_state_dict(copied(saved))
    else:
        copied = through_pickle if how == "pickle" else copy.deepcopy
        second.net, second.optimizer = copied((first.net, first.optimizer))
    assert torch.equal(second.train(range(11, 20)), whole)
    first.train(range(11, 13))  # the copy shares no memory with its source
    assert torch.equal(second.weights(), whole)


def test_checkpoints_keep_their_lr() -> None:
    saved = MADGRAD([ones(3)], lr=0.25).state_dict()
    other = MADGRAD([ones(3)], lr=0.5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.25
    with pytest.raises(RuntimeError, match=r"lr=0\.25; read"):
        other.estimated_lr()
    with pytest.raises(ValueError, match=r"with lr=0\.25, and the optimizer .* with lr='auto'"):
        MADGRAD([ones(3)], lr="auto").load_state_dict(saved)


def test_the_state_of_another_method_is_refused() -> None:
    classes = MADGRAD, MADGRADW, cases.ScheduleFreeMADGRADW
    for cls, other in itertools.permutations(classes, 2):
        param = ones(3)
        optimizer = other([param], lr="auto")
        param.grad = torch.ones(3)
        optimizer.step()
        with pytest.raises(ValueError, match="gives the same buffers another meaning"):
            cls([ones(3)], lr="auto").load_state_dict(optimizer.state_dict())


DAMAGED = [
    None,
    torch.zeros(4),
    torch.zeros(5),
    torch.full((7,), math.nan),
    torch.tensor([-0.1, 0, 1, 1, 1, 0, 0]),
    torch.tensor([math.inf, 0, 1, 1, 1, 0, 0]),
    torch.tensor([0.1, 0, -1, 1, 1, 0, 0]),
    torch.tensor([0.1, 0, 1, -1, 1, 0, 0]),
    torch.tensor([0.1, 0, 1, 1, -1, 0, 0]),
    torch.tensor([0.1, 0, 1, 1, 0.5, 0, 0]),
    torch.tensor([0.1, 0, 1, 1, 1, -0.1, 1]),
    torch.tensor([0.1, 0, 1, 1, 1, 1.0, 1]),
    torch.tensor([0.1, 0, 1, 1, 1, 0, -1]),
    torch.zeros(6),
]


@pytest.mark.parametrize("estimate", DAMAGED, ids=str)
def test_a_damaged_estimate_is_refused(estimate: Any) -> None:
    run = Classifier()
    run.train(range(2))
    saved = copy.deepcopy(run.optimizer.state_dict())
    saved["param_groups"][0]["estimate"] = estimate
    with (
        cases.no_change(*run.net.parameters()),
        pytest.raises(ValueError, match="must be seven numbers"),
    ):
        run.optimizer.load_state_dict(saved)
    run.train(range(2, 3))


def test_a_run_that_diverged_can_be_saved_and_loaded() -> None:
    run = Classifier()
    run.train(range(3))
    run.optimizer.param_groups[0]["estimate"][2] = math.inf
    again = Classifier()
    again.optimizer.load_state_dict(run.optimizer.state_dict())
    assert again.optimizer.estimated_lr() == math.inf
