"""What users do with an optimizer: under gradient release it gives what ordinary steps give."""

import copy
import gc
import weakref

import cases
import pytest
import released_runs
import torch
from cases import each_class
from released_runs import Net, assert_same, decaying, loss_of, pair, train, two_groups
from short_runs import ones, through_a_file, through_pickle
from torch import nn

from cubegrad import MADGRAD
from cubegrad.optim import release

each_form = pytest.mark.parametrize("compact", [False, True], ids=["sums", "compact"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def _small_line(monkeypatch):
    monkeypatch.setattr(release.GradientRelease, "held_bytes", released_runs.HELD_BYTES)


@each_form
@each_class
def test_late_groups_and_unfrozen_parameters(cls, compact):
    runs = pair(lambda model: cls(model.last.parameters(), compact=compact))
    for model, optimizer in runs:
        train(model, optimizer, range(3))
        optimizer.add_param_group({"params": list(model.twice.parameters()), "lr": 0.02})
        optimizer.add_param_group({"params": list(model.frozen.parameters())})
        train(model, optimizer, range(3, 5))
        model.frozen.requires_grad_(True)
        train(model, optimizer, range(5, 8))
    for (name, p), q in zip(runs[0][0].named_parameters(), runs[1][0].parameters(), strict=True):
        assert cases.same_bits(p.detach(), q.detach()), name
    model, optimizer = runs[1]
    loss_of(model, 8).backward()
    assert model.frozen.weight.grad is None
    assert model.twice.weight.grad is None
    assert model.norm.weight.grad is not None  # nobody's
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        optimizer.add_param_group({"params": list(model.norm.parameters())})
    assert len(optimizer.param_groups) == 3


@each_dtype
def test_lazy_parameters_and_models_that_are_converted(dtype):
    runs = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(64), nn.Tanh(), nn.LazyLinear(64))
        optimizer = MADGRAD(model.parameters())
        if released:
            optimizer.release_gradients()
        for k in range(6):
            if k == 3:
                model.to(dtype)
            x = cases.randn((4, 32), torch.float32, k).to(dtype if k >= 3 else torch.float32)
            model(x).square().sum().backward()
            assert (model[0].weight.grad is None) == (released and k > 0)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_same(*runs)


def test_a_parameter_that_leaves_its_group_is_not_stepped():
    model = Net()
    optimizer = MADGRAD(two_groups(model))
    optimizer.release_gradients()
    train(model, optimizer, range(2))
    del optimizer.param_groups[0]
    with cases.no_change(*(p for p in model.parameters() if p.ndim > 1)):
        train(model, optimizer, range(2, 4))
    assert model.last.weight.grad is not None


@each_form
def test_resume_in_the_middle(compact):
    one, other = pair(lambda model: MADGRAD(two_groups(model), compact=compact))
    train(*one)
    train(*other, steps=range(4))
    model, saved = Net(), through_a_file(other[1].state_dict())
    model.load_state_dict(other[0].state_dict())
    optimizer = MADGRAD(two_groups(model), compact=compact)
    optimizer.release_gradients()
    optimizer.load_state_dict(saved)
    train(model, optimizer, steps=range(4, 8))
    assert_same(one, (model, optimizer))
    model.load_state_dict(other[0].state_dict())
    optimizer.load_state_dict(saved)  # back to step 4
    train(model, optimizer, steps=range(4, 8))
    assert_same(one, (model, optimizer))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_a_copy_makes_ordinary_steps(copied):
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    train(*other, steps=range(4))
    model, optimizer = copied(other)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    loss_of(model, 4).backward()
    assert all(p.grad is not None for p in model.last.parameters())
    optimizer.step()
    optimizer.zero_grad()
    optimizer.release_gradients()
    for run in ((model, optimizer), other):
        train(*run, steps=range(4 if run is other else 5, 8))
    train(*one)
    assert_same(one, other)
    assert_same(one, (model, optimizer))


def test_remove_goes_back_to_ordinary_steps():
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    train(*one)
    model, optimizer = other
    train(model, optimizer, steps=range(3))
    handle = optimizer._release
    loss_of(model, 3).backward()
    with pytest.raises(RuntimeError, match=r"call step\(\) first"):
        handle.remove()
    optimizer.step()
    handle.remove()
    handle.remove()
    loss_of(model, 4).backward()
    assert model.last.weight.grad is not None
    optimizer.step()
    optimizer.zero_grad()
    optimizer.release_gradients()
    train(model, optimizer, steps=range(5, 8))
    assert_same(one, other)


def test_a_dropped_optimizer_steps_no_more_and_is_freed():
    model = Net()
    optimizer = MADGRAD(model.parameters())
    handle = optimizer.release_gradients()
    train(model, optimizer, range(2))
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
    with cases.no_change(*model.parameters()):
        loss_of(model, 2).backward()
    assert model.last.weight.grad is not None
    MADGRAD(model.parameters()).release_gradients()
    handle.remove()


def test_a_closure_runs_backward_inside_step():
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    for model, optimizer in (one, other):
        for k in range(4):

            def closure(model=model, optimizer=optimizer, k=k):
                optimizer.zero_grad()
                loss = loss_of(model, k)
                loss.backward()
                return loss

            with torch.no_grad():
                assert optimizer.step(closure) > 0
    for (name, p), q in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert cases.same_bits(p.detach(), q.detach()), name


def test_step_hooks_and_schedulers_see_every_step():
    model = Net()
    optimizer = MADGRAD(model.parameters())
    optimizer.release_gradients()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, range(3), decaying(optimizer))  # warnings are errors
    assert seen == ["before", "after"] * 3


def test_gradients_that_no_hook_has_seen_are_stepped_by_step():
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    for model, optimizer in (one, other):
        for k in range(3):
            model.unused.weight.grad = cases.randn((64, 64), torch.float32, k)
            if k:
                loss_of(model, k).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(one, other)


def test_create_graph():
    """Hooks then run with gradients enabled."""
    one, other = ([ones(4, 80)] for _ in range(2))
    for params in (one, other):
        optimizer = MADGRAD(params, lr=0.1)
        if params is other:
            optimizer.release_gradients()
        for _ in range(3):
            (slope,) = torch.autograd.grad(params[0].pow(3).sum(), params, create_graph=True)
            (params[0].square().sum() + slope.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert cases.same_bits(one[0].detach(), other[0].detach())


def test_sparse_gradients():
    tables = [nn.Embedding(50, 8, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [MADGRAD(table.parameters(), momentum=0.0) for table in tables]
    optimizers[1].release_gradients()
    for k in range(4):
        for table, optimizer in zip(tables, optimizers, strict=True):
            table(torch.tensor([k, 3, 3])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert cases.same_bits(tables[0].weight.detach(), tables[1].weight.detach())
    late = MADGRAD([tables[0].weight, ones(3)], momentum=0.9)
    late.release_gradients()
    with (
        cases.no_change(tables[0].weight),
        pytest.raises(RuntimeError, match=r"momentum=0.9 moves every row"),
    ):
        tables[0](torch.tensor([1])).sum().backward()


def test_clipping_each_gradient_in_a_hook_works():
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    for run in (one, other):
        for param in run[0].parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        train(*run)
    assert_same(one, other)


@pytest.mark.compilation
def test_a_compiled_step_is_run_as_it_is():
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    train(*one, steps=range(4))
    model, optimizer = other
    step = torch.compile(optimizer.step, backend="eager")
    for k in range(4):
        loss_of(model, k).backward()
        step()
        optimizer.zero_grad()
    assert_same(one, other)


@pytest.mark.compilation
def test_a_compiled_model():
    _, (model, optimizer) = pair(lambda model: MADGRAD(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager")
    for k in range(3):
        loss_of(compiled, k).backward()
        assert model.last.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state[model.last.weight]["step"] == 3
