"""What torch's tests ask of every optimizer in torch.optim: state dicts, copies and hooks."""

import copy

import contract
import pytest
import torch
from contract import IMPLEMENTATIONS, each_case, each_class, each_default
from short_runs import advance, cloned, ones, through_a_file, through_pickle
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def new_params():
    return [nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3)), ones(2)]


def named(params, wanted):
    return [(f"name{i}", p) for i, p in enumerate(params)] if wanted else params


def without_names(state_dict):
    groups = [
        {k: v for k, v in group.items() if k != "param_names"}
        for group in state_dict["param_groups"]
    ]
    return {"state": state_dict["state"], "param_groups": groups}


def assert_same(first, second):
    """Two state dicts, to the last bit."""
    assert [list(g) for g in first["param_groups"]] == [list(g) for g in second["param_groups"]]
    pairs = zip(first["param_groups"], second["param_groups"], strict=True)
    for name, ours, other in ((n, a[n], b[n]) for a, b in pairs for n in a):
        assert type(ours) is type(other), name
        equal = torch.equal(ours, other) if isinstance(ours, torch.Tensor) else ours == other
        assert equal, name
    torch.testing.assert_close(first["state"], second["state"], rtol=0, atol=0)


@pytest.mark.parametrize(("name_first", "name_second"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@each_case
def test_a_loaded_run_continues_and_saves_alike(case, name_first, name_second):
    """Parameters may be named on one side only."""
    params = new_params()
    optimizer = advance(case.build(named(params, name_first)), params, range(3))
    others = cloned(params)
    other = case.build(named(others, name_second))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert_same(saved, kept)
    for k in range(3, 6):
        advance(optimizer, params, [k])
        advance(other, others, [k])
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert_same(without_names(optimizer.state_dict()), without_names(other.state_dict()))
    if name_first or name_second:
        assert other.param_groups[0]["param_names"] == ["name0", "name1"]
    other.param_groups.extend(other.param_groups)  # a parameter in two groups has one key
    last, repeated = (without_names(o.state_dict())["param_groups"][-1] for o in (optimizer, other))
    assert last["params"] == repeated["params"]


@each_case
def test_a_saved_file_is_read_back_with_weights_only(case):
    params = new_params()
    state_dict = advance(case.build(params), params, range(3)).state_dict()
    assert_same(through_a_file(state_dict), state_dict)


@each_case
def test_state_without_flags_or_with_plain_counts_loads(case):
    params = new_params()
    optimizer = advance(case.build(params), params, range(3))
    state_dict = copy.deepcopy(optimizer.state_dict())
    for group in state_dict["param_groups"]:
        for flag in ("foreach", "fused", "differentiable", "maximize", "capturable"):
            del group[flag]
    for state in state_dict["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(state_dict)
    group = optimizer.param_groups[0]
    assert group["foreach"] == case.options.get("foreach")
    assert group["maximize"] == case.maximize
    advance(optimizer, params, [3])
    assert all(optimizer.state[p]["step"] == 4 for p in params)


@pytest.mark.parametrize("after", IMPLEMENTATIONS)
@each_default
def test_a_run_moves_from_one_implementation_to_another(case, after):
    """The flags are those of the checkpoint, as in torch, until they are set again."""
    params = new_params()
    advance(case.build(params), params, range(6))
    moved = new_params()
    first = advance(case.build(moved), moved, range(3))
    second = contract.Case(case.cls, "default", after).build(moved)
    second.load_state_dict(first.state_dict())
    flags = {"foreach": None, "fused": None} | case.options
    assert {name: second.param_groups[0][name] for name in ("foreach", "fused")} == flags
    second.param_groups[0].update({"foreach": None, "fused": None} | IMPLEMENTATIONS[after])
    advance(second, moved, range(3, 6))
    torch.testing.assert_close(moved, params)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@each_default
def test_state_of_another_dtype_or_strides_is_converted(case, dtype):
    params = new_params()
    optimizer = advance(case.build(params), params, range(3))
    others = [nn.Parameter(p.detach().t().clone().t().to(dtype)) for p in params]
    other = case.build(others)
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, others, strict=True):
        for name, value in optimizer.state[p].items():
            loaded = other.state[q][name]
            torch.testing.assert_close(loaded, value, check_dtype=False)
            wide = torch.promote_types(dtype, torch.float32)
            assert loaded.dtype == (torch.float32 if name == "step" else wide)
            assert name == "step" or loaded.stride() == q.stride()
    advance(other, others, [3])
    assert all(other.state[q]["step"] == 4 for q in others)


def attributes(optimizer):
    return {name for name in vars(optimizer) if not name.startswith("_")}


@each_default
def test_copies_have_the_public_attributes_and_share_no_memory(case):
    params = new_params()
    optimizer = advance(case.build(params), params, range(3))
    for copied in (copy.deepcopy, through_pickle):
        twin = copied(optimizer)
        assert attributes(twin) == attributes(optimizer)
        assert_same(twin.state_dict(), optimizer.state_dict())
        kept = copy.deepcopy(optimizer.state_dict())
        advance(twin, twin.param_groups[0]["params"], [3])
        assert_same(optimizer.state_dict(), kept)


def note(optimizer):
    optimizer.state["noted"] = 1


def rename(_, state_dict):
    return {**state_dict, "noted": state_dict["state"].pop("noted", None)}


@each_default
def test_a_hook_after_saving_sees_what_a_hook_before_it_added(case):
    optimizer = case.build(new_params())
    optimizer.register_state_dict_post_hook(rename)
    assert optimizer.state_dict()["noted"] is None
    optimizer.register_state_dict_pre_hook(note)
    saved = optimizer.state_dict()
    assert saved["noted"] == 1
    assert "noted" not in saved["state"]


def set_lr(value, in_place):
    def hook(_, state_dict):
        if not in_place:
            state_dict = copy.deepcopy(state_dict)
        state_dict["param_groups"][0]["lr"] = value
        return None if in_place else state_dict

    return hook


@each_default
def test_hooks_around_loading_run_in_order(case):
    optimizer = case.build(new_params())
    seen = []
    optimizer.register_load_state_dict_pre_hook(set_lr(0.002, in_place=True))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(optimizer.state_dict())
    first = optimizer.register_load_state_dict_pre_hook(set_lr(0.003, in_place=False), prepend=True)
    optimizer.load_state_dict(optimizer.state_dict())
    first.remove()
    optimizer.register_load_state_dict_pre_hook(set_lr(0.004, in_place=False))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [0.002, 0.002, 0.004]


@each_default
def test_step_hooks_run_in_order_until_they_are_removed(case):
    params = new_params()
    optimizer, adam = case.build(params), torch.optim.Adam(cloned(params))
    seen = []

    def noted(name):
        return lambda caller, *_: seen.append((name, caller))

    handles = [
        register_optimizer_step_pre_hook(noted("global pre")),
        register_optimizer_step_post_hook(noted("global post")),
    ]
    try:
        for each in (optimizer, adam):
            handles.append(each.register_step_pre_hook(noted("pre")))
            handles.append(each.register_step_post_hook(noted("post")))
        for each in (optimizer, adam, optimizer):
            advance(each, each.param_groups[0]["params"], [0])
            assert seen == [(n, each) for n in ("global pre", "pre", "post", "global post")]
            seen.clear()
    finally:
        for handle in handles:
            handle.remove()
    advance(optimizer, params, [1])
    assert not seen


@each_class
def test_a_step_hook_may_replace_the_arguments(cls):
    optimizer = cls(new_params())
    optimizer.register_step_pre_hook(lambda o, *_: ((o, lambda: 7.0), {}))
    assert optimizer.step(lambda: 5.0) == 7.0
    optimizer.register_step_pre_hook(lambda *_: "nothing of the kind")
    with pytest.raises(RuntimeError, match="must return None or a tuple"):
        optimizer.step()
