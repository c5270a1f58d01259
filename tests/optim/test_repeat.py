"""Steps that are prepared once: every change that stale addresses would get wrong is seen."""

import copy
import pickle

import cases
import pytest
import torch
from cases import BACKENDS

from cubegrad.optim import repeat, step
from cubegrad.optim.watched import Journal, Watched

triton_backend = pytest.importorskip("cubegrad.backends.triton.launch")

FUSED = next(backend for backend in BACKENDS if backend.name == "triton")
EAGER = next(backend for backend in BACKENDS if backend.name.startswith("eager"))
DEVICE = FUSED.device


def params_of(shapes):
    shapes = enumerate(shapes)
    return [cases.parameter(cases.randn(s, torch.float32, i), DEVICE) for i, s in shapes]


class Twins:
    """The same parameters stepped by the fused and by the eager backend."""

    def __init__(self, *shapes, **options):
        self.sides = [params_of(shapes), params_of(shapes)]
        self.optimizers = [
            cases.build(cases.MADGRAD, backend, params, options)
            for backend, params in zip((FUSED, EAGER), self.sides, strict=True)
        ]
        self.k = 0

    def step(self, arrange=lambda *_: None):
        self.k += 1
        for params, optimizer in zip(self.sides, self.optimizers, strict=True):
            for i, param in enumerate(params):
                param.grad = cases.randn(param.shape, param.dtype, 99 * self.k + i).to(DEVICE)
            arrange(params, optimizer)
            optimizer.step()
        for p, q in zip(*self.sides, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            for name, tensor in self.optimizers[1].state[q].items():
                mine = self.optimizers[0].state[p][name]
                torch.testing.assert_close(mine, tensor, rtol=1e-5, atol=1e-6, check_device=False)

    def ready(self):
        return len(self.optimizers[0]._repeats.prepared)


def test_a_repeated_step_is_prepared_and_follows_every_change():
    """Each change is one that stale addresses would get wrong."""
    twins = Twins((8, 8), (30,), (5, 5))
    twins.step()
    twins.step()
    assert twins.ready() == 1

    twins.step(lambda params, _: setattr(params[0], "grad", params[0].grad.T))  # other strides
    twins.step(lambda params, _: setattr(params[1], "grad", None))
    twins.step()

    def move_weights(params, _):
        params[1].data = params[1].data * 0.5  # other addresses

    twins.step(move_weights)
    twins.step()

    def replace_buffer(params, optimizer):
        state = optimizer.state[params[2]]
        state["grad_sum"] = state["grad_sum"] * 2

    twins.step(replace_buffer)
    twins.step()

    def move_state(_, optimizer):
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.data = tensor.data.clone()

    twins.step(move_state)
    twins.step()
    twins.step(lambda _, optimizer: optimizer.param_groups[0].update(foreach=False))
    twins.step()
    twins.step(lambda params, optimizer: optimizer.state.pop(params[0]))  # a fresh start
    twins.step()
    twins.step(lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()))
    twins.step()
    for momentum in (0.0, 0.0, 0.5, 0.9):
        twins.step(lambda _, o, m=momentum: o.param_groups[0].update(momentum=m))
    assert twins.ready() == 1


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
def test_a_watched_state_notes_every_way_to_change_it(change):
    journal = Journal()
    watched = Watched({"a": torch.zeros(1)}, [], journal)
    assert watched["a"] == 0
    assert type(copy.deepcopy(watched)) is dict
    assert type(pickle.loads(pickle.dumps(watched))) is dict
    assert not journal.changed
    change(watched)
    assert journal.changed


def test_a_skipped_step_loses_nothing_when_momentum_is_switched_off():
    """x has not become z, so x_0 must stay until a step succeeds."""
    twins = Twins((5,), lr=0.1)
    for _ in range(3):
        twins.step()
    for optimizer in twins.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.0
    (param,), fused = twins.sides[0], twins.optimizers[0]
    param.grad = torch.full_like(param, float("inf"))
    fused.found_inf = torch.tensor(1.0, device=DEVICE)
    with cases.no_change(param):
        fused.step()
    del fused.found_inf
    twins.step()
    twins.step()
    assert "initial_param" not in fused.state[param]


def test_what_is_made_inside_a_capture_is_kept_and_not_repeated(monkeypatch):
    """A graph's replay reads the tables again; outside it they were never filled."""
    kept = []
    monkeypatch.setattr(triton_backend, "capturing", lambda: True)
    monkeypatch.setattr(triton_backend, "CAPTURED", kept)
    monkeypatch.setattr(step, "capturing", lambda: True)
    monkeypatch.setattr(repeat, "capturing", lambda: True)
    params = params_of([(5,), (3, 4)])
    optimizer = cases.build(cases.MADGRAD, FUSED, params, {"capturable": True})
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not optimizer._repeats.prepared
    launch, batch, *_ = kept[0]
    assert launch.rows.numel()
    assert [row.param for row in batch.rows] == params
    assert all(row.grad is row.param.grad for row in batch.rows)


def test_a_table_that_a_graph_reads_is_kept(monkeypatch):
    """Made before the capture, and dropped later by the steps that go on without the graph."""
    params = params_of([(5,), (3, 4)])
    optimizer = cases.build(cases.MADGRAD, FUSED, params, {"capturable": True})
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
    prepared = optimizer._repeats.prepared[0]
    kept = []
    monkeypatch.setattr(triton_backend, "capturing", lambda: True)
    monkeypatch.setattr(triton_backend, "CAPTURED", kept)
    monkeypatch.setattr(step, "capturing", lambda: True)
    monkeypatch.setattr(repeat, "capturing", lambda: True)
    optimizer.step()
    tables = [table for part in prepared.parts for _, table in part.tables]
    assert tables
    for table in tables:
        assert any(table is one for _, one in kept)
