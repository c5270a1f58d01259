"""A step that is prepared once and repeated: no change makes it use stale addresses."""

import cases
import pytest
import torch
from short_runs import FusedAndEager, parameters

from cubegrad.optim import repeat, step

triton_backend = pytest.importorskip("cubegrad.backends.triton.launch")

FUSED = cases.TRITON


def checked_step(pair, change=lambda *_: None):
    pair.step(change)
    pair.assert_close()


def test_a_repeated_step_is_prepared_and_follows_every_change():
    pair = FusedAndEager([(8, 8), (30,), (5, 5)], FUSED)
    checked_step(pair)
    checked_step(pair)
    assert len(pair.fused[1]._repeats.prepared) == 1

    checked_step(pair, lambda params, _: setattr(params[0], "grad", params[0].grad.T))
    checked_step(pair, lambda params, _: setattr(params[1], "grad", None))
    checked_step(pair)

    def move_weights(params, _):
        params[1].data = params[1].data * 0.5  # other addresses

    checked_step(pair, move_weights)
    checked_step(pair)

    def replace_buffer(params, optimizer):
        state = optimizer.state[params[2]]
        state["grad_sum"] = state["grad_sum"] * 2

    checked_step(pair, replace_buffer)
    checked_step(pair)

    def move_state(_, optimizer):
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.data = tensor.data.clone()

    checked_step(pair, move_state)
    checked_step(pair)
    checked_step(pair, lambda _, optimizer: optimizer.param_groups[0].update(foreach=False))
    checked_step(pair)
    checked_step(pair, lambda params, optimizer: optimizer.state.pop(params[0]))  # a fresh start
    checked_step(pair)
    checked_step(pair, lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
    checked_step(pair)
    for momentum in (0.0, 0.0, 0.5, 0.9):
        checked_step(pair, lambda _, o, m=momentum: o.param_groups[0].update(momentum=m))
    assert len(pair.fused[1]._repeats.prepared) == 1


def test_a_skipped_step_loses_nothing_when_momentum_is_switched_off():
    """x did not become z, so x_0 must stay until a step is not skipped."""
    pair = FusedAndEager([(5,)], FUSED, lr=0.1)
    for _ in range(3):
        checked_step(pair)
    for _, optimizer in pair.runs:
        optimizer.param_groups[0]["momentum"] = 0.0
    (param,), fused = pair.fused
    param.grad = torch.full_like(param, float("inf"))
    fused.found_inf = torch.tensor(1.0, device=FUSED.device)
    with cases.no_change(param):
        fused.step()
    del fused.found_inf
    checked_step(pair)
    checked_step(pair)
    assert "initial_param" not in fused.state[param]


def capturable():
    params = parameters([(5,), (3, 4)], device=FUSED.device)
    for param in params:
        param.grad = torch.ones_like(param)
    return params, cases.build(cases.MADGRAD, FUSED, params, {"capturable": True})


def pretend_capture(monkeypatch):
    """The list of what the backend keeps for a graph."""
    kept = []
    monkeypatch.setattr(triton_backend, "capturing", lambda: True)
    monkeypatch.setattr(triton_backend, "CAPTURED", kept)
    monkeypatch.setattr(step, "capturing", lambda: True)
    monkeypatch.setattr(repeat, "capturing", lambda: True)
    return kept


def test_what_is_made_inside_a_capture_is_kept_and_not_repeated(monkeypatch):
    """A replay reads the tables again; outside the graph they were never filled."""
    kept = pretend_capture(monkeypatch)
    params, optimizer = capturable()
    optimizer.step()
    assert not optimizer._repeats.prepared
    launch, batch, *_ = kept[0]
    assert launch.rows.numel()
    assert [row.param for row in batch.rows] == params
    assert all(row.grad is row.param.grad for row in batch.rows)


def test_a_table_that_a_graph_reads_is_kept(monkeypatch):
    """It was made before the capture, and later steps outside the graph would drop it."""
    _, optimizer = capturable()
    for _ in range(2):
        optimizer.step()
    prepared = optimizer._repeats.prepared[0]
    kept = pretend_capture(monkeypatch)
    optimizer.step()
    tables = [table for one in prepared.launches for _, table in one.tables]
    assert tables
    for table in tables:
        assert any(table is one for _, one in kept)
