"""The state of a prepared step notices when it is changed, and when a user holds its tensors."""

import copy

import pytest
import torch
from short_runs import FusedAndEager, through_pickle

from cubegrad.optim.watched import Journal, Watched

SHAPES = [(8, 8), (30,), (5, 5), (3,)] * 5


@pytest.fixture
def pair():
    return FusedAndEager(SHAPES)


def journal_of(pair):
    return pair.fused[1]._repeats.prepared[0].journal


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.__setitem__("a", torch.ones(1)),
        lambda d: d.pop("a"),
        lambda d: d.update(a=torch.ones(1)),
        lambda d: d.__delitem__("a"),
        lambda d: d.setdefault("b", torch.ones(1)),
        lambda d: d.clear(),
        lambda d: d.popitem(),
        lambda d: d.__ior__({"a": torch.ones(1)}),
    ],
)
def test_every_way_to_change_it_is_noted(change):
    journal = Journal()
    watched = Watched({"a": torch.zeros(1)}, [], journal)
    assert watched["a"] == 0
    assert type(copy.deepcopy(watched)) is dict
    assert type(through_pickle(watched)) is dict
    assert not journal.changed
    change(watched)
    assert journal.changed


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
def test_it_is_compared_only_while_a_user_holds_a_tensor_of_it(read, pair):
    params, optimizer = pair.fused
    pair.step(times=3)
    journal = journal_of(pair)
    assert not journal.exposed  # nobody has read it
    held = READS[read](optimizer.state[params[3]])
    assert [watched is optimizer.state[params[3]] for watched in journal.exposed] == [True]
    pair.step()
    assert journal.exposed
    del held
    pair.step(times=8)  # references are counted less and less often
    assert not journal.exposed
    pair.assert_close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
def test_a_copy_of_it_is_a_dict(copied, pair):
    params, optimizer = pair.fused
    pair.step()
    assert type(optimizer.state[params[0]]) is Watched
    assert type(copied(optimizer.state[params[0]])) is dict


def test_a_state_dict_does_not_slow_later_steps(pair):
    pair.step()
    saved = pair.fused[1].state_dict()
    journal = journal_of(pair)
    assert len(journal.exposed) == len(SHAPES)
    del saved
    pair.step(times=4)
    assert not journal.exposed


def test_references_are_seldom_counted_where_the_state_is_often_read(pair, monkeypatch):
    """Counting references takes longer than comparing addresses."""
    params, optimizer = pair.fused
    pair.step()
    journal = journal_of(pair)
    calls = []
    monkeypatch.setattr(
        journal,
        "count_references",
        lambda count=journal.count_references: (calls.append(1), count()),
    )
    for k in range(1, 40):
        assert optimizer.state[params[0]]["step"] == k
        pair.step()
    assert 3 <= len(calls) <= 8
    for _ in range(40, 1000):
        pair.step()
        if journal.step - journal.checked_at > 4 * journal.wait:
            break
    assert not journal.exposed
    assert optimizer.state[params[0]]["step"] > 40
    assert journal.wait == 1
    pair.assert_close()
