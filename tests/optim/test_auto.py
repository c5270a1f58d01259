"""lr="auto": every backend against the oracle, and what users do with an optimizer."""

import math
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from auto_classifier import Classifier, two_groups
from short_runs import ones, parameters
from torch import Tensor, nn

import cubegrad
from cubegrad import MADGRAD

OPTIONS = {name: {k: v for k, v in o.items() if k != "lr"} for name, o in cases.OPTIONS.items()}
for _name in ("decoupled", "decoupled-no-momentum"):
    OPTIONS[_name]["weight_decay"] = 0.02  # the estimate grows to about 10 here
SHAPES = [(3, 5), (), (41,), (0, 2)]
CURVATURE = torch.logspace(-2, 1, 57, dtype=torch.float64)


def gradients(params: list[Tensor], k: int) -> list[Tensor]:
    """The gradients of a quadratic, with noise: the estimate grows at first and then stays."""
    start, grads = 0, []
    for index, param in enumerate(params):
        x = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
        curvature = CURVATURE[torch.arange(start, start + x.numel()) % 57].reshape(x.shape)
        slope = curvature.to(x) * (x - 3) + 0.1 * cases.randn(x.shape, x.dtype, 10 * k + index)
        grads.append(torch.view_as_complex(slope) if param.is_complex() else slope)
        start += x.numel()
    return grads


METHODS = [cases.MADGRAD, cases.MADGRADW, cases.SCHEDULE_FREE]
Estimate = oracle.Estimate | oracle.EstimateFreeOfScale
each_method = pytest.mark.parametrize("method", METHODS, ids=str)


def start(
    method: cases.Method, backend: cases.Backend, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[nn.Parameter], Any, Estimate]:
    """Parameters, their optimizer, and the oracle with the same values."""
    if method is cases.SCHEDULE_FREE and options.get("momentum") == 0:
        pytest.skip("schedule_free=True needs momentum")
    params = parameters(SHAPES, dtype, backend.device)
    optimizer = cases.build(method, backend, params, options | {"lr": "auto"})
    kind: Any = oracle.Estimate if method is cases.MADGRAD else oracle.EstimateFreeOfScale
    return params, optimizer, kind([method.oracle(cases.numbers(p)) for p in params])


def step_both(
    params: list[nn.Parameter], optimizer: Any, expected: Estimate, options: Any, k: int
) -> None:
    grads = gradients([param.cpu() for param in params], k)
    if options.get("maximize"):  # of a quadratic that has a maximum
        grads = [-grad for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device)
    factor = cases.lr_at(k, 1.0)
    optimizer.param_groups[0]["lr"] = factor
    optimizer.step()
    expected.step([cases.numbers(grad) for grad in grads], cases.settings(options), factor)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@cases.each_backend_of_a_long_test
@each_method
def test_every_backend_follows_the_oracle(
    method: cases.Method, backend: cases.Backend, options: dict[str, Any]
) -> None:
    params, optimizer, expected = start(method, backend, torch.float64, options)
    distances = []
    for k in range(6 if backend.interpreted else 40):
        step_both(params, optimizer, expected, options, k)
        distances.append(expected.distance)
        assert optimizer.estimated_lr() == pytest.approx(expected.lr, rel=1e-9)
        for param, run in zip(params, expected.runs, strict=True):
            np.testing.assert_allclose(cases.numbers(param), run.x, rtol=1e-9, atol=1e-12)
            for name, state in cases.stored(optimizer, param).items():
                np.testing.assert_allclose(state, run.state()[name], rtol=1e-8, atol=1e-12)
    numbers = optimizer.param_groups[0]["estimate"].tolist()
    assert numbers == pytest.approx(expected.numbers(), rel=1e-8)
    assert backend.interpreted or distances[-1] > 2 * distances[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@cases.each_fast_backend
@each_method
def test_other_dtypes_follow_the_oracle(
    method: cases.Method, backend: cases.Backend, dtype: torch.dtype
) -> None:
    params, optimizer, expected = start(method, backend, dtype, {})
    for k in range(30):
        step_both(params, optimizer, expected, {}, k)
        assert optimizer.estimated_lr() == pytest.approx(expected.lr, rel=2e-5)
        for param, run in zip(params, expected.runs, strict=True):
            run.restart(cases.numbers(param), cases.stored(optimizer, param), cases.settings({}))


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_size_of_the_loss_does_not_matter(scale: float) -> None:
    plain, scaled = (Classifier(dtype=torch.float64, eps=0.0) for _ in range(2))
    torch.testing.assert_close(
        plain.train(range(50)), scaled.train(range(50), scale), rtol=1e-9, atol=1e-12
    )
    lr = plain.optimizer.estimated_lr()  # proportional to G^{-1/2}
    assert scaled.optimizer.estimated_lr() == pytest.approx(lr * scale**-0.5, rel=1e-9)


def test_groups_share_one_estimate() -> None:
    one, two = Classifier(dtype=torch.float64), Classifier(two_groups, dtype=torch.float64)
    torch.testing.assert_close(one.train(range(30)), two.train(range(30)), rtol=1e-12, atol=0)
    assert one.optimizer.estimated_lr() == pytest.approx(two.optimizer.estimated_lr(), rel=1e-12)
    first, second = (group["estimate"] for group in two.optimizer.param_groups)
    assert [i for i in range(len(first)) if first[i] != second[i]] == [1, 6]  # their own sums


def test_a_groups_lr_is_a_factor() -> None:
    def groups(net: nn.Module) -> list[dict[str, Any]]:
        first, *rest = net.parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.5}]

    run = Classifier(groups, momentum=0.0, eps=0.0)
    before = run.weights()
    moved = (run.train(range(1)) - before).abs()
    lr = run.optimizer.estimated_lr()
    assert lr > 0
    grads = torch.cat([param.grad.flatten() for param in run.net.parameters()]).abs()
    first = run.net[0].weight.numel()
    # Moves are lambda^{2/3} |g|^{1/3}, with the whole estimate in one group and half in the other.
    whole, half = (moved / grads ** (1 / 3)).split([first, len(moved) - first])
    assert whole.median() / half.median() == pytest.approx(2 ** (2 / 3), rel=1e-2)


def test_parameters_without_a_gradient_still_count() -> None:
    """They add the sums of their last step."""
    values = [cases.randn((n,), torch.float64, n) for n in (4, 30)]
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = MADGRAD(params, lr="auto", momentum=0.0)
    expected = oracle.Estimate([oracle.Madgrad(value.numpy()) for value in values])
    o = cases.settings({"momentum": 0.0})
    for k in range(8):
        grads = gradients(params, k)
        if k == 5:
            grads[1] = torch.zeros_like(grads[1])  # the same as None to the oracle
        expected.step([grad.numpy() for grad in grads], o)
        params[0].grad, params[1].grad = grads[0], None if k == 5 else grads[1]
        optimizer.step()
        if k == 5:
            optimizer.state[params[1]]["step"] += 1
        assert optimizer.estimated_lr() == pytest.approx(expected.lr, rel=1e-9)


def test_a_group_that_is_added_later_shares_the_estimate() -> None:
    run = Classifier()
    run.train(range(10))
    lr = run.optimizer.estimated_lr()
    extra = nn.Parameter(torch.ones(5))
    run.optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones(5)
    run.train(range(10, 11))
    assert run.optimizer.estimated_lr() == pytest.approx(lr, rel=0.5)
    extra.grad = torch.ones(5)
    run.optimizer.step()
    assert (extra < 1).all()
    rows = [group["estimate"] for group in run.optimizer.param_groups]
    assert rows[0][3] > rows[1][3] > 0  # each has the sum of its own weights


@pytest.mark.parametrize("scaled", [False, True])
def test_a_scaler_leaves_the_estimate_alone_where_it_found_inf(scaled: bool) -> None:
    run, plain = Classifier(fused=True), Classifier(fused=True)
    plain.train(range(6))
    scale = 1024.0
    for k in range(6):
        if scaled:
            run.optimizer.grad_scale = torch.tensor([scale])
        run.optimizer.found_inf = torch.zeros(1)
        run.train(range(k, k + 1), scale if scaled else 1.0)
        row = run.optimizer.param_groups[0]["estimate"].clone()
        run.net[0].weight.grad.fill_(math.inf)
        run.optimizer.found_inf = torch.ones(1)
        with cases.no_change(*run.net.parameters()):
            run.optimizer.step()
        assert torch.equal(run.optimizer.param_groups[0]["estimate"], row)
    torch.testing.assert_close(run.weights(), plain.weights(), rtol=1e-5, atol=1e-7)
    assert run.optimizer.estimated_lr() == pytest.approx(plain.optimizer.estimated_lr(), rel=1e-5)


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_compiled_steps_make_the_same_estimates(fullgraph: bool) -> None:
    torch._dynamo.reset()
    plain, run = (Classifier(two_groups, foreach=False) for _ in range(2))
    if fullgraph:
        run.train(range(1))
    step = torch.compile(run.optimizer.step, fullgraph=fullgraph)
    run.train(range(int(fullgraph), 8), step=step)
    plain.train(range(8))
    torch.testing.assert_close(run.weights(), plain.weights(), rtol=1e-5, atol=1e-7)
    assert run.optimizer.estimated_lr() == pytest.approx(plain.optimizer.estimated_lr(), rel=1e-5)


def test_autograd_runs_through_a_step() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = MADGRAD([param], lr="auto", differentiable=True)
    for _ in range(3):
        scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        value = param.clone()
        optimizer.param_groups[0]["params"][0] = value
        optimizer.state[value] = optimizer.state.pop(param, {})
        value.grad = scale * torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
        optimizer.step()
        value.sum().backward()
        assert scale.grad is not None
        assert scale.grad.isfinite()
        optimizer.state[param] = {k: t.detach() for k, t in optimizer.state.pop(value).items()}
        optimizer.param_groups[0]["params"][0] = param
    assert optimizer.estimated_lr() > 0


def test_impossible_uses_are_refused() -> None:
    params = [ones(3)]
    with pytest.raises(TypeError, match=r"lr='fast' \(str\) must be one number; .* 'auto'"):
        MADGRAD(params, lr="fast")
    with pytest.raises(ValueError, match="lr='auto' needs x_0, which mirror_madgrad"):
        cubegrad.MirrorMADGRAD(params, lr="auto")  # type: ignore[arg-type]
    fixed = MADGRAD(params, lr=0.1)
    with pytest.raises(ValueError, match="for all groups or for none"):
        fixed.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": "auto"})
    assert len(fixed.param_groups) == 1
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = MADGRAD(embedding.parameters(), lr="auto", momentum=0.0)
    with (
        cases.no_change(embedding.weight),
        pytest.raises(RuntimeError, match="lr='auto' needs sums over all rows"),
    ):
        optimizer.step()


def test_decoupled_decay_is_not_limited_before_the_rate_is_known() -> None:
    run = Classifier(weight_decay=5.0, decoupled_weight_decay=True)
    assert run.train(range(5)).isfinite().all()


def test_a_run_that_diverges_estimates_infinity_and_does_not_raise() -> None:
    run = Classifier()
    run.train(range(3))
    run.optimizer.param_groups[0]["estimate"][0] = 1e250
    run.optimizer.step()
    assert run.optimizer.estimated_lr() == math.inf
    run.optimizer.step()
    run.optimizer.step()
    assert not run.weights().isfinite().all()


def test_a_factor_below_0_leaves_the_estimate_alone() -> None:
    """A schedule may run for longer than it was made for; ν is negative then."""
    param = ones(64, 64)
    optimizer = MADGRAD([param], lr="auto", compact=True)
    optimizer.param_groups[0]["lr"] = -0.01
    for _ in range(3):
        param.grad = torch.ones(64, 64)
        optimizer.step()
    assert 0 < optimizer.estimated_lr() < math.inf


def test_parameters_on_several_devices_are_refused() -> None:
    params = [ones(3), nn.Parameter(torch.ones(3, device="meta"))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = MADGRAD(params, lr="auto", foreach=False)
    with cases.no_change(params[0]), pytest.raises(ValueError, match="on cpu and meta; build an"):
        optimizer.step()
