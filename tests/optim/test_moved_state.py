"""State that a user moves, holds or exchanges between steps: a prepared step notices it."""

import copy
import weakref
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from short_runs import FusedAndEager
from torch import Tensor

SHAPES = [(8, 8), (30,), (5, 5), (3,)] * 5


def prepared(pair):
    return pair.fused[1]._repeats.prepared[0]


@contextmanager
def nothing_else_overwritten():
    """New tensors land in memory that was freed: a step that still writes there changes them."""
    others = [torch.full(shape, 7.0) for shape in SHAPES * 3]
    yield
    assert all(bool((tensor == 7).all()) for tensor in others)


def of_one(name, move):
    return lambda params, optimizer: move(optimizer.state[params[3]][name])


def of_all(name, move):
    return lambda _, optimizer: [move(state[name]) for state in optimizer.state.values()]


def assign_data(tensor):
    tensor.data = tensor.data.clone()


def set_storage(tensor):
    tensor.set_(tensor.clone())


def reallocate_storage(tensor):
    kept, storage = tensor.clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    tensor.copy_(kept)


def swap(tensor):
    torch.utils.swap_tensors(tensor, tensor.clone())


MOVES = [assign_data, set_storage, Tensor.share_memory_, reallocate_storage, swap]


@pytest.mark.parametrize("name", ["step", "grad_sum", "grad_sq_sum", "initial_param"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("which", [of_one, of_all])
def test_state_that_is_moved_is_noticed(move, name, which):
    pair = FusedAndEager(SHAPES)
    pair.step(times=3)
    before = prepared(pair)
    pair.step(which(name, move))
    with nothing_else_overwritten():
        pair.step(times=3)
        pair.assert_close()
    assert move is reallocate_storage or prepared(pair) is not before


def test_a_layer_that_is_offloaded_and_restored():
    pair = FusedAndEager(SHAPES)
    pair.step(times=3)

    def offload_and_restore(params, optimizer):
        for param in params[4:8]:
            for tensor in (param, *optimizer.state[param].values()):
                kept = tensor.data.numpy().copy()
                tensor.data = torch.empty(0)
                tensor.data = torch.from_numpy(kept)

    for _ in range(3):
        pair.step(offload_and_restore)
        pair.step()
    pair.assert_close()


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: t.view(-1), Tensor.untyped_storage])
def test_a_tensor_that_a_user_holds_may_be_moved_much_later(hold):
    pair = FusedAndEager(SHAPES)
    pair.step(times=3)
    held = [hold(optimizer.state[params[3]]["grad_sq_sum"]) for params, optimizer in pair.runs]
    pair.step(times=9)
    for tensor in held:
        tensor.share_memory_()
    with nothing_else_overwritten():
        pair.step(times=3)
        pair.assert_close()


@pytest.mark.parametrize(
    "view", [lambda d: d.items(), lambda d: d.values(), lambda d: iter(d.values())]
)
def test_a_dict_view_hands_out_tensors_later(view):
    pair = FusedAndEager(SHAPES)
    pair.step(times=3)
    views = [view(optimizer.state[params[3]]) for params, optimizer in pair.runs]
    pair.step(times=9)
    for one in views:
        for entry in one:
            assign_data(entry[1] if isinstance(entry, tuple) else entry)
    with nothing_else_overwritten():
        pair.step(times=3)
        pair.assert_close()


def test_a_weak_reference_to_a_storage_counts():
    pair = FusedAndEager(SHAPES)
    params, optimizer = pair.fused
    pair.step()
    held = weakref.ref(optimizer.state[params[3]]["grad_sum"].untyped_storage())
    pair.step(times=8)
    exposed = prepared(pair).journal.exposed
    assert [watched is optimizer.state[params[3]] for watched in exposed] in ([], [True])
    assert held() is None or exposed


def test_two_optimizers_that_share_their_state():
    pair = FusedAndEager(SHAPES)
    pair.step(times=3)
    shared = copy.copy(pair)
    shared.runs = [(params, copy.copy(optimizer)) for params, optimizer in pair.runs]
    for each in (shared, pair, shared):
        each.step()
    for params, optimizer in pair.runs:
        assign_data(optimizer.state[params[3]]["grad_sum"])
    with nothing_else_overwritten():
        for each in (pair, shared, pair, shared):
            each.step()
        pair.assert_close()


def test_parameters_that_exchange_their_state():
    pair = FusedAndEager([(5,), (5,)])
    pair.step(times=3)
    for (a, b), optimizer in pair.runs:
        state = optimizer.state
        optimizer.state = defaultdict(dict, {b: state[a], a: state[b]})
    pair.step(times=3)
    pair.assert_close()


def test_a_group_whose_list_became_a_tuple():
    pair = FusedAndEager(SHAPES)
    for _ in range(4):
        pair.step()
        for _, optimizer in pair.runs:
            group = optimizer.param_groups[0]
            group["params"] = tuple(group["params"])
    pair.assert_close()
