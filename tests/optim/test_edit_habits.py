"""Edited weights in what users do: groups, exceptions, gradient release, what is refused."""

import copy
import pickle

import cases
import edits
import pytest
import torch
from edits import FORMS, build, dual_point
from short_runs import advance, cloned, ones, parameters, peak_of, same_bits
from torch import nn

from cubegrad import MADGRAD

# torch 2.11's profiler warns so once in each process.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")


def test_several_groups_and_parameters_without_state():
    params = parameters([(5, 7)] * 4)
    optimizer = MADGRAD([{"params": params[:2]}, {"params": params[2:], "momentum": 0.5}], lr=0.1)
    advance(optimizer, [params[0], params[2]], range(3))
    before = [dual_point(optimizer, p) for p in (params[0], params[2])]
    with optimizer.edit_weights():
        for param in params:
            param.add_(1)
        new = ones(3)
        optimizer.add_param_group({"params": [new]})
        new.add_(1)
    for param, z in zip((params[0], params[2]), before, strict=True):
        torch.testing.assert_close(dual_point(optimizer, param), z + 1, rtol=0, atol=1e-6)
    assert params[1] not in optimizer.state
    advance(optimizer, [*params, new], range(3, 6))


def test_an_edit_before_the_first_step_with_a_weight():
    """As torch.distributed.checkpoint makes one, to have the state allocated."""
    runs = []
    for edited in (True, False):
        (param,) = parameters([(5, 7)])
        optimizer = MADGRAD([param], lr=0.0)
        if edited:
            advance(optimizer, [param], range(1))
        with optimizer.edit_weights():
            param.mul_(1.1)
        optimizer.state.get(param, {}).get("step", torch.zeros(())).zero_()
        optimizer.param_groups[0]["lr"] = 0.1
        advance(optimizer, [param], range(1, 4))
        runs.append(param)
    assert same_bits([runs[0]], [runs[1]])


@pytest.mark.parametrize("lr", [0.1, "auto"])
def test_with_gradient_release(lr):
    runs = []
    for released in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
        optimizer = MADGRAD(net.parameters(), lr=lr)
        if released:
            optimizer.release_gradients()
        for k in range(6):
            net(cases.randn((8, 300), torch.float32, k)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with optimizer.edit_weights():
                for param in net.parameters():
                    param.clamp_(-0.05, 0.05)
        runs.append(list(net.parameters()))
    for released, plain in zip(*runs, strict=True):  # lr="auto" adds up in another order
        torch.testing.assert_close(released, plain, rtol=1e-5, atol=1e-6)


def test_after_an_exception_the_state_follows_the_weights_as_they_are():
    params = parameters([(5, 7), (3,)])
    optimizer = advance(MADGRAD(params, lr=0.1), params, range(3))
    before = [dual_point(optimizer, param) for param in params]

    def edit():
        with optimizer.edit_weights():
            params[0].add_(1)
            raise KeyError

    with pytest.raises(KeyError):
        edit()
    assert torch.is_grad_enabled()
    torch.testing.assert_close(dual_point(optimizer, params[0]), before[0] + 1, rtol=0, atol=1e-6)
    assert torch.equal(dual_point(optimizer, params[1]), before[1])
    advance(optimizer, params, range(3, 5))


def test_one_context_inside_another():
    (param,) = parameters([(5, 7)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(3))
    before = dual_point(optimizer, param)
    with optimizer.edit_weights():
        param.add_(1)
        with torch.enable_grad(), optimizer.edit_weights():
            param.add_(1)
    torch.testing.assert_close(dual_point(optimizer, param), before + 2, rtol=0, atol=1e-6)


def test_weights_whose_memory_is_replaced():
    (param,) = parameters([(5, 7)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(3))
    before, x = dual_point(optimizer, param), param.detach().clone()
    with optimizer.edit_weights():
        param.data = torch.ones(5, 7)
    torch.testing.assert_close(dual_point(optimizer, param) - before, 1.0 - x.double())


def test_what_is_refused_inside():
    (param,) = parameters([(300, 300)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(3))
    saved = optimizer.state_dict()
    calls = {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "restart": optimizer.restart,
    }
    for name, call in calls.items():
        with optimizer.edit_weights(), pytest.raises(RuntimeError, match=rf"{name}\(\) inside"):
            call()
    for copied in (copy.deepcopy, pickle.dumps):
        with optimizer.edit_weights(), pytest.raises(RuntimeError, match="a copy or a pickle ins"):
            copied(optimizer)
    handle = optimizer.release_gradients()
    with optimizer.edit_weights(), torch.enable_grad():
        with pytest.raises(RuntimeError, match=r"backward\(\) with release_gradients\(\) inside"):
            param.square().sum().backward()
        param.grad = None
    param.square().sum().backward()
    with pytest.raises(
        RuntimeError, match=r"edit_weights\(\) comes between .* call step\(\) first"
    ):
        optimizer.edit_weights().__enter__()
    optimizer.step()
    with optimizer.edit_weights():
        param.mul_(0.5)
    handle.remove()
    advance(optimizer, [param], range(3, 5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_weights_that_were_not_finite_between_two_edits(form, momentum, bad):
    """Such as of a norm of 0 that was divided by: x_0 stayed NaN after they were mended."""
    (param,) = parameters([edits.SHAPE])
    optimizer = advance(build(form, [param]), [param], range(3))
    before, x = dual_point(optimizer, param), param.detach().clone()
    for value in (bad, x[3, 5].item()):
        with optimizer.edit_weights(keep_momentum=momentum):
            param[3, 5] = value
    changed = dual_point(optimizer, param) != before
    changed[3, 5] = False
    assert not changed.any()
    advance(optimizer, [param], range(3, 6))
    assert param.isfinite().all()
    assert (param - x).abs()[3, 5] < 0.1


def test_codes_of_a_parameter_that_has_another_dtype_now():
    """They cannot follow, and cannot be loaded either, so the remedy is to start over."""
    (param,) = parameters([edits.SHAPE])
    optimizer = advance(build("codes", [param]), [param], range(3))
    with optimizer.edit_weights():
        param.data = param.data.bfloat16()
    param.grad = torch.ones_like(param)
    with cases.no_change(param), pytest.raises(ValueError, match=r"dtype .*, call restart\(\) or"):
        optimizer.step()
    optimizer.restart()
    optimizer.step()


def test_parameters_that_have_no_shape_yet():
    lazy, (param,) = nn.LazyLinear(3), parameters([(5, 7)])
    optimizer = advance(MADGRAD([param, *lazy.parameters()], lr=0.1), [param], range(3))
    with optimizer.edit_weights():
        param.add_(1)
    optimizer.restart()


def test_it_takes_no_parameters():
    """As restart() does: they would be taken for keep_momentum."""
    (param,) = parameters([(5, 7)])
    with pytest.raises(TypeError, match="positional"):
        MADGRAD([param]).edit_weights([param])


def test_an_edit_keeps_the_shape():
    (param,) = parameters([(5, 7)])
    optimizer = advance(MADGRAD([param], lr=0.1), [param], range(3))

    def edit():
        with optimizer.edit_weights():
            param.data = torch.ones(3)

    with pytest.raises(RuntimeError, match=r"params\[0\] had shape \(5, 7\) .*has \(3,\) now"):
        edit()


@pytest.mark.parametrize("form", ["sums", "codes"])
def test_memory(form):
    """A copy of the weights inside, a bounded number of temporaries at the end, none outside."""
    param = nn.Parameter(torch.randn(4096, 2048))
    optimizer = build(form, [param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    kept = sum(t.numel() * t.element_size() for t in optimizer.state[param].values())

    def edit():
        with optimizer.edit_weights():
            param.mul_(0.5)

    weights = param.numel() * 4
    assert peak_of(edit) < 3 * weights  # 1.9 and 2.6
    assert sum(t.numel() * t.element_size() for t in optimizer.state[param].values()) == kept


@pytest.mark.parametrize("form", FORMS)
def test_the_state_stays_in_its_place_for_a_captured_graph(form):
    (param,) = parameters([edits.SHAPE])
    optimizer = build(form, [param], lr=torch.tensor(0.1), capturable=True)
    advance(optimizer, [param], range(3))
    places = {name: tensor.data_ptr() for name, tensor in optimizer.state[param].items()}
    for momentum in (True, False):
        with optimizer.edit_weights(keep_momentum=momentum):
            param.mul_(0.5)
    optimizer.restart()
    assert places == {name: t.data_ptr() for name, t in optimizer.state[param].items()}
    fresh = build(form, cloned([param]), lr=torch.tensor(0.1), capturable=True)
    other = fresh.param_groups[0]["params"]
    advance(optimizer, [param], range(3, 6))
    advance(fresh, other, range(3, 6))
    assert same_bits([param], other)
