"""The methods of the derivation are torch optimizers: groups, schedules, checkpoints, errors."""

import copy
import io
import pickle
import re

import pytest
import torch
from cases import no_change, randn, same_bits
from test_family import NAMED
from torch import nn

from cubegrad import family

each_method = pytest.mark.parametrize("method", NAMED, ids=lambda method: method.__name__)
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


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


def test_the_bound_may_be_one_per_coordinate():
    params = two(torch.bfloat16)
    bounds = [torch.full((4, 3), 2.0), torch.tensor(2.0)]
    groups = [{"params": [p], "grad_bound": g} for p, g in zip(params, bounds, strict=True)]
    train(family.TheoreticalMADGRAD(groups, grad_bound=1.0), params, 3)
    twins = two(torch.bfloat16)
    train(family.TheoreticalMADGRAD(twins, grad_bound=2.0), twins, 3)
    assert equal(params, twins)


BAD = [
    ({"lr": -1.0}, "lr=-1.0 must be finite and >= 0; each method has its own scale"),
    ({"lr": "x"}, "lr='x' (str) must be one number"),
    ({"momentum": 1.0}, "momentum=1.0 must be in [0, 1); use 0.9, or averaging='none'"),
    ({"power": NAN}, "power=nan must be finite and >= 0; use 0.5"),
    ({"r": 1.5}, "r=1.5 must be in [0, 1]; use the power of the weights"),
    ({"j": -1.0}, "j=-1.0 must be finite and >= 0; use 1"),
    ({"eps": -1e-6}, "eps=-1e-06 must be finite"),
    ({"weight_decay": float("inf")}, "weight_decay=inf must be finite and >= 0; use 0"),
    ({"weights": "two"}, "weights='two' must be one of 'one', 'lr', 'power'"),
    ({"denominator": "root"}, "denominator='root' must be one of 'one', 'sqrt_step'"),
    ({"averaging": "some"}, "averaging='some' must be one of 'none', 'constant'"),
    ({"centre": "x1"}, "centre='x1' must be one of 'x0', 'origin'"),
    ({"weights": "one", "lr": 0.5}, "lr=0.5 must be 1 with weights='one'"),
    ({"denominator": "theory"}, "grad_bound=None must be a number or one per coordinate"),
    ({"grad_bound": -1.0}, "grad_bound=-1.0 must be finite and >= 0"),
    ({"grad_bound": torch.ones(2)}, "grad_bound has shape (2,), params[0] has (3,); pass one"),
    ({"betas": (0.9, 0.99)}, "unknown options ['betas']; a method takes lr, weights, power"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(list(o)) for o, _ in BAD])
def test_bad_options_are_refused_with_the_remedy(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        family.DualAveraging([nn.Parameter(torch.ones(3))], **options)


def test_a_bad_group_is_not_added_and_a_bad_rate_moves_nothing():
    param = nn.Parameter(torch.ones(3))
    optimizer = family.DA([param])
    with pytest.raises(ValueError, match="lr=-1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    param.grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = NAN
    with no_change(param), pytest.raises(ValueError, match="lr=nan"):
        optimizer.step()
    assert not optimizer.state


def test_complex_and_sparse_are_refused_before_anything_changes():
    with pytest.raises(TypeError, match=r"params\[0\] has dtype torch.complex64.*cubegrad.MADGRAD"):
        family.DA([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    dense, rows = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    optimizer = family.MADGRAD([dense, rows])
    dense.grad, rows.grad = torch.ones(2), torch.ones(2, 2).to_sparse()
    with no_change(dense), pytest.raises(RuntimeError, match=r"params\[1\].*sparse.*to_dense"):
        optimizer.step()
    assert not optimizer.state


def changed(change):
    params = two()
    optimizer = family.MADGRAD(params)
    train(optimizer, params, 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    change(state_dict)
    return state_dict


REFUSED = {
    "another method": (
        lambda d: d["param_groups"][0].update(denominator="sqrt_step"),
        "denominator='sqrt_step', the optimizer 'cube_root'; build it with",
    ),
    "fewer parameters": (
        lambda d: d["param_groups"][0].update(params=[0]),
        r"param groups of \[1\] parameters, the optimizer \[2\]",
    ),
    "a bad option": (lambda d: d["param_groups"][0].update(lr=NAN), "lr=nan"),
    "a missing buffer": (lambda d: d["state"][1].pop("centre"), "parameter 1 is .*it must be"),
    "another shape": (
        lambda d: d["state"][0].update(grad_sum=torch.ones(5)),
        r"grad_sum of parameter 0 has shape \(5,\), its parameter \(4, 3\)",
    ),
    "no state": (lambda d: d.pop("state"), r"has \['param_groups'\]; it must have 'state'"),
    "nobody's state": (lambda d: d["state"].update(x={}), r"has state for \['x'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_dict_that_does_not_fit_changes_nothing(name):
    change, message = REFUSED[name]
    params = two()
    optimizer = family.MADGRAD(params, lr=0.5)
    train(optimizer, params, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(changed(change))
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, values in before["state"].items():
        assert all(torch.equal(values[name], after["state"][key][name]) for name in values)
