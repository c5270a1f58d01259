"""It behaves as torch.optim.Adam would: groups, hooks, closures, schedulers, AMP, clipping."""

import copy
import importlib.metadata
import pickle

import cases
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import cubegrad
from cubegrad import MADGRAD, MirrorMADGRAD
from cubegrad.backends import foreach

# torch 2.11's profiler says so once in a process, whatever is profiled.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")

each_class = pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD])


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(net, optimizer, steps=5, scheduler=None, after_backward=None):
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(16, 6, generator=generator)).square().mean().backward()
        if after_backward:
            after_backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@each_class
def test_param_groups_have_their_own_options(cls):
    net, reference = model(), model()
    groups = [
        {"params": net[0].parameters(), "lr": 0.0},
        {"params": net[2].parameters(), "momentum": 0.5, "weight_decay": 0.1},
    ]
    optimizer = cls(groups, lr=0.1)
    assert [g["lr"] for g in optimizer.param_groups] == [0.0, 0.1]
    assert [g["momentum"] for g in optimizer.param_groups] == [0.9, 0.5]
    train(net, optimizer)
    assert equal(net[0], reference[0])
    assert not equal(net[2], reference[2])


@each_class
def test_named_parameters(cls):
    net = model()
    optimizer = cls(net.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == [n for n, _ in net.named_parameters()]
    train(net, optimizer)
    other = cls(net.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == optimizer.param_groups[0]["param_names"]


@each_class
def test_closure_runs_with_gradients_enabled_and_its_loss_is_returned(cls):
    param = nn.Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()
    assert optimizer.step() is None


@each_class
def test_step_hooks_are_called_around_the_step(cls):
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = cls([param], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(param[0].item()))
    optimizer.register_step_post_hook(lambda *_: seen.append(param[0].item()))
    optimizer.step()
    assert seen[0] == 1.0
    assert seen[1] < 1.0


@each_class
def test_a_profiler_sees_the_step_as_it_sees_torchs(cls):
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = cls([param])
    optimizer.step()
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert f"Optimizer.step#{cls.__name__}.step" in {event.name for event in profile.events()}


def test_global_step_hooks_are_called():
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = MADGRAD([param])
    seen = []
    handle = register_optimizer_step_post_hook(lambda o, *_: seen.append(o))
    try:
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert seen == [optimizer]


@each_class
def test_pickle_and_deepcopy_go_on_bit_for_bit(cls):
    net = model()
    optimizer = cls(net.parameters(), lr=0.1)
    train(net, optimizer)
    for twice in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        net_copy, optimizer_copy = twice((net, optimizer))
        reference, optimizer_reference = copy.deepcopy((net, optimizer))
        train(net_copy, optimizer_copy)
        train(reference, optimizer_reference)
        assert equal(net_copy, reference)
        assert not equal(net_copy, net)


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: k / 4),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, total_iters=4),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
@each_class
def test_schedulers_drive_lr_and_momentum(cls, name, tensor_lr):
    """The same numbers set by hand give the same run."""
    net, by_hand = model(), model()
    optimizer = cls(net.parameters(), lr=torch.tensor(0.1) if tensor_lr else 0.1)
    manual = cls(by_hand.parameters(), lr=0.1)
    scheduler = SCHEDULERS[name](optimizer)
    seen = set()
    for k in range(8):
        group = optimizer.param_groups[0]
        seen.add((float(group["lr"]), float(group["momentum"])))
        manual.param_groups[0].update(lr=float(group["lr"]), momentum=float(group["momentum"]))
        for p, q in zip(net.parameters(), by_hand.parameters(), strict=True):
            p.grad = cases.randn(tuple(p.shape), p.dtype, k)
            q.grad = p.grad.clone()
        optimizer.step()
        manual.step()
        scheduler.step()
    assert equal(net, by_hand)
    assert len({lr for lr, _ in seen}) > 2
    assert (len({momentum for _, momentum in seen}) > 2) == (name == "onecycle")


def test_a_scheduler_stepped_too_early_still_warns():
    optimizer = MADGRAD(model().parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@each_class
def test_grad_scaler_skips_an_overflow_whole(cls):
    param = nn.Parameter(torch.ones(3))
    optimizer = cls([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k in range(3):
        optimizer.zero_grad()
        factor = float("inf") if k == 1 else 1.0
        scaler.scale((param * factor).sum()).backward()
        state = {name: t.clone() for name, t in optimizer.state[param].items()}
        before = param.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        if k == 1:
            assert torch.equal(param, before)
            assert all(torch.equal(state[n], t) for n, t in optimizer.state[param].items())
    assert optimizer.state[param]["step"] == 2
    reference = nn.Parameter(torch.ones(3))
    plain = cls([reference], lr=0.1)
    for _ in range(2):
        reference.grad = torch.ones(3)
        plain.step()
    assert torch.equal(param, reference)


@each_class
def test_clip_grad_norm_and_zero_grad(cls):
    net = model()
    optimizer = cls(net.parameters(), lr=0.1)
    norms = []

    def clip():
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        norms.append(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item())

    train(net, optimizer, after_backward=clip)
    assert max(norms) <= 1.001e-3
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


@each_class
def test_it_learns(cls):
    net = model()
    optimizer = cls(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 6, generator=generator)
    labels = (inputs[:, :3] + inputs[:, 3:]).argmax(1)
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
    assert (net(inputs).argmax(1) == labels).float().mean() > 0.95


@pytest.mark.parametrize("slice_bytes", [2**17, 2**60], ids=["cpu", "as-on-a-gpu"])
@each_class
def test_foreach_peak_is_at_most_one_copy_of_the_parameters(cls, slice_bytes, monkeypatch):
    monkeypatch.setattr(foreach, "CPU_SLICE_BYTES", slice_bytes)
    decoupled = {"weight_decay": 0.1, "decoupled_weight_decay": True}
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"momentum": 0.0}, {"weight_decay": 0.1}, decoupled):
            params = [nn.Parameter(torch.randn(n, 300).to(dtype)) for n in (1000, 10, 3000, 1)]
            optimizer = cls(params, foreach=True, **options)
            for param in params:
                param.grad = torch.randn(param.shape).to(dtype)
            optimizer.step()
            size = sum(p.numel() * p.element_size() for p in params)
            peak = peak_of(optimizer.step)
            assert (0.2 if slice_bytes == 2**60 else 0.01) * size < peak <= size


def peak_of(function):
    """The most bytes of CPU memory alive at once above the level before the call."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak


def test_the_version_is_the_distributions():
    try:
        installed = importlib.metadata.version("cubegrad")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("this checkout is not installed")
    assert installed == cubegrad.__version__
