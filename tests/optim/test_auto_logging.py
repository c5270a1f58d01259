"""Where MADGRAD(lr="auto") shows its estimate: in the groups, and by `cubegrad.estimated_lr`."""

import copy
import math
from types import SimpleNamespace

import cases
import pytest
import torch
from auto_classifier import Classifier
from short_runs import ones, parameters, through_a_file, through_pickle
from torch.optim import lr_scheduler

import cubegrad
from cubegrad import MADGRAD, options


@cases.each_fast_backend
def test_every_group_has_the_current_estimate(backend):
    params = parameters([(6, 5), (7,)], torch.float64, device=backend.device)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = MADGRAD(groups, lr="auto", **backend.flags)
    shown = [group["estimated_lr"] for group in optimizer.param_groups]
    assert list(map(float, shown)) == [0.0, 0.0]
    seen = set()
    for _ in range(3):
        shared = optimizer.param_groups[0]["estimated_lr"]
        for param in params:
            param.grad = param.detach() - 3
        optimizer.step()
        shown = [float(group["estimated_lr"]) for group in optimizer.param_groups]
        assert shown == [optimizer.estimated_lr()] * 2
        seen.add(shown[0])
    assert len(seen) == 3
    assert shared.device == params[0].device
    assert float(shared) == optimizer.estimated_lr()  # a logger may keep it


@pytest.mark.parametrize("how", ["state_dict", "file", "old file", "pickle", "deepcopy"])
def test_copies_and_checkpoints_have_an_estimate_of_their_own(how):
    run = Classifier()
    run.train(range(3))
    before = run.optimizer.estimated_lr()
    if how in ("pickle", "deepcopy"):
        copied = through_pickle if how == "pickle" else copy.deepcopy
        other = copied((run.net, run.optimizer))[1]
    else:
        saved = copy.deepcopy(run.optimizer.state_dict())
        if how == "old file":
            del saved["param_groups"][0]["estimated_lr"]
        other = Classifier().optimizer
        other.load_state_dict(saved if how == "state_dict" else through_a_file(saved))
    run.train(range(3, 5))
    group = other.param_groups[0]
    assert float(group["estimated_lr"]) == other.estimated_lr() == before
    group["estimate"][2] = 0.25
    assert float(group["estimated_lr"]) == 0.25


def wrapped(kind, optimizer):
    """As accelerate, Lightning, DeepSpeed and optimizers around others keep them."""
    if kind == "scheduler":
        return lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    if kind == "list":
        return [optimizer]
    if kind == "dict":
        return {"optimizer": optimizer, "interval": "step"}
    if kind == "around another wrapper":
        return SimpleNamespace(optimizer=SimpleNamespace(base_optimizer=optimizer))
    if kind == "with older groups":
        groups = copy.deepcopy(optimizer.param_groups)
        groups[0]["estimate"] = groups[0]["estimate"] * 2
        return SimpleNamespace(optim=optimizer, param_groups=groups)
    if kind == "with groups only":
        return SimpleNamespace(param_groups=optimizer.param_groups)
    return SimpleNamespace(**{kind: optimizer})


KINDS = ["optimizer", "_optimizer", "optim", "base_optimizer", "inner", "scheduler", "list", "dict"]
KINDS += ["around another wrapper", "with older groups", "with groups only"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_found_inside_a_wrapper(kind):
    run = Classifier()
    assert math.isnan(cubegrad.estimated_lr(wrapped(kind, run.optimizer)))
    run.train(range(3))
    assert cubegrad.estimated_lr(run.optimizer) == run.optimizer.estimated_lr()
    assert cubegrad.estimated_lr(wrapped(kind, run.optimizer)) == run.optimizer.estimated_lr()


def test_a_wrapper_may_hold_itself():
    run = Classifier()
    run.train(range(2))
    wrapper = SimpleNamespace(optim=run.optimizer)
    wrapper.optimizer = wrapper
    assert cubegrad.estimated_lr(wrapper) == run.optimizer.estimated_lr()


def test_without_an_estimate_the_error_says_what_it_got():
    fixed = MADGRAD([ones(3)], lr=0.25)
    for thing, got in (
        (3, "got int;"),
        (None, "got NoneType;"),
        (fixed, r"got MADGRAD with lr=0\.25;"),
        ([torch.optim.SGD([ones(2)])], "got list, which holds SGD with lr="),
        (SimpleNamespace(optimizer=fixed), "got SimpleNamespace, which holds MADGRAD with"),
    ):
        with pytest.raises(TypeError, match=got):
            cubegrad.estimated_lr(thing)
    with pytest.raises(ValueError, match="list holds 2 optimizers with lr='auto'"):
        cubegrad.estimated_lr([Classifier().optimizer, Classifier().optimizer])
    with pytest.raises(RuntimeError, match=r"lr=0\.25; build it with"):
        fixed.share_estimate()
    with pytest.raises(RuntimeError, match="init_process_group"):
        Classifier().optimizer.share_estimate()


def test_what_is_printed_shows_the_estimate_and_not_its_numbers():
    param = parameters([(6, 5)])[0]
    optimizer = MADGRAD([param], lr="auto")
    assert "estimated_lr: nan" in repr(optimizer)
    param.grad = torch.ones_like(param)
    optimizer.step()
    shown = repr(optimizer)
    assert f"    estimated_lr: {optimizer.estimated_lr()}\n" in shown
    assert "tensor" not in shown
    keys = [line.split(":")[0].strip() for line in shown.splitlines() if ":" in line]
    assert keys == sorted(
        [*options.FLAGS, *("auto_lr", "estimated_lr", "lr", "momentum", "eps", "weight_decay")]
    )
