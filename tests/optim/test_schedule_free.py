"""MADGRADW(schedule_free=True): gradients are taken at y, and the mean of all z is the result."""

import copy
import io
import pickle
import warnings

import cases
import numpy as np
import oracle
import pytest
import torch
from cases import SCHEDULE_FREE, ScheduleFreeMADGRADW, each_fast_backend
from short_runs import cloned, parameters, set_grads

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD

SHAPES = [(3, 2), (64, 80)]  # one of them is large enough for codes
BASE = {"lr": 1e-2, "weight_decay": 0.1}


def rate(k):
    """A warm-up from 0, a plateau, a higher one and a fall."""
    return min(1.0, k / 3) * (2.0 if 10 < k < 15 else 1.0) * 1e-2


def run(optimizer, params, steps, first=0, rates=rate):
    for k in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = rates(k)
        set_grads(params, k)
        optimizer.step()


def mean_of(optimizer):
    """Copies of the parameters as they are evaluated."""
    with optimizer.averaged():
        return [
            param.detach().clone() for group in optimizer.param_groups for param in group["params"]
        ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64], ids=str)
@each_fast_backend
def test_eval_gives_the_mean_of_all_z(backend, dtype):
    """The oracle keeps it, and z, where the optimizer finds both from y and z - y."""
    params = parameters([(3, 2), ()], dtype, backend.device)
    references = [oracle.ScheduleFree(cases.numbers(param)) for param in params]
    optimizer = cases.build(SCHEDULE_FREE, backend, params, {"weight_decay": 0.1})
    for k in range(60):
        optimizer.param_groups[0]["lr"] = rate(k)
        set_grads(params, k)
        for param, reference in zip(params, references, strict=True):
            o = cases.settings({"weight_decay": 0.1}, rate(k))
            reference.step(cases.numbers(param.grad), o)
        optimizer.step()
    limit = 1e-12 if dtype == torch.float64 else 3e-6
    for mean, param, reference in zip(mean_of(optimizer), params, references, strict=True):
        np.testing.assert_allclose(cases.numbers(mean), reference.mean, rtol=0, atol=limit)
        np.testing.assert_allclose(cases.numbers(param), reference.x, rtol=0, atol=limit)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_fast_backend
def test_eval_and_train_lead_back(backend, dtype, compact):
    """z stays where it is, and y comes back within a place or two of the parameter's dtype."""
    params = parameters(SHAPES, dtype, backend.device)
    optimizer = cases.build(SCHEDULE_FREE, backend, params, BASE | {"compact": compact})
    run(optimizer, params, 8)
    before = cloned(params)
    optimizer.train()  # it is in training
    assert all(map(torch.equal, params, before))
    optimizer.eval()
    mean = cloned(params)
    optimizer.eval()
    assert all(map(torch.equal, params, mean))
    assert not torch.equal(params[1], before[1])
    optimizer.train()
    places = 3 * torch.finfo(dtype).eps
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old.detach(), rtol=places, atol=places)
    for _ in range(20):  # nor does it wander
        with optimizer.averaged():
            pass
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old.detach(), rtol=3 * places, atol=3 * places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_fast_backend
def test_codes_stay_beside_float32_state(backend, dtype):
    """The mean of many noisy steps around a minimum, in units of its distance from the start."""
    target = cases.randn((64, 128), torch.float32, 5).to(backend.device)
    ends = {}
    for compact in (False, True):
        param = torch.nn.Parameter(torch.zeros_like(target, dtype=dtype))
        options = {"weight_decay": 0.0, "compact": compact, "stochastic_rounding": True}
        optimizer = cases.build(SCHEDULE_FREE, backend, [param], options)
        for k in range(400):
            noise = cases.randn((64, 128), torch.float32, k).to(backend.device)
            param.grad = (param.detach().float() - target + noise).to(dtype)
            optimizer.step()
        ends[compact] = (mean_of(optimizer)[0].float() - target).square().mean().item()
    assert ends[True] < 1.05 * ends[False]  # 0.994 to 1.015 with 6 seeds


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("in_training", [True, False])
@each_fast_backend
def test_a_checkpoint_resumes_bit_for_bit(backend, compact, in_training):
    options = BASE | {"compact": compact, "warmup_steps": 4}
    params = parameters(SHAPES, torch.float32, backend.device)
    optimizer = cases.build(SCHEDULE_FREE, backend, params, options)
    run(optimizer, params, 7)
    optimizer.train(in_training)
    buffer = io.BytesIO()
    torch.save((cloned(params), optimizer.state_dict()), buffer)
    buffer.seek(0)
    saved, state = torch.load(buffer, weights_only=False)
    others = [torch.nn.Parameter(param.detach()) for param in saved]
    other = cases.build(SCHEDULE_FREE, backend, others, options)
    other.load_state_dict(state)
    for one, own in ((optimizer, params), (other, others)):
        one.train()
        run(one, own, 5, first=7)
        one.eval()
    assert all(map(cases.same_bits, map(torch.detach, params), map(torch.detach, others)))
    for group, again in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert group["mean"].tolist() == again["mean"].tolist()


def test_a_copy_and_a_pickle_go_on_as_the_original():
    params = parameters(SHAPES, torch.float32, "cpu")
    optimizer = MADGRADW(params, schedule_free=True, **BASE)
    run(optimizer, params, 5)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        others = other.param_groups[0]["params"]
        run(other, others, 3, first=5)
        mean = mean_of(other)
        again = copy.deepcopy(optimizer)
        run(again, again.param_groups[0]["params"], 3, first=5)
        assert all(map(torch.equal, mean, mean_of(again)))


def test_weights_of_the_mean_are_squares_of_the_largest_rate():
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = MADGRADW([param], schedule_free=True, weight_decay=0.0)
    points, weights, largest = [], [], 0.0
    for k in range(20):
        optimizer.param_groups[0]["lr"] = rate(k)
        param.grad = torch.ones(3) * (-1) ** k * (k + 1)
        optimizer.step()
        largest = max(largest, rate(k))
        offset = optimizer.state[param]["dual_offset"]
        points.append((param.detach() + offset).clone())
        weights.append(largest**2)
    expected = sum(w * z for w, z in zip(weights, points, strict=True)) / sum(weights)
    torch.testing.assert_close(mean_of(optimizer)[0], expected, rtol=1e-5, atol=1e-7)


@each_fast_backend
def test_the_warm_up_is_a_schedule_of_lr(backend):
    """As LambdaLR would have it, with decay of both kinds."""
    for more in ({}, {"decoupled_lr": True, "weight_decay": 0.01}):
        built = []
        for warmup in (0, 6):
            params = parameters(SHAPES, torch.float32, backend.device)
            options = BASE | more | {"warmup_steps": warmup}
            built.append((cases.build(SCHEDULE_FREE, backend, params, options), params))
        (scheduled, _), (warmed, _) = built
        for k in range(10):
            for optimizer, own in built:
                factor = min(1.0, (k + 1) / 6) if optimizer is scheduled else 1.0
                optimizer.param_groups[0]["lr"] = 1e-2 * factor
                set_grads(own, k)
                optimizer.step()
        for one, other in zip(mean_of(scheduled), mean_of(warmed), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@each_fast_backend
def test_a_momentum_that_changes_moves_y_and_not_the_mean(backend):
    params = parameters(SHAPES, torch.float32, backend.device)
    optimizer = cases.build(SCHEDULE_FREE, backend, params, BASE)
    run(optimizer, params, 5)
    mean = mean_of(optimizer)
    optimizer.param_groups[0].update(momentum=0.5, lr=0.0, weight_decay=0.0)
    before = optimizer.param_groups[0]["mean"].clone()
    optimizer.param_groups[0]["mean"][1:] = torch.tensor([0.0, 1.0])  # nothing of z_{k+1} is taken
    set_grads(params, 5)
    optimizer.step()
    optimizer.param_groups[0]["mean"].copy_(before)
    for one, other, param in zip(mean, mean_of(optimizer), params, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        y = (1 - 0.5) * (param + optimizer.state[param]["dual_offset"]) + 0.5 * other
        torch.testing.assert_close(param, y, rtol=1e-5, atol=1e-6)


@each_fast_backend
def test_a_late_group_has_a_mean_of_its_own(backend):
    first, late = parameters([(3, 2), (3, 2)], torch.float32, backend.device)
    optimizer = cases.build(SCHEDULE_FREE, backend, [first], BASE)
    run(optimizer, [first], 30)
    optimizer.add_param_group({"params": [late]})
    alone = torch.nn.Parameter(late.detach().clone())
    other = cases.build(SCHEDULE_FREE, backend, [alone], BASE)
    for k in range(5):
        set_grads([first, late], k)
        alone.grad = late.grad.clone()
        optimizer.step()
        other.step()
    assert torch.equal(late, alone)
    assert torch.equal(mean_of(optimizer)[1], mean_of(other)[0])


@each_fast_backend
def test_a_group_without_gradients_does_not_count_steps(backend):
    idle, live = parameters([(3, 2), (3, 2)], torch.float32, backend.device)
    groups = [{"params": [idle]}, {"params": [live]}]
    optimizer = ScheduleFreeMADGRADW(groups, **BASE, **backend.flags)
    for k in range(4):
        set_grads([live], k)
        optimizer.step()
    assert [group["mean"][0].item() for group in optimizer.param_groups] == [0, 4]


@pytest.mark.parametrize("compact", [False, True])
def test_gradients_that_are_released(compact):
    """A step of each parameter during backward() is the same step."""
    ends = []
    for release in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64))
        options = BASE | {"compact": compact, "warmup_steps": 3}
        optimizer = MADGRADW(model.parameters(), schedule_free=True, **options)
        if release:
            optimizer.release_gradients()
        for k in range(6):
            model(torch.full((8, 64), 0.1 * k + 0.1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.averaged():
            ends.append([param.detach().clone() for param in model.parameters()])
        assert optimizer.param_groups[0]["mean"][0] == 6
    assert all(map(torch.equal, *ends))


@each_fast_backend
def test_a_step_that_a_scaler_skips_counts_for_nothing(backend):
    params = parameters(SHAPES, torch.float32, backend.device)
    optimizer = cases.build(SCHEDULE_FREE, backend, params, BASE | {"warmup_steps": 5})
    if not optimizer._backend(optimizer.param_groups[0]).FUSED:
        pytest.skip("a scaler calls no step() then")
    run(optimizer, params, 2)
    numbers = optimizer.param_groups[0]["mean"].tolist()
    for found, steps in ((1.0, 2), (0.0, 3)):
        set_grads(params, 2)
        optimizer.grad_scale = torch.ones(1, device=backend.device)
        optimizer.found_inf = torch.full((1,), found, device=backend.device)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert optimizer.param_groups[0]["mean"][0] == steps
        assert (optimizer.param_groups[0]["mean"].tolist() == numbers) == bool(found)


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore::DeprecationWarning")
def test_a_compiled_step_takes_a_rate_that_changes():
    torch._dynamo.reset()
    params = parameters(SHAPES[:1], torch.float32, "cpu")
    optimizer = MADGRADW(params, schedule_free=True, foreach=False)
    step = torch.compile(optimizer.step, fullgraph=True)
    for k in range(12):  # more than the compiler makes graphs
        optimizer.param_groups[0]["lr"] = 1e-3 * (k + 1)
        set_grads(params, k)
        step()
    assert optimizer.param_groups[0]["mean"][0] == 12
    optimizer.eval()
    with pytest.raises(RuntimeError, match="eval"):
        step()


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore:Profiler record function", "ignore::DeprecationWarning")
@pytest.mark.parametrize("compact", [False, True])
def test_a_compiled_step_is_the_same(compact):
    runs = []
    for compiled in (False, True):
        params = parameters(SHAPES, torch.float32, "cpu")
        optimizer = MADGRADW(
            params, schedule_free=True, foreach=False, compact=compact, warmup_steps=3, **BASE
        )
        step = torch.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
        for k in range(5):
            set_grads(params, k)
            step()
        runs.append((mean_of(optimizer), optimizer.param_groups[0]["mean"]))
    (plain, numbers), (traced, others) = runs
    torch.testing.assert_close(numbers, others)
    for one, other in zip(plain, traced, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 if compact else 1e-6)


def test_a_restart_begins_a_new_mean():
    params = parameters(SHAPES, torch.float32, "cpu")
    optimizer = MADGRADW(params, schedule_free=True, **BASE)
    run(optimizer, params, 5)
    optimizer.eval()
    optimizer.restart()
    fresh = cloned(params)
    other = MADGRADW(fresh, schedule_free=True, **BASE)
    run(optimizer, params, 4)
    run(other, fresh, 4)
    assert all(map(torch.equal, mean_of(optimizer), mean_of(other)))


def test_an_edit_moves_y_z_and_the_mean():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MADGRADW([param], schedule_free=True, lr=1e-2)
    run(optimizer, [param], 3)
    mean = mean_of(optimizer)[0]
    with optimizer.edit_weights():
        param += 2.0
    torch.testing.assert_close(mean_of(optimizer)[0], mean + 2.0)


def test_what_is_refused():
    param = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="momentum=0 must be above 0 and below 1"):
        MADGRADW([param], schedule_free=True, momentum=0)
    with pytest.raises(TypeError, match=r"momentum=tensor.* must be a plain number"):
        MADGRADW([param], schedule_free=True, momentum=torch.tensor(0.9))
    with pytest.raises(ValueError, match="warmup_steps=-1 must be a whole number"):
        MADGRADW([param], schedule_free=True, warmup_steps=-1)
    with pytest.raises(ValueError, match="warmup_steps=10 needs schedule_free=True"):
        MADGRADW([param], warmup_steps=10)
    with pytest.raises(TypeError, match="schedule_free='yes'"):
        MADGRADW([param], schedule_free="yes")
    with pytest.raises(ValueError, match="a param group has schedule_free"):
        MADGRADW([{"params": [param], "schedule_free": True}])
    for other in (MADGRAD, MirrorMADGRAD):
        with pytest.raises(TypeError, match="has no option schedule_free"):
            other([param], schedule_free=True)


def test_a_step_at_the_mean_is_refused_and_changes_nothing():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MADGRADW([param], schedule_free=True)
    run(optimizer, [param], 2)
    optimizer.eval()
    set_grads([param], 2)
    with (
        cases.no_change(param, *optimizer.state[param].values()),
        pytest.raises(RuntimeError, match=r"call optimizer.train\(\)"),
    ):
        optimizer.step()


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.5, float("nan"), torch.tensor(0.5)], ids=str)
def test_a_momentum_that_is_refused_changes_nothing(bad):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MADGRADW([param], schedule_free=True)
    run(optimizer, [param], 3)
    mean = mean_of(optimizer)[0]
    optimizer.param_groups[0]["momentum"] = bad
    with pytest.raises((TypeError, ValueError), match="schedule_free=True"):
        optimizer.step()
    assert torch.equal(mean_of(optimizer)[0], mean)
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.step()


@pytest.mark.parametrize(
    "broken",
    [
        *({"mean": None}, {"mean": torch.zeros(2)}, {"mean": torch.tensor([1.0, -1.0, 1.0])}),
        *({"last_momentum": 0.0}, {"train_mode": None}, {"warmup_steps": None}),
    ],
    ids=str,
)
def test_a_broken_checkpoint_is_refused_whole(broken):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = ScheduleFreeMADGRADW([param])
    run(optimizer, [param], 3)
    state = optimizer.state_dict()
    state["param_groups"][0] |= broken
    numbers = optimizer.param_groups[0]["mean"].clone()
    with pytest.raises((TypeError, ValueError), match=r"mean=|must be"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.param_groups[0]["mean"], numbers)


def test_groups_of_another_optimizer_begin_a_mean_of_their_own():
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [first]}]
    run(MADGRADW(groups, schedule_free=True), [first], 50)
    other = MADGRADW(groups, schedule_free=True)
    assert other.param_groups[0]["mean"].tolist() == [0, 0, 0]
    alone = MADGRADW([second], schedule_free=True)
    second.data.copy_(first)
    for optimizer, param in ((other, first), (alone, second)):
        run(optimizer, [param], 5)
    assert torch.equal(mean_of(other)[0], mean_of(alone)[0])


def test_a_group_of_which_this_process_holds_nothing_counts_with_the_others():
    """As with ZeRO-1, where another process saves it."""
    param, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))
    groups = [{"params": [param]}, {"params": []}, {"params": [empty]}]
    for capturable in (False, True):
        optimizer = ScheduleFreeMADGRADW(groups, capturable=capturable)
        run(optimizer, [param], 4)
        counts = [group["mean"][0].item() for group in optimizer.param_groups]
        assert counts == [3, 3, 3]  # the rate of the first step was 0


def test_released_gradients_do_not_count_steps_of_a_frozen_group():
    body, head = torch.nn.Linear(256, 256), torch.nn.Linear(256, 1)
    groups = [{"params": list(body.parameters())}, {"params": list(head.parameters())}]
    optimizer = MADGRADW(groups, schedule_free=True)
    optimizer.release_gradients()
    body.requires_grad_(False)
    for _ in range(3):
        head(body(torch.ones(2, 256))).sum().backward()
        optimizer.step()
    assert [group["mean"][0].item() for group in optimizer.param_groups] == [0, 3]


def test_momentum_that_changes_is_refused_with_released_gradients():
    model = torch.nn.Linear(3, 1)
    optimizer = MADGRADW(model.parameters(), schedule_free=True)
    optimizer.release_gradients()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.8
    with pytest.raises(ValueError, match=r"momentum=0.8 was 0.9 .* cycle_momentum=False"):
        model(torch.ones(2, 3)).sum().backward()


def test_a_restart_of_some_parameters_is_refused():
    params = parameters([(3,), (2,)], torch.float32, "cpu")
    optimizer = MADGRADW(params, schedule_free=True)
    run(optimizer, params, 3)
    with pytest.raises(ValueError, match="weights of the mean"):
        optimizer.restart(params[:1])


def test_states_of_the_two_forms_are_told_apart():
    plain, free = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = MADGRADW([plain]), ScheduleFreeMADGRADW([free])
    run(one, [plain], 2)
    run(other, [free], 2)
    with pytest.raises(ValueError, match="the state dict is madgradw_schedule_free's"):
        one.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="the state dict is madgradw's"):
        other.load_state_dict(one.state_dict())


def test_without_schedule_free_eval_and_train_do_nothing():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MADGRADW([param])
    run(optimizer, [param], 3)
    with cases.no_change(param, *optimizer.state[param].values()):
        optimizer.eval()
        optimizer.train()
        with optimizer.averaged():
            pass


def test_evaluating_at_y_is_noticed_once():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = MADGRADW(model.parameters(), schedule_free=True)
    inputs = torch.ones(2, 3)
    for _ in range(2):
        model(inputs).sum().backward()
        optimizer.step()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        copied.eval()(inputs)  # such as an average of the weights
        optimizer.eval()
        assert b"cubegrad" not in pickle.dumps(model)
        model.eval()(inputs)
        optimizer.train()
        with torch.enable_grad():
            model(inputs)  # such as frozen batch norm
        model.train()(inputs)
    warns = pytest.warns(UserWarning, match=r"call optimizer.eval\(\) before evaluating")
    with torch.no_grad(), warns:
        model.eval()(inputs)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(inputs)


def test_saving_in_training_is_noticed_once():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = MADGRADW([param], schedule_free=True)
    run(optimizer, [param], 2)
    optimizer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
    optimizer.train()
    with pytest.warns(UserWarning, match=r"call optimizer.eval\(\) first"):
        optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
