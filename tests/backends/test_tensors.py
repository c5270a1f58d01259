"""The quick look at the tensors of a step sees what the plain one sees."""

import copy

import pytest
import torch

from cubegrad.backends.native import tensors as look

if look.addresses is look.plain_addresses:
    pytest.skip("the extension is not built", allow_module_level=True)


def params_of():
    params = [
        torch.nn.Parameter(torch.ones(4, 5)),
        torch.nn.Parameter(torch.ones(3, dtype=torch.float64)),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
        torch.nn.Parameter(torch.ones(())),
        torch.nn.Parameter(torch.ones(0, 3)),
        torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def transposed_in_place(params):
    params[0].data = torch.ones(4, 4)
    params[0].grad = torch.ones(4, 4)


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def subclass_grad(params):
    params[0].grad = torch.ones(4, 5).as_subclass(Subclass)


def negated_grad(params):
    params[0].grad = torch._neg_view(torch.ones(4, 5))


def freed_grad(params):
    params[0].grad.untyped_storage().resize_(0)


def smaller_grad(params):
    params[0].grad.data = torch.ones(2, 5)


def sparse_grad(params):
    params[0].grad = torch.ones(4, 5).to_sparse()


CHANGES = {
    "nothing": (lambda _: None, True),
    "new gradients": (lambda params: [setattr(p, "grad", p.grad.clone()) for p in params], True),
    "no gradient": (lambda params: setattr(params[1], "grad", None), False),
    "other strides": (lambda params: setattr(params[0], "grad", torch.ones(5, 4).t()), False),
    "moved weights": (lambda params: setattr(params[0], "data", torch.ones(4, 5)), False),
    "another shape": (transposed_in_place, False),
    "swapped strides": (lambda params: setattr(params[2], "data", params[2].mT.mT), True),
    "a subclass": (subclass_grad, False),
    "a sparse gradient": (sparse_grad, False),
    "a negated gradient": (negated_grad, False),
    "a freed gradient": (freed_grad, False),
    "a smaller gradient": (smaller_grad, False),
    "one less": (lambda params: params.pop(), False),
    "one more": (lambda params: params.append(params[0]), False),
    "another order": (lambda params: params.reverse(), False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_both_looks_agree(change):
    arrange, still_fits = CHANGES[change]
    params = params_of()
    quick, plain = look.signature(params, []), look.plain_signature(params, [])
    arrange(params)
    addresses = look.addresses(params, [], quick)
    assert addresses == look.plain_addresses(params, [], plain)
    assert (addresses is not None) == still_fits
    if still_fits:
        found = [int.from_bytes(addresses[i : i + 8], "little") for i in range(0, 48, 8)]
        assert found == [param.grad.data_ptr() for param in params]


def test_strides_exchanged_in_place_are_seen():
    param = torch.nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    quick, plain = look.signature([param], []), look.plain_signature([param], [])
    param.data = param.data.t()  # the same address
    assert look.addresses([param], [], quick) is None
    assert look.plain_addresses([param], [], plain) is None


def test_no_signature_without_gradients():
    params = params_of()
    params[2].grad = None
    assert look.signature(params, []) is None
    assert look.plain_signature(params, []) is None


def test_swapped_tensors_are_looked_at_where_they_are_now():
    params = params_of()
    signature = look.signature(params, [])
    torch.utils.swap_tensors(params[0], copy.deepcopy(params[0]))
    params[0].grad = torch.ones(4, 5)
    assert look.addresses(params, [], signature) is None


@pytest.mark.parametrize("bad", [(1,), ([torch.ones(1)], "text"), ([1],), ()])
def test_bad_calls_are_refused(bad):
    with pytest.raises((TypeError, AttributeError)):
        (look.addresses if len(bad) > 1 else look.signature)(*bad)


def transpose(tensor):
    tensor.data = tensor.data.t()


def widen(tensor):
    tensor.data = tensor.data.double()


@pytest.mark.parametrize("change", [transpose, widen, torch.Tensor.share_memory_])
def test_both_looks_see_a_change_of_state(change):
    state = [torch.zeros(()), torch.ones(4, 4), torch.ones(3)]
    looks = (look.signature, look.addresses), (look.plain_signature, look.plain_addresses)
    signatures = [sign([], state) for sign, _ in looks]
    parts = [look.joined([sign([], [tensor]) for tensor in state]) for sign, _ in looks]
    assert signatures == parts
    fits = [check([], state, known) for (_, check), known in zip(looks, signatures, strict=True)]
    assert fits == [b"", b""]
    change(state[1])
    fits = [check([], state, known) for (_, check), known in zip(looks, signatures, strict=True)]
    assert fits == [None, None]


@pytest.mark.parametrize("bump", [look.bump_versions, look.plain_bump_versions])
def test_versions_are_raised_by_one(bump):
    tensors = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    before = [tensor._version for tensor in tensors]
    bump(tensors)
    assert [tensor._version for tensor in tensors] == [version + 1 for version in before]


def test_same_is_identity():
    a, b = [object(), object()], [object()]
    assert look.same(a, list(a))
    assert not look.same(a, b)
    assert not look.same(a, a[::-1])
    assert look.plain_same(a, list(a))
    assert not look.plain_same(a, a[::-1])


def test_a_step_refuses_tables_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        look.native.step(b"", b"", b"", b"", 0, 2, 2, 2, 0, 1, 0)
