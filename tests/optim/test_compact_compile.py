"""compact=True under torch.compile: a traced step gives the codes of an eager one."""

import pytest
import torch
from cases import each_class
from compact_runs import SHAPES, build, noisy_grads
from short_runs import parameters
from torch._dynamo.testing import CompileCounter

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD

CLASSES = [MADGRAD, MADGRADW, pytest.param(MirrorMADGRAD, marks=pytest.mark.thorough)]

pytestmark = [
    pytest.mark.compilation,
    pytest.mark.filterwarnings("ignore:Profiler record function"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def two_runs(cls, dtype=torch.float32, shapes=SHAPES, **options):
    runs = []
    for _ in range(2):
        params = parameters(shapes, dtype)
        own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        runs.append((params, build(cls, params, **own)))
    return runs


def assert_close(compiled, plain):
    """A fused multiply-add may round another way, so that a code is the next one, rarely."""
    (params, optimizer), (others, other) = compiled, plain
    for p, q in zip(params, others, strict=True):
        state, own = optimizer.state[p], other.state[q]
        assert set(state) == set(own)
        for name in (name for name in own if name.endswith("_code")):
            apart = (state[name].float() - own[name].float()).abs()
            # bfloat16 and float16 weights that are rounded the other way
            assert (apart > 0).float().mean() < 2e-3
        for name in {"grad_sum", "grad_sq_sum", "initial_param", "z", "dual_offset"} & set(own):
            torch.testing.assert_close(state[name], own[name], rtol=1e-4, atol=1e-5)
        way = torch.finfo(p.dtype).eps * 4 + 1e-5
        off = (p - q).abs() > way * (1 + q.abs())
        assert off.float().mean() < 2e-3
        assert state["step"] == own["step"]


@pytest.mark.parametrize(
    ("cls", "dtype", "momentum"),
    [
        (MADGRAD, torch.float32, 0.9),
        (MADGRAD, torch.bfloat16, 0.0),
        (MADGRADW, torch.float32, 0.9),
        pytest.param(MirrorMADGRAD, torch.float32, 0.9, marks=pytest.mark.thorough),
    ],
)
def test_a_traced_step_has_the_codes_of_an_eager_one(cls, dtype, momentum):
    """With one parameter: the compiler takes ten seconds for each."""
    options = {"lr": torch.tensor(0.05), "momentum": momentum}
    compiled, plain = two_runs(cls, dtype, SHAPES[1:2], **options)
    step = torch.compile(compiled[1].step, fullgraph=True)
    for k in range(4):
        for params, _ in (compiled, plain):
            noisy_grads(plain[0], k)
            for p, q in zip(params, plain[0], strict=True):
                p.grad = q.grad.clone()
        step()
        plain[1].step()
    assert_close(compiled, plain)


@pytest.mark.parametrize("cls", CLASSES)
def test_recompilations_are_bounded(cls):
    compiled, plain = two_runs(cls, lr=0.05, weight_decay=0.01)
    counter = CompileCounter()
    step = torch.compile(compiled[1].step, fullgraph=True, backend=counter)
    counts = []
    for k in range(10):
        for params, optimizer in (compiled, plain):
            noisy_grads(params, k)
            optimizer.param_groups[0]["lr"] = 0.05 / (k + 1)
        step()
        plain[1].step()
        counts.append(counter.frame_count)
    assert 1 <= counts[2] == counts[-1]
    assert_close(compiled, plain)


DECAY = {"weight_decay": 0.1, "decoupled_weight_decay": True}


@pytest.mark.parametrize(
    ("cls", "decay", "scaler"),
    [
        (MADGRAD, DECAY, False),
        (MADGRAD, {"weight_decay": 0.1, "decoupled_lr": True}, True),
        (MirrorMADGRAD, {}, False),
        (MADGRADW, {}, True),
        pytest.param(MirrorMADGRAD, {}, True, marks=pytest.mark.thorough),
    ],
)
def test_a_traced_step_updates_the_state_that_the_optimizer_holds(cls, decay, scaler):
    """The first step's weight is unknown, so its x_0 is read again: by the trace, and once only."""
    lr = 0.05 if scaler else torch.tensor(0.05)
    compiled, plain = two_runs(cls, lr=lr, momentum=0.9, **decay)
    step = torch.compile(compiled[1].step, backend="eager")
    for k in range(8):
        for params, optimizer in (compiled, plain):
            noisy_grads(params, k)
            if scaler:
                optimizer.found_inf = torch.zeros(())
            if k == 5:
                optimizer.param_groups[0]["momentum"] = 0.8  # traced anew
            if k == 6:
                params[-1].grad = None
        step()
        plain[1].step()
        assert_close(compiled, plain)


@pytest.mark.parametrize("cls", CLASSES)
def test_momentum_and_form_switched_between_traced_steps(cls):
    """A parameter that comes late keeps the same buffers as the others do then."""
    compiled, plain = two_runs(cls, lr=0.05)
    step = torch.compile(compiled[1].step, backend="eager")
    plans = [(0.9, True), (0.0, True), (0.0, True), (0.0, False), (0.0, True), (0.9, True)]
    for k, (momentum, compact) in enumerate(plans):
        for params, optimizer in (compiled, plain):
            noisy_grads(params, k)
            if k < 2:
                params[1].grad = None
            group = optimizer.param_groups[0]
            group["momentum"], group["compact"] = momentum, compact
        step()
        plain[1].step()
    assert_close(compiled, plain)


def test_an_estimated_rate_counts_idle_codes_once_traced():
    compiled, plain = two_runs(MADGRAD, lr="auto")
    step = torch.compile(compiled[1].step, backend="eager")
    for k in range(8):
        for params, _ in (compiled, plain):
            noisy_grads(params, k)
            if k in (3, 4):
                params[1].grad = None  # with rows that are filled up to whole blocks
        step()
        plain[1].step()
        assert compiled[1].estimated_lr() == pytest.approx(plain[1].estimated_lr(), rel=1e-3)


@pytest.mark.parametrize("compact", [True, False])
@each_class
def test_codes_that_are_switched_in_two_groups(cls, compact):
    """The compiler takes note of the buffers of both when it asks for the first one's."""
    runs = []
    for _ in range(2):
        params = parameters([(64, 64), (70, 64)])
        optimizer = cls([{"params": [param]} for param in params], compact=not compact)
        runs.append((params, optimizer))
    steps = torch.compile(runs[0][1].step, fullgraph=True, backend="eager"), runs[1][1].step
    for k in range(3):
        for (params, optimizer), step in zip(runs, steps, strict=True):
            for group in optimizer.param_groups:
                group["compact"] = compact if k else not compact
            noisy_grads(params, k)
            step()
    assert_close(*runs)
    for entries in runs[0][1].state.values():
        assert ("root_code" in entries) == compact
