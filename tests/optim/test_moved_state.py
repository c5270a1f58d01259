"""What a user may do to tensors between steps: a prepared step notices it, and frees no memory."""

import copy
import pickle
import weakref
from collections import defaultdict

import cases
import pytest
import torch
from torch import Tensor

from cubegrad import MADGRAD, MirrorMADGRAD
from cubegrad.backends import memory
from cubegrad.backends.native import tensors
from cubegrad.optim.watched import Watched

SHAPES = [(8, 8), (30,), (5, 5), (3,)] * 5


def twins(cls=MADGRAD, shapes=SHAPES, **options):
    """The same parameters stepped by the fused and by the eager backend."""
    runs = []
    for flags in ({"fused": True}, {"foreach": False}):
        params = [
            torch.nn.Parameter(cases.randn(s, torch.float32, i)) for i, s in enumerate(shapes)
        ]
        runs.append((params, cls(params, **flags, **options)))
    return runs


def step(runs, k, arrange=lambda *_: None):
    for params, optimizer in runs:
        for i, param in enumerate(params):
            param.grad = cases.randn(tuple(param.shape), torch.float32, 99 * k + i)
        arrange(params, optimizer)
        optimizer.step()


def assert_alike(runs):
    (params, fused), (others, eager) = runs
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
        for name, value in eager.state[other].items():
            torch.testing.assert_close(fused.state[param][name], value, rtol=1e-5, atol=1e-6)


def prepared(run):
    return run[1]._repeats.prepared[0]


def of_one(name, move):
    return lambda params, optimizer: move(optimizer.state[params[3]][name])


def of_all(name, move):
    return lambda _, optimizer: [move(state[name]) for state in optimizer.state.values()]


def assigned(tensor):
    tensor.data = tensor.data.clone()


def set_elsewhere(tensor):
    tensor.set_(tensor.clone())


def storage_renewed(tensor):
    kept, storage = tensor.clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    tensor.copy_(kept)


def swapped(tensor):
    torch.utils.swap_tensors(tensor, tensor.clone())


MOVES = [assigned, set_elsewhere, Tensor.share_memory_, storage_renewed, swapped]


@pytest.mark.parametrize("name", ["step", "grad_sum", "grad_sq_sum", "initial_param"])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("which", [of_one, of_all])
def test_state_that_is_moved_is_noticed(move, name, which):
    """Every other allocation afterwards would land in what was freed."""
    runs = twins()
    for k in range(3):
        step(runs, k)
    was = prepared(runs[0])
    step(runs, 3, which(name, move))
    others = [torch.full(shape, 7.0) for shape in SHAPES * 3]
    for k in range(4, 7):
        step(runs, k)
    assert_alike(runs)
    assert all(bool((tensor == 7).all()) for tensor in others)
    assert move is storage_renewed or prepared(runs[0]) is not was


def test_a_layer_that_is_offloaded_and_restored():
    runs = twins()
    for k in range(3):
        step(runs, k)

    def offload_and_restore(params, optimizer):
        for param in params[4:8]:
            for tensor in (param, *optimizer.state[param].values()):
                kept = tensor.data.numpy().copy()
                tensor.data = torch.empty(0)
                tensor.data = torch.from_numpy(kept)

    for k in range(3, 9):
        step(runs, k, offload_and_restore if k % 2 else lambda *_: None)
    assert_alike(runs)


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: t.view(-1), Tensor.untyped_storage])
def test_who_got_hold_of_a_tensor_may_move_it_much_later(hold):
    runs = twins()
    for k in range(3):
        step(runs, k)
    held = [hold(optimizer.state[params[3]]["grad_sq_sum"]) for params, optimizer in runs]
    for k in range(3, 12):
        step(runs, k)
    for thing in held:
        thing.share_memory_()
    others = [torch.full(shape, 7.0) for shape in SHAPES * 3]
    for k in range(12, 15):
        step(runs, k)
    assert_alike(runs)
    assert all(bool((tensor == 7).all()) for tensor in others)


@pytest.mark.parametrize(
    "view", [lambda d: d.items(), lambda d: d.values(), lambda d: iter(d.values())]
)
def test_a_view_hands_out_tensors_later(view):
    runs = twins()
    for k in range(3):
        step(runs, k)
    views = [view(optimizer.state[params[3]]) for params, optimizer in runs]
    for k in range(3, 12):
        step(runs, k)
    for one in views:
        for entry in one:
            assigned(entry[1] if isinstance(entry, tuple) else entry)
    others = [torch.full(shape, 7.0) for shape in SHAPES * 3]
    for k in range(12, 15):
        step(runs, k)
    assert_alike(runs)
    assert all(bool((tensor == 7).all()) for tensor in others)


def test_a_weak_reference_to_a_storage_counts():
    (params, optimizer), _ = runs = twins()
    step(runs, 0)
    held = weakref.ref(optimizer.state[params[3]]["grad_sum"].untyped_storage())
    for k in range(1, 9):
        step(runs, k)
    assert [w is optimizer.state[params[3]] for w in prepared(runs[0]).journal.exposed] in (
        [],
        [True],
    )
    assert held() is None or prepared(runs[0]).journal.exposed


def test_two_optimizers_that_share_their_state():
    runs = twins()
    for k in range(3):
        step(runs, k)
    others = [(params, copy.copy(optimizer)) for params, optimizer in runs]
    for k in range(3, 6):
        step(others if k % 2 else runs, k)
    for params, optimizer in runs:
        assigned(optimizer.state[params[3]]["grad_sum"])
    canaries = [torch.full(shape, 7.0) for shape in SHAPES * 3]
    for k in range(6, 10):
        step(others if k % 2 else runs, k)
    assert_alike(runs)
    assert all(bool((tensor == 7).all()) for tensor in canaries)


def test_state_that_changes_places():
    runs = twins(shapes=[(5,), (5,)])
    for k in range(3):
        step(runs, k)
    for (a, b), optimizer in runs:
        state = optimizer.state
        optimizer.state = defaultdict(dict, {b: state[a], a: state[b]})
    for k in range(3, 6):
        step(runs, k)
    assert_alike(runs)


def test_a_group_whose_list_became_a_tuple():
    runs = twins()
    for k in range(4):
        step(runs, k)
        for _, optimizer in runs:
            group = optimizer.param_groups[0]
            group["params"] = tuple(group["params"])
    assert_alike(runs)


@pytest.mark.parametrize("of", ["grad_sum", "grad"])
def test_a_storage_that_became_smaller_is_refused(of):
    """Even where it stays at its address."""
    param = torch.nn.Parameter(torch.ones(400))
    optimizer = MADGRAD([param])
    for _ in range(3):
        param.grad = torch.ones(400)
        optimizer.step()
    tensor = param.grad if of == "grad" else optimizer.state[param][of]
    tensor.untyped_storage().resize_(64)
    with cases.no_change(param), pytest.raises(ValueError, match="storage of 64 bytes"):
        optimizer.step()


def test_a_gradient_without_memory_is_zero():
    """As forward-mode differentiation makes them."""
    runs = twins()
    for k in range(4):

        def arrange(params, _, k=k):
            if k % 2:
                params[1].grad = torch._efficientzerotensor(tuple(params[1].shape))

        step(runs, k, arrange)
    assert_alike(runs)


def test_weights_that_are_negated_in_place():
    runs = twins()
    for k in range(4):

        def arrange(params, _, k=k):
            if k == 2:
                params[1].data = torch._neg_view(params[1].data.clone())

        step(runs, k, arrange)
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(one.resolve_neg(), other.resolve_neg(), rtol=1e-5, atol=1e-6)


READS = {
    "item": lambda d: d["grad_sum"],
    "get": lambda d: d.get("grad_sum"),
    "values": lambda d: list(d.values()),
    "items": lambda d: dict(d.items()),
    "dict": dict,
    "stars": lambda d: {**d},
    "copy": copy.copy,
    "method": lambda d: d.copy(),
    "or": lambda d: d | {},
    "ror": lambda d: {} | d,
    "iter": lambda d: [d[name] for name in d],
}


@pytest.mark.parametrize("read", READS)
def test_state_is_compared_while_somebody_holds_it_and_only_then(read):
    (params, optimizer), _ = runs = twins()
    for k in range(3):
        step(runs, k)
    journal = prepared(runs[0]).journal
    assert not journal.exposed  # nobody has asked for it
    held = READS[read](optimizer.state[params[3]])
    assert [watched is optimizer.state[params[3]] for watched in journal.exposed] == [True]
    step(runs, 3)
    assert journal.exposed
    del held
    for k in range(4, 12):  # looked at ever more seldom
        step(runs, k)
    assert not journal.exposed
    assert_alike(runs)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_a_copy_of_watched_state_is_a_dict(copied):
    (params, optimizer), _ = runs = twins()
    step(runs, 0)
    assert type(optimizer.state[params[0]]) is Watched
    assert type(copied(optimizer.state[params[0]])) is dict


def test_a_state_dict_does_not_slow_later_steps():
    (_, optimizer), _ = runs = twins()
    step(runs, 0)
    saved = optimizer.state_dict()
    journal = prepared(runs[0]).journal
    assert len(journal.exposed) == len(SHAPES)
    del saved
    for k in range(1, 5):
        step(runs, k)
    assert not journal.exposed


def test_references_are_counted_seldom_where_the_state_is_read_often(monkeypatch):
    """Counting references takes longer than comparing addresses."""
    (params, optimizer), _ = runs = twins()
    step(runs, 0)
    journal = prepared(runs[0]).journal
    calls = []
    monkeypatch.setattr(
        journal,
        "count_references",
        lambda count=journal.count_references: (calls.append(1), count()),
    )
    for k in range(1, 40):
        assert optimizer.state[params[0]]["step"] == k
        step(runs, k)
    assert 3 <= len(calls) <= 8
    for k in range(40, 1000):
        step(runs, k)
        if journal.step - journal.checked_at > 4 * journal.wait:
            break
    assert not journal.exposed
    assert optimizer.state[params[0]]["step"] > 40
    assert journal.wait == 1
    assert_alike(runs)


def test_a_parameter_with_more_elements_than_its_gradient_is_refused():
    param, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = MADGRAD([{"params": [other]}, {"params": [param]}])
    for _ in range(2):
        param.grad, other.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
    param.data = torch.ones(400)
    with cases.no_change(param, other), pytest.raises(ValueError, match=r"\(4,\).*\(400,\)"):
        optimizer.step()


def test_a_storage_that_was_freed_is_refused_and_not_read():
    param = torch.nn.Parameter(torch.ones(400))
    optimizer = MADGRAD([param])
    for _ in range(2):
        param.grad = torch.ones(400)
        optimizer.step()
    param.grad.untyped_storage().resize_(0)
    with cases.no_change(param), pytest.raises(ValueError, match="storage of 0 bytes"):
        optimizer.step()


@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])
@pytest.mark.parametrize("shared", ["gradient", "twice", "views", "grads"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_tensors_that_share_memory_are_stepped_one_after_the_other(shared, cls):
    """As torch.optim does without `fused`."""
    results = []
    for flags in ({"fused": True}, {"foreach": False}):
        whole = cases.randn((6,), torch.float32, 0)
        params = [
            torch.nn.Parameter(whole),
            torch.nn.Parameter(cases.randn((6,), torch.float32, 1)),
        ]
        if shared == "twice":
            params.append(params[0])
        if shared == "views":
            params.append(torch.nn.Parameter(whole[2:]))
        optimizer = cls(params, lr=0.1, **flags)
        for k in range(4):
            for i, param in enumerate(params):
                param.grad = cases.randn(tuple(param.shape), torch.float32, 9 * k + i)
            if shared == "gradient" and k % 2:
                params[0].grad = params[0].detach()
            if shared == "grads":
                params[0].grad = params[1].grad
            optimizer.step()
        results.append([param.detach().clone() for param in params])
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-6)


def test_the_searches_for_shared_memory_agree():
    room = torch.zeros(1000)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        cuts = torch.randint(0, 990, (6,), generator=generator).tolist()
        written = [room[cut : cut + 10] for cut in sorted({cut // 20 * 20 for cut in cuts[:4]})]
        grads = [room[cut : cut + 5] for cut in cuts[4:]]
        spans = [memory.span(w) for w in written], [memory.span(g) for g in grads]
        expected = any(memory.overlap(w, g) for w in spans[0] for g in spans[1])
        addresses = b"".join(g.data_ptr().to_bytes(8, "little") for g in grads)
        packed = memory.packed(spans[0]), memory.lengths(spans[1]), addresses
        assert tensors.any_within(*packed) == expected
        assert tensors.plain_any_within(*packed) == expected
        assert memory.any_overlap(*spans) == expected
        seen.add(expected)
    assert seen == {True, False}
    assert memory.any_overlap([(0, 5), (4, 8)], [])
    assert not memory.any_overlap([(0, 5)], [(5, 9), (6, 10), (0, 0), (3, 3)])
    assert memory.span(room.view(10, 100)[2:4, 5:9]) == (
        room.data_ptr() + 4 * 205,
        room.data_ptr() + 4 * 309,
    )


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": False}, {"foreach": True}], ids=str)
def test_autograd_notices_that_weights_were_written_to(flags):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MADGRAD([param], **flags)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
        out = (param * param).sum()
        version = param._version
        optimizer.step()
        assert param._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_inference_tensors_have_no_version_and_are_stepped():
    with torch.inference_mode():
        param = torch.ones(3)
        param.grad = torch.ones(3)
        optimizer = MADGRAD([param], fused=True)
        for _ in range(3):
            optimizer.step()
        assert (param < 1).all()
        assert optimizer.state[param]["step"] == 3


def test_a_negated_gradient_at_an_address_met_before():
    """`c.imag` and `c.conj().imag` are one address and two signs."""
    value = torch.ones(1, dtype=torch.complex64) * 2j
    results = []
    for flags in ({"fused": True}, {"foreach": False}):
        param = torch.nn.Parameter(torch.zeros(1))
        optimizer = MADGRAD([param], lr=0.1, **flags)
        for k in range(6):
            param.grad = (value if k < 3 else value.conj()).imag
            optimizer.step()
        results.append(param.detach())
    assert (tensors.addresses is tensors.plain_addresses) or param.grad.is_neg()
    torch.testing.assert_close(*results)
