"""The methods of the derivation are torch optimizers: groups, schedules, checkpoints."""

import copy
import io
import pickle

import pytest
import torch
from cases import no_change, randn, same_bits
from test_family import NAMED
from torch import nn

from cubegrad import family

each_method = pytest.mark.parametrize("method", NAMED, ids=lambda method: method.__name__)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def build(method, params, **options):
    if method is family.TheoreticalMADGRAD:
        options.setdefault("grad_bound", 10.0)
    return method(params, **options)


def two(dtype=torch.float32):
    return [nn.Parameter(randn(shape, dtype, seed)) for seed, shape in enumerate([(4, 3), ()])]


def feed(params, step):
    for seed, param in enumerate(params):
        param.grad = randn(tuple(param.shape), param.dtype, 10 * step + seed)


def train(optimizer, params, steps, first=0, scheduler=None):
    for step in range(first, first + steps):
        feed(params, step)
        optimizer.step()
        if scheduler:
            scheduler.step()


def train_ones(optimizer, param):
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()


def equal(params, others):
    pairs = zip(params, others, strict=True)
    return all(same_bits(p.detach(), q.detach()) for p, q in pairs)


@each_method
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_saved_and_loaded_run_goes_on_bit_for_bit(method, dtype):
    params, twins = two(dtype), two(dtype)
    optimizer = build(method, params, lr=0.05, weight_decay=0.1)
    train(optimizer, params, 12)
    first = build(method, twins, lr=0.05, weight_decay=0.1)
    train(first, twins, 7)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = build(method, twins, lr=1.0)
    second.load_state_dict(torch.load(file, weights_only=True))
    expected = torch.promote_types(dtype, torch.float32)
    for param in twins:
        buffers = ("grad_sum", "grad_sq_sum", "centre")
        assert {second.state[param][name].dtype for name in buffers} == {expected}
    train(second, twins, 5, first=7)
    assert equal(params, twins)


@each_method
def test_loading_copies(method):
    params, twins = two(), two()
    optimizer, other = build(method, params), build(method, twins)
    train(optimizer, params, 2)
    other.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train(other, twins, 2)
    for key, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(value, before[key][name])


@each_method
def test_pickle_and_deepcopy_go_on_alike(method):
    params = two()
    optimizer = build(method, params)
    train(optimizer, params, 3)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    train(optimizer, params, 2, first=3)
    for other in copies:
        theirs = other.param_groups[0]["params"]
        train(other, theirs, 2, first=3)
        assert equal(params, theirs)


@each_method
def test_gradients_are_never_modified(method):
    params = two()
    optimizer = build(method, params, maximize=True, weight_decay=0.3)
    feed(params, 0)
    with no_change(*[param.grad for param in params]):
        optimizer.step()


@each_method
def test_a_parameter_without_a_gradient_is_skipped_and_starts_late(method):
    early, late = two()
    optimizer = build(method, [early, late], lr=0.1)
    early.grad = torch.ones_like(early)
    with no_change(late):
        optimizer.step()
    assert late not in optimizer.state
    with torch.no_grad():
        late.fill_(3.0)
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert optimizer.state[late]["centre"].item() == 3.0
    assert [optimizer.state[param]["step"].item() for param in (early, late)] == [2, 1]


@each_method
def test_maximize_and_decay_are_changed_gradients(method):
    params, twins = two(torch.float64), two(torch.float64)
    optimizer = build(method, params, lr=0.1, maximize=True, weight_decay=0.3)
    plain = build(method, twins, lr=0.1)
    for step in range(5):
        feed(params, step)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = -param.grad + 0.3 * twin.detach()
        optimizer.step()
        plain.step()
    assert equal(params, twins)


@each_method
def test_groups_have_their_own_options_and_follow_a_schedule(method):
    (a, b), (c, d) = two(), two()
    both = build(method, [{"params": [a]}, {"params": [b], "lr": 0.3, "eps": 0.1}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(both, step_size=2, gamma=0.1)
    train(both, [a, b], 5, scheduler=scheduler)
    apart = [build(method, [c], lr=0.1), build(method, [d], lr=0.3, eps=0.1)]
    for step in range(5):
        feed([c, d], step)
        for optimizer in apart:
            optimizer.step()
        if step % 2:
            for optimizer in apart:
                optimizer.param_groups[0]["lr"] *= 0.1
    assert equal([a, b], [c, d])


def test_a_learning_rate_may_be_a_tensor():
    params, twins = two(), two()
    train(family.MADGRAD(params, lr=torch.tensor(0.125)), params, 3)
    train(family.MADGRAD(twins, lr=0.125), twins, 3)
    assert equal(params, twins)


@each_method
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(method):
    param = nn.Parameter(torch.ones(3))
    optimizer = build(method, [param], lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()
    assert optimizer.step() is None


def test_hooks_around_loading_are_called():
    params = two()
    optimizer = family.MADGRAD(params)
    train(optimizer, params, 1)
    seen = []

    def halved(_, state_dict):
        seen.append("before")
        group = state_dict["param_groups"][0] | {"lr": 0.5}
        return state_dict | {"param_groups": [group]}

    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5


@each_method
def test_zero_gradients_and_zero_rates_move_nothing(method):
    """With ε = 0 most denominators are 0 here: a coordinate without a gradient stays."""
    params = two()
    optimizer = build(method, params, lr=0.1, eps=0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
    with no_change(*params):
        optimizer.step()
    idle = build(method, params, lr=0.0, eps=0.0)
    feed(params, 0)
    with no_change(*params):
        idle.step()


@each_method
@pytest.mark.parametrize("device", ["meta", *(["cuda"] if torch.cuda.is_available() else [])])
def test_state_and_steps_stay_on_the_parameters_device(method, device):
    """A meta tensor has no values, so the step reads none; only its count is on the host."""
    param = nn.Parameter(torch.ones(3, device=device))
    optimizer = build(method, [param], lr=0.1)
    train_ones(optimizer, param)
    places = {name: value.device.type for name, value in optimizer.state[param].items()}
    host = {"step": "cpu", "weight_sum": "cpu"}
    assert places == host | dict.fromkeys(("grad_sum", "grad_sq_sum", "centre"), device)
    if device == "cuda":
        twin = nn.Parameter(torch.ones(3))
        train_ones(build(method, [twin], lr=0.1), twin)
        torch.testing.assert_close(param.detach().cpu(), twin.detach())


def test_the_bound_may_be_one_per_coordinate():
    params = two(torch.bfloat16)
    bounds = [torch.full((4, 3), 2.0), torch.tensor(2.0)]
    groups = [{"params": [p], "grad_bound": g} for p, g in zip(params, bounds, strict=True)]
    train(family.TheoreticalMADGRAD(groups, grad_bound=1.0), params, 3)
    twins = two(torch.bfloat16)
    train(family.TheoreticalMADGRAD(twins, grad_bound=2.0), twins, 3)
    assert equal(params, twins)


def test_a_wrapper_may_write_into_the_state_before_the_first_step():
    params, twins = two(), two()
    optimizer, plain = family.MADGRAD(params), family.MADGRAD(twins)
    optimizer.state[params[0]]["ema"] = torch.ones(4, 3)
    train(optimizer, params, 2)
    train(plain, twins, 2)
    assert equal(params, twins)
    assert torch.equal(optimizer.state[params[0]]["ema"], torch.ones(4, 3))
