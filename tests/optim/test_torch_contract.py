"""What torch's tests ask of every optimizer in torch.optim: its steps."""

import itertools

import cases
import contract
import pytest
import torch
from contract import CASES, CLASSES, EstimatedMADGRAD, each_case, each_default, line, line_loss, net
from short_runs import advance, cloned, ones, same_bits, set_grads
from torch import nn

from cubegrad import MADGRAD


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


@pytest.mark.parametrize("contiguous", [True, False])
@each_case
def test_the_loss_goes_the_right_way(case, contiguous):
    weight, bias, inputs = line(contiguous)
    optimizer = case.build([weight, bias])
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = line_loss(weight, bias, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (losses[-1] > losses[0]) == case.maximize
    assert repr(optimizer).startswith(f"{case.cls.__name__} (")
    assert all(optimizer.state[p] for p in (weight, bias))


@pytest.mark.parametrize("dims", [0, 1, 3])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("implementation", contract.IMPLEMENTATIONS)
@pytest.mark.parametrize("cls", CLASSES[:2])
def test_a_tensor_lr_of_any_shape_acts_as_the_number(cls, implementation, capturable, dims):
    flags = contract.IMPLEMENTATIONS[implementation] | {"capturable": capturable}
    runs = []
    for lr in (0.0625, torch.full([1] * dims, 0.0625)):
        params = [ones(10, 5), ones(10)]
        optimizer = cls(params, lr=lr, **flags)
        advance(optimizer, params, range(5))
        runs.append(params)
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-6, atol=0)


@each_case
def test_a_complex_parameter_is_stepped_as_its_two_parts(case):
    """As one tensor with a last dimension of 2, and as two tensors."""
    first = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
    plain = nn.Parameter(torch.randn(4))
    pairs = nn.Parameter(torch.view_as_real(first.detach()).clone())
    real, imag = (nn.Parameter(part.detach().clone()) for part in (first.real, first.imag))
    others = [nn.Parameter(plain.detach().clone()) for _ in range(2)]
    runs = [[first, plain], [pairs, others[0]], [real, imag, others[1]]]
    optimizers = [case.build(params) for params in runs]
    for k in range(4):
        set_grads([first, plain], k)
        pairs.grad = torch.view_as_real(first.grad).clone()
        real.grad, imag.grad = first.grad.real.clone(), first.grad.imag.clone()
        for other in others:
            other.grad = plain.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        expected = torch.view_as_real(first)
        torch.testing.assert_close(pairs, expected)
        torch.testing.assert_close(torch.stack([real, imag], -1), expected)


PRECISION = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2.0**-7, "atol": 1e-6},
    torch.float16: {"rtol": 2.0**-10, "atol": 1e-6},
}
FAST = [case for case in CASES if case.implementation != "forloop"]


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("case", FAST, ids=str)
def test_every_implementation_agrees_with_the_forloop(case, dtype):
    """With layers that are frozen for a while, a step without gradients, and an empty parameter."""
    inputs = torch.arange(1, 7, dtype=dtype).div(10).reshape(3, 2)
    twin = contract.Case(case.cls, case.config, "forloop")
    runs = []
    for which in (case, twin):
        model, scalar = net(dtype), nn.Parameter(torch.ones((), dtype=dtype))
        params = [*model.parameters(), scalar, nn.Parameter(torch.ones(0, 2, dtype=dtype))]
        runs.append((model, params, which.build(params)))
    for k in range(7):
        for model, params, optimizer in runs:
            optimizer.zero_grad()
            model[2].requires_grad_(k not in (3, 4))
            if k != 2:
                model(inputs).sum().backward()
                params[-2].grad = torch.full((), 0.5, dtype=dtype)
                params[-1].grad = torch.ones_like(params[-1])
            optimizer.step()
        (_, ours, fast), (_, reference, slow) = runs
        for p, q in zip(ours, reference, strict=True):
            torch.testing.assert_close(p, q, **PRECISION[dtype])
            assert fast.state[p].keys() == slow.state[q].keys()
            for name, value in fast.state[p].items():
                torch.testing.assert_close(value, slow.state[q][name], **PRECISION[dtype])


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
@each_default
def test_the_default_dtype_changes_nothing(case, default):
    runs = []
    for dtype in (torch.float32, default):
        params = [nn.Parameter(torch.linspace(-1, 1, 6))]
        torch.set_default_dtype(dtype)
        try:
            optimizer = case.build(params)
            advance(optimizer, params, range(3))
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append((params, optimizer.state_dict()["state"][0]))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


@each_case
def test_a_step_without_gradients_does_nothing(case):
    """Before the first gradient and after one."""
    params = [torch.randn(2, 3), ones(2)]
    optimizer = case.build(params)
    for counts in ([], [1, 1]):
        kept = [p.detach().clone() for p in params]
        assert optimizer.step(lambda: 5.0) == 5.0
        assert all(torch.equal(p, q) for p, q in zip(params, kept, strict=True))
        assert [state["step"].item() for state in optimizer.state.values()] == counts
        advance(optimizer, params, [0])
        optimizer.zero_grad()


@each_case
def test_zero_gradients_move_nothing_without_decay(case):
    params = [ones(5, 1)]
    optimizer = case.build(params)
    params[0].grad = torch.zeros(5, 1)
    for _ in range(3):
        optimizer.step()
    unmoved = not optimizer.defaults["weight_decay"]  # MADGRADW has some by default
    if case.cls is EstimatedMADGRAD:  # without an estimate nothing moves
        unmoved = unmoved or case.config in ("decoupled", "decoupled lr")
    assert torch.equal(params[0], torch.ones(5, 1)) == unmoved


@each_case
def test_gradients_are_never_written_to(case):
    params = [ones(5, 1)]
    optimizer = case.build(params)
    set_grads(params, 0)
    grad = params[0].grad
    version = grad._version
    with cases.no_change(grad):
        for _ in range(5):
            optimizer.step()
    assert params[0].grad is grad
    assert grad._version == version


@pytest.mark.parametrize("case", [c for c in CASES if c.cls is not EstimatedMADGRAD], ids=str)
def test_groups_behave_as_optimizers_of_their_own(case):
    """With different options; a group at lr 0 does not move."""
    starts = [torch.randn(4, 3), torch.randn(4), torch.randn(2)]
    options = [{}, {"weight_decay": 0.0, "momentum": 0.5}, {"lr": 0.0}]
    together, alone = cloned(starts), cloned(starts)
    if case.config == "decoupled lr":  # decays by lr / the first lr
        options[2] = {"lr": 1e-28, "weight_decay": 0.0}
    groups = [{"params": [p], **own} for p, own in zip(together, options, strict=True)]
    optimizer = case.build(groups)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        assert {name: group[name] for name in own} == own
    apart = [case.build([p], **own) for p, own in zip(alone, options, strict=True)]
    for k in range(5):
        for params in (together, alone):
            set_grads(params, k)
        for one in (optimizer, *apart):
            one.step()
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)
    assert torch.equal(together[2], starts[2])
    assert not torch.equal(together[0], starts[0])


@each_default
def test_a_scaler_skips_what_overflowed_and_changes_nothing_else(case):
    """A power of 2 as the scale is exact; one step in four overflows."""
    model, twin = net(), net()
    optimizer, plain = case.build(model.parameters()), case.build(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = set()
    for k in range(8):
        inputs = torch.full((3, 2), 0.1 * k)
        optimizer.zero_grad()
        plain.zero_grad()
        overflows = k % 4 == 1
        scaler.scale(model(inputs).sum() * (torch.inf if overflows else 1.0)).backward()
        if overflows:
            state = [t for entries in optimizer.state.values() for t in entries.values()]
            with cases.no_change(*model.parameters(), *state):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            twin(inputs).sum().backward()
            plain.step()
        scaler.update()
        scales.add(scaler.get_scale())
        assert same_bits(model.parameters(), twin.parameters())
    assert len(scales) > 1
    assert all(optimizer.state[p]["step"] == 6 for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("implementation", contract.IMPLEMENTATIONS)
def test_uncoalesced_sparse_gradients_are_summed(implementation, maximize):
    """The coordinates of Rosenbrock's function in turn, each gradient in two parts."""
    flags = contract.IMPLEMENTATIONS[implementation] | {"momentum": 0.0, "maximize": maximize}
    runs = [nn.Parameter(torch.tensor([1.5, 1.5], dtype=torch.float64)) for _ in range(2)]
    optimizers = [MADGRAD([p], **flags) for p in runs]
    for k, (p, optimizer) in itertools.product(range(50), zip(runs, optimizers, strict=True)):
        x, y = p.detach()
        slope = (-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2))[k % 2]
        parts = torch.stack([slope / 4, slope - slope / 4])
        p.grad = torch.sparse_coo_tensor([[k % 2, k % 2]], parts, (2,), check_invariants=True)
        if p is runs[1]:
            p.grad = p.grad.to_dense()
        optimizer.step()
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-9, atol=1e-12)
