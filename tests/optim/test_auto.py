"""MADGRAD(lr="auto"): every backend against the formulas in float64, and the habits of torch."""

import copy
import math
import pickle
from typing import Any

import cases
import numpy as np
import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cubegrad
from cubegrad import MADGRAD

OPTIONS = {name: {k: v for k, v in o.items() if k != "lr"} for name, o in cases.OPTIONS.items()}
for _name in ("decoupled", "decoupled-no-momentum"):
    OPTIONS[_name]["weight_decay"] = 0.02  # the estimate comes to about 10 here
SHAPES = [(3, 5), (), (41,), (0, 2)]
CURVATURE = torch.logspace(-2, 1, 57, dtype=torch.float64)


def gradients(params: list[Tensor], k: int) -> list[Tensor]:
    """Of a bowl with noise, so that the estimate first grows and then stays."""
    start, grads = 0, []
    for index, param in enumerate(params):
        x = torch.view_as_real(param.detach()) if param.is_complex() else param.detach()
        curvature = CURVATURE[torch.arange(start, start + x.numel()) % 57].reshape(x.shape)
        slope = curvature.to(x) * (x - 3) + 0.1 * cases.randn(x.shape, x.dtype, 10 * k + index)
        grads.append(torch.view_as_complex(slope) if param.is_complex() else slope)
        start += x.numel()
    return grads


def factor_at(k: int) -> float:
    return cases.lr_at(k, 1.0)


def build(backend: cases.Backend, params: list[Tensor], options: dict[str, Any]) -> Any:
    return cases.build(cases.MADGRAD, backend, params, options | {"lr": "auto"})


def stepped(optimizer: Any, params: list[Tensor], steps: range, device: str = "cpu") -> None:
    for k in steps:
        grads = gradients([param.cpu() for param in params], k)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(device)
        for group in optimizer.param_groups:
            group["lr"] = factor_at(k)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", cases.BACKENDS, ids=str)
def test_every_backend_runs_the_formulas(backend: cases.Backend, options: dict[str, Any]) -> None:
    values = [cases.randn(shape, torch.float64, i) for i, shape in enumerate(SHAPES)]
    params = [cases.parameter(value, backend.device) for value in values]
    judge = oracle.Estimate([oracle.Madgrad(cases.numbers(value)) for value in values])
    optimizer = build(backend, params, options)
    o, first = cases.settings(options), 0.0
    for k in range(6 if backend.interpreted else 40):
        grads = gradients([param.cpu() for param in params], k)
        judge.step([cases.numbers(grad) for grad in grads], o, factor_at(k))
        first = judge.distance if k == 0 else first
        stepped(optimizer, params, range(k, k + 1), backend.device)
        assert optimizer.estimated_lr() == pytest.approx(judge.lr, rel=1e-9)
        for param, run in zip(params, judge.runs, strict=True):
            np.testing.assert_allclose(cases.numbers(param), run.x, rtol=1e-9, atol=1e-12)
            for name, state in cases.stored(optimizer, param).items():
                np.testing.assert_allclose(state, run.state()[name], rtol=1e-8, atol=1e-12)
    row = optimizer.param_groups[0]["estimate"].tolist()
    expected = (judge.distance, judge.agreement, judge.lr, judge.weight_sum, judge.runs[0].k)
    assert row == pytest.approx(expected, rel=1e-8)
    assert backend.interpreted or judge.distance > 2 * first  # it grew


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("backend", [b for b in cases.BACKENDS if not b.interpreted], ids=str)
def test_other_dtypes_estimate_alike(backend: cases.Backend, dtype: torch.dtype) -> None:
    values = [cases.randn(shape, dtype, i) for i, shape in enumerate(SHAPES)]
    params = [cases.parameter(value, backend.device) for value in values]
    optimizer = build(backend, params, {})
    judge = oracle.Estimate([oracle.Madgrad(cases.numbers(value)) for value in values])
    for k in range(30):
        grads = gradients([param.cpu() for param in params], k)
        judge.step([cases.numbers(grad) for grad in grads], cases.settings({}), factor_at(k))
        stepped(optimizer, params, range(k, k + 1), backend.device)
        for param, run in zip(params, judge.runs, strict=True):  # go on from what is stored
            run.take(cases.numbers(param), cases.stored(optimizer, param), cases.settings({}))
        assert optimizer.estimated_lr() == pytest.approx(judge.lr, rel=2e-5)


class Case:
    """A small classifier, its optimizer, and the same batches every time."""

    def __init__(self, groups: Any = None, dtype: torch.dtype = torch.float32, **options: Any):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)
        params = self.net.parameters() if groups is None else groups(self.net)
        self.optimizer = MADGRAD(params, lr="auto", **options)
        self.dtype = dtype

    def train(self, steps: range, scale: float = 1.0, step: Any = None) -> Tensor:
        for k in steps:
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(32, 9, generator=generator, dtype=torch.float64).to(self.dtype)
            self.optimizer.zero_grad()
            (cross_entropy(self.net(x), x[:, :3].argmax(1)) * scale).backward()
            (step or self.optimizer.step)()
        return self.weights()

    def weights(self) -> Tensor:
        return torch.cat([param.detach().flatten() for param in self.net.parameters()])


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_size_of_the_loss_does_not_matter(scale: float) -> None:
    plain, scaled = (Case(dtype=torch.float64, eps=0.0) for _ in range(2))
    torch.testing.assert_close(
        plain.train(range(50)), scaled.train(range(50), scale), rtol=1e-9, atol=1e-12
    )
    lr = plain.optimizer.estimated_lr()  # gamma goes as G^{-1/2}
    assert scaled.optimizer.estimated_lr() == pytest.approx(lr * scale**-0.5, rel=1e-9)


def halves(net: nn.Module) -> list[dict[str, Any]]:
    params = list(net.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": "auto"}]


def test_groups_share_one_estimate() -> None:
    one, two = Case(dtype=torch.float64), Case(halves, dtype=torch.float64)
    torch.testing.assert_close(one.train(range(30)), two.train(range(30)), rtol=1e-12, atol=0)
    assert one.optimizer.estimated_lr() == pytest.approx(two.optimizer.estimated_lr(), rel=1e-12)
    first, second = (group["estimate"] for group in two.optimizer.param_groups)
    assert (first == second).tolist() == [True, False, True, True, True]  # but for their agreement


def test_a_groups_lr_is_a_factor() -> None:
    def groups(net: nn.Module) -> list[dict[str, Any]]:
        first, *rest = net.parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.5}]

    case = Case(groups, momentum=0.0, eps=0.0)
    before = case.weights()
    moved = (case.train(range(1)) - before).abs()
    lr = case.optimizer.estimated_lr()
    assert lr > 0
    grads = torch.cat([param.grad.flatten() for param in case.net.parameters()]).abs()
    first = case.net[0].weight.numel()
    # lambda^{2/3} |g|^{1/3}: the whole of the estimate in one group, half of it in the other
    whole, half = (moved / grads ** (1 / 3)).split([first, len(moved) - first])
    assert whole.median() / half.median() == pytest.approx(2 ** (2 / 3), rel=1e-2)


def test_a_scheduler_moves_the_factor() -> None:
    case = Case()
    scheduler = torch.optim.lr_scheduler.LambdaLR(case.optimizer, lambda k: 0.0 if k < 3 else 1.0)
    start = case.weights()
    for k in range(6):
        now = case.train(range(k, k + 1))
        assert torch.equal(now, start) == (k < 3)
        scheduler.step()
    assert case.optimizer.param_groups[0]["lr"] == 1.0
    assert 0 < case.optimizer.estimated_lr() < math.inf


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("how", ["state_dict", "file", "pickle", "deepcopy"])
def test_a_run_goes_on_bit_for_bit(how: str, flags: dict[str, Any], tmp_path: Any) -> None:
    whole = Case(halves, **flags).train(range(20))
    first = Case(halves, **flags)
    first.train(range(11))
    second = Case(halves, **flags)
    second.net.load_state_dict(first.net.state_dict())
    saved = first.optimizer.state_dict()
    if how == "file":
        torch.save(saved, tmp_path / "run.pt")
        saved = torch.load(tmp_path / "run.pt", weights_only=True)
    if how in ("state_dict", "file"):
        second.optimizer.load_state_dict(copy.deepcopy(saved))
    else:
        pair = (first.net, first.optimizer)
        second.net, second.optimizer = (
            copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
        )
    assert torch.equal(second.train(range(11, 20)), whole)
    first.train(range(11, 13))  # and what was saved is no longer the run that goes on
    assert torch.equal(second.weights(), whole)


def test_old_checkpoints_keep_their_lr() -> None:
    old = MADGRAD([nn.Parameter(torch.ones(3))], lr=0.25)
    saved = old.state_dict()
    del saved["param_groups"][0]["auto_lr"]
    other = MADGRAD([nn.Parameter(torch.ones(3))], lr=0.5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.25
    with pytest.raises(RuntimeError, match=r"lr=0\.25; read"):
        other.estimated_lr()
    with pytest.raises(ValueError, match=r"with lr=0\.25, and the optimizer .* with lr='auto'"):
        MADGRAD([nn.Parameter(torch.ones(3))], lr="auto").load_state_dict(saved)
    del old.defaults["auto_lr"], old.param_groups[0]["auto_lr"]
    again = pickle.loads(pickle.dumps(old))
    again.param_groups[0]["params"][0].grad = torch.ones(3)
    again.step()
    assert (again.param_groups[0]["params"][0] < 1).all()


DAMAGED = [
    None,
    torch.zeros(4),
    torch.full((5,), math.nan),
    torch.tensor([-0.1, 0, 1, 1, 1]),
    torch.tensor([math.inf, 0, 1, 1, 1]),
    torch.tensor([0.1, 0, -1, 1, 1]),
    torch.tensor([0.1, 0, 1, -1, 1]),
    torch.tensor([0.1, 0, 1, 1, -1]),
    torch.tensor([0.1, 0, 1, 1, 0.5]),
]


@pytest.mark.parametrize("estimate", DAMAGED, ids=str)
def test_a_damaged_estimate_is_refused(estimate: Any) -> None:
    case = Case()
    case.train(range(2))
    saved = copy.deepcopy(case.optimizer.state_dict())
    saved["param_groups"][0]["estimate"] = estimate
    with (
        cases.no_change(*case.net.parameters()),
        pytest.raises(ValueError, match="must be five numbers"),
    ):
        case.optimizer.load_state_dict(saved)
    case.train(range(2, 3))


def test_parameters_that_sit_out_still_count() -> None:
    """What has no gradient in a step adds its old sums, not nothing."""
    values = [cases.randn((n,), torch.float64, n) for n in (4, 30)]
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = MADGRAD(params, lr="auto", momentum=0.0)
    judge = oracle.Estimate([oracle.Madgrad(value.numpy()) for value in values])
    o = cases.settings({"momentum": 0.0})
    for k in range(8):
        grads = gradients(params, k)
        if k == 5:
            grads[1] = torch.zeros_like(grads[1])  # to the formulas the same as none
        judge.step([grad.numpy() for grad in grads], o)
        params[0].grad, params[1].grad = grads[0], None if k == 5 else grads[1]
        optimizer.step()
        if k == 5:
            optimizer.state[params[1]]["step"] += 1
        assert optimizer.estimated_lr() == pytest.approx(judge.lr, rel=1e-9)


def test_a_group_that_joins_later_takes_the_estimate() -> None:
    case = Case()
    case.train(range(10))
    lr = case.optimizer.estimated_lr()
    extra = nn.Parameter(torch.ones(5))
    case.optimizer.add_param_group({"params": [extra], "lr": 0.1})
    extra.grad = torch.ones(5)
    case.train(range(10, 11))
    assert case.optimizer.estimated_lr() == pytest.approx(lr, rel=0.5)
    extra.grad = torch.ones(5)
    case.optimizer.step()
    assert (extra < 1).all()
    rows = [group["estimate"] for group in case.optimizer.param_groups]
    assert rows[0][3] > rows[1][3] > 0  # each has the sum of its own weights


def test_nothing_moves_until_a_gradient_says_something() -> None:
    case = Case()
    for value in (0.0, math.inf):
        for param in case.net.parameters():
            param.grad = torch.full_like(param, value)
        if value:
            case.optimizer.found_inf = torch.ones(1)
        with cases.no_change(*case.net.parameters()):
            case.optimizer.step()
        assert math.isnan(case.optimizer.estimated_lr())
    del case.optimizer.found_inf
    before = case.weights()
    assert not torch.equal(case.train(range(1)), before)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_scaler_leaves_the_estimate_alone_where_it_found_inf(scaled: bool) -> None:
    case, plain = Case(fused=True), Case(fused=True)
    plain.train(range(6))
    scale = 1024.0
    for k in range(6):
        if scaled:
            case.optimizer.grad_scale = torch.tensor([scale])
        case.optimizer.found_inf = torch.zeros(1)
        case.train(range(k, k + 1), scale if scaled else 1.0)
        row = case.optimizer.param_groups[0]["estimate"].clone()
        case.net[0].weight.grad.fill_(math.inf)
        case.optimizer.found_inf = torch.ones(1)
        with cases.no_change(*case.net.parameters()):
            case.optimizer.step()
        assert torch.equal(case.optimizer.param_groups[0]["estimate"], row)
    torch.testing.assert_close(case.weights(), plain.weights(), rtol=1e-5, atol=1e-7)
    assert case.optimizer.estimated_lr() == pytest.approx(plain.optimizer.estimated_lr(), rel=1e-5)


@pytest.mark.compilation
@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_steps_estimate_alike(fullgraph: bool) -> None:
    torch._dynamo.reset()
    plain, case = (Case(halves, foreach=False) for _ in range(2))
    if fullgraph:
        case.train(range(1))
    step = torch.compile(case.optimizer.step, fullgraph=fullgraph)
    case.train(range(int(fullgraph), 8), step=step)
    plain.train(range(8))
    torch.testing.assert_close(case.weights(), plain.weights(), rtol=1e-5, atol=1e-7)
    assert case.optimizer.estimated_lr() == pytest.approx(plain.optimizer.estimated_lr(), rel=1e-5)


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


def test_what_cannot_be_is_refused() -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match=r"lr='fast' \(str\) must be one number; .* 'auto'"):
        MADGRAD(params, lr="fast")
    with pytest.raises(ValueError, match="lr='auto' is MADGRAD's alone"):
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


def test_decoupled_decay_may_be_large_as_the_rate_is_not_known_yet() -> None:
    case = Case(weight_decay=5.0, decoupled_weight_decay=True)
    assert case.train(range(5)).isfinite().all()


def test_a_run_that_diverges_says_so_and_does_not_raise() -> None:
    case = Case()
    case.train(range(3))
    case.optimizer.param_groups[0]["estimate"][0] = 1e250
    case.optimizer.step()
    assert case.optimizer.estimated_lr() == math.inf
    case.optimizer.step()
    case.optimizer.step()
    assert not case.weights().isfinite().all()


def test_parameters_on_several_devices_are_refused() -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = MADGRAD(params, lr="auto", foreach=False)
    with cases.no_change(params[0]), pytest.raises(ValueError, match="on cpu and meta; build an"):
        optimizer.step()


def test_a_run_that_diverged_can_be_saved_and_loaded() -> None:
    case = Case()
    case.train(range(3))
    case.optimizer.param_groups[0]["estimate"][2] = math.inf
    again = Case()
    again.optimizer.load_state_dict(case.optimizer.state_dict())
    assert again.optimizer.estimated_lr() == math.inf
