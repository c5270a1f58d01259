"""Row-sparse gradients without momentum: the dense result at the cost of the touched rows."""

import cases
import pytest
import torch
from cases import MADGRAD, each_backend, each_method
from short_runs import ones, parameters
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
NO_MOMENTUM = {"momentum": 0.0}


def sparse_grad(param, rows, seed):
    values = cases.randn((len(rows), *param.shape[1:]), param.dtype, seed).to(param.device)
    indices = torch.tensor([rows], device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eps": 0.0},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "momentum": torch.tensor(0.0)},
        {"maximize": True},
    ],
    ids=["plain", "eps0", "decoupled", "decoupled-tensor-momentum", "maximize"],
)
@each_method
@each_backend
def test_a_sparse_run_equals_the_dense_one(backend, method, options):
    for dtype in backend.dtypes:
        if backend.interpreted and dtype == torch.bfloat16:
            continue  # truncates, so rows that are stepped without a gradient change
        sparse, dense = (parameters([(12, 3)], dtype, backend.device)[0] for _ in range(2))
        optimizers = [
            cases.build(method, backend, [p], NO_MOMENTUM | options) for p in (sparse, dense)
        ]
        for k in range(8):
            rows = [k % 12, (5 * k) % 12, k % 12, 11]  # duplicates are summed
            sparse.grad = sparse_grad(sparse, rows, k)
            dense.grad = sparse.grad.coalesce().to_dense()  # sums duplicates in the same dtype
            for optimizer in optimizers:
                optimizer.step()
        assert torch.isfinite(torch.view_as_real(sparse) if dtype.is_complex else sparse).all()
        torch.testing.assert_close(sparse, dense)
        states = [o.state[p] for o, p in zip(optimizers, (sparse, dense), strict=True)]
        assert states[0].keys() == states[1].keys()
        for a, b in zip(*(state.values() for state in states), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_method
@each_backend
def test_sparse_gradients_after_momentum_is_switched_off(backend, method, dtype):
    """Rows without a gradient also have to move from x to z once; bfloat16 keeps both."""
    if backend.interpreted and dtype == torch.bfloat16:
        pytest.skip("truncates, so rows that are stepped without a gradient change")
    tables = [parameters([(4, 2)], dtype, backend.device)[0] for _ in range(2)]
    optimizers = [cases.build(method, backend, [table], {"lr": 0.1}) for table in tables]
    for k, momentum in enumerate([0.9] * 3 + [0.0] * 3 + [0.9] * 2 + [0.0] * 3):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.param_groups[0]["momentum"] = momentum
            grad = sparse_grad(table, [k % 4, 1], k)
            dense = momentum or table is tables[1]
            table.grad = None
            table.grad = grad.coalesce().to_dense() if dense else grad
            optimizer.step()
    torch.testing.assert_close(tables[0], tables[1])
    has_point = not {"initial_param", "z", "dual_offset"}.isdisjoint(optimizers[0].state[tables[0]])
    assert has_point == (dtype == torch.bfloat16)


@each_backend
def test_untouched_rows_and_the_gradient_keep_every_bit(backend):
    (param,) = parameters([(12, 3)], device=backend.device)
    optimizer = cases.build(MADGRAD, backend, [param], NO_MOMENTUM | {"eps": 0.0})
    start = param.detach().clone()
    grad = sparse_grad(param, [2, 7, 2], 1)
    param.grad = grad
    for _ in range(3):
        optimizer.step()
    assert param.grad is grad
    assert grad._nnz() == 3
    untouched = [row for row in range(12) if row not in (2, 7)]
    assert cases.same_bits(param.detach()[untouched], start[untouched])
    assert (param.detach()[[2, 7]] != start[[2, 7]]).all()


def test_the_cost_is_that_of_the_touched_rows():
    """No operation of a step may produce as many elements as the table has."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            inplace = any(out is arg for arg in args)
            if isinstance(out, torch.Tensor) and out.layout == torch.strided and not inplace:
                Largest.elements = max(Largest.elements, out.numel())
            return out

    param = nn.Parameter(torch.randn(10_000, 4))
    optimizer = MADGRAD.optimizer([param], momentum=0.0)
    param.grad = sparse_grad(param, [5, 77], 0)
    optimizer.step()
    with Largest():
        optimizer.step()
    assert Largest.elements <= 100


def test_an_embedding_beside_dense_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(32, 3))
    optimizer = MADGRAD.optimizer(model.parameters(), lr=1e-2, momentum=0.0)
    tokens, labels = torch.randint(50, (64, 4)), torch.randint(3, (64,))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.9}, "momentum=0.9 moves every row.*momentum=0"),
        ({"momentum": 0.0, "weight_decay": 0.1}, "weight_decay=0.1.*decoupled_weight_decay"),
    ],
)
def test_options_that_move_every_row_are_refused_before_anything_changes(options, message):
    dense, sparse = ones(3), ones(4, 2)
    optimizer = MADGRAD.optimizer([("dense", dense), ("table", sparse)], **options)
    dense.grad, sparse.grad = torch.ones(3), sparse_grad(sparse, [1], 0)
    with cases.no_change(dense, sparse), pytest.raises(RuntimeError, match=f"table .*{message}"):
        optimizer.step()
    assert not optimizer.state


@each_backend
def test_a_gradient_that_becomes_sparse_is_refused_too(backend):
    table = cases.parameter(torch.ones(4, 2), backend.device)
    optimizer = cases.build(MADGRAD, backend, [table], {})
    table.grad = torch.ones_like(table)
    optimizer.step()
    optimizer.step()
    table.grad = None
    table.grad = sparse_grad(table, [1], 0)
    with cases.no_change(table), pytest.raises(RuntimeError, match=r"momentum=0.9 moves every row"):
        optimizer.step()
