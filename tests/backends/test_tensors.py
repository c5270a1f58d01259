"""The checks of a repeated step: those in C notice what those in Python notice."""

import copy

import pytest
import torch

from cubegrad.backends.native import tensors

if tensors.addresses is tensors.plain_addresses:
    pytest.skip("the extension is not built", allow_module_level=True)


def params_with_grads():
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


def other_shape(params):
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
    "another shape": (other_shape, False),
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
def test_c_and_python_agree(change):
    arrange, still_fits = CHANGES[change]
    params = params_with_grads()
    quick, plain = tensors.signature(params, []), tensors.plain_signature(params, [])
    arrange(params)
    addresses = tensors.addresses(params, [], quick)
    assert addresses == tensors.plain_addresses(params, [], plain)
    assert (addresses is not None) == still_fits
    if still_fits:
        decoded = [int.from_bytes(addresses[i : i + 8], "little") for i in range(0, 48, 8)]
        assert decoded == [param.grad.data_ptr() for param in params]


def test_strides_exchanged_in_place_are_seen():
    param = torch.nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4)
    quick, plain = tensors.signature([param], []), tensors.plain_signature([param], [])
    param.data = param.data.t()  # the same address
    assert tensors.addresses([param], [], quick) is None
    assert tensors.plain_addresses([param], [], plain) is None


def test_no_signature_without_gradients():
    params = params_with_grads()
    params[2].grad = None
    assert tensors.signature(params, []) is None
    assert tensors.plain_signature(params, []) is None


def test_swapped_tensors_are_noticed():
    params = params_with_grads()
    signature = tensors.signature(params, [])
    torch.utils.swap_tensors(params[0], copy.deepcopy(params[0]))
    params[0].grad = torch.ones(4, 5)
    assert tensors.addresses(params, [], signature) is None


@pytest.mark.parametrize("bad", [(1,), ([torch.ones(1)], "text"), ([1],), ()])
def test_bad_calls_are_refused(bad):
    with pytest.raises((TypeError, AttributeError)):
        (tensors.addresses if len(bad) > 1 else tensors.signature)(*bad)


def transpose(tensor):
    tensor.data = tensor.data.t()


def widen(tensor):
    tensor.data = tensor.data.double()


@pytest.mark.parametrize("change", [transpose, widen, torch.Tensor.share_memory_])
def test_c_and_python_notice_a_change_of_state(change):
    state = [torch.zeros(()), torch.ones(4, 4), torch.ones(3)]
    in_c = tensors.signature, tensors.addresses
    both = in_c, (tensors.plain_signature, tensors.plain_addresses)
    signatures = [sign([], state) for sign, _ in both]
    parts = [tensors.joined([sign([], [tensor]) for tensor in state]) for sign, _ in both]
    assert signatures == parts
    fits = [check([], state, known) for (_, check), known in zip(both, signatures, strict=True)]
    assert fits == [b"", b""]
    change(state[1])
    fits = [check([], state, known) for (_, check), known in zip(both, signatures, strict=True)]
    assert fits == [None, None]


@pytest.mark.parametrize("bump", [tensors.bump_versions, tensors.plain_bump_versions])
def test_versions_are_raised_by_one(bump):
    params = [torch.ones(2), torch.nn.Parameter(torch.ones(3))]
    before = [param._version for param in params]
    bump(params)
    assert [param._version for param in params] == [version + 1 for version in before]


def test_same_objects_compares_by_identity():
    a, b = [object(), object()], [object()]
    assert tensors.same_objects(a, list(a))
    assert not tensors.same_objects(a, b)
    assert not tensors.same_objects(a, a[::-1])
    assert tensors.plain_same_objects(a, list(a))
    assert not tensors.plain_same_objects(a, a[::-1])


def test_a_step_refuses_tables_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        tensors.native.step(b"", b"", b"", b"", 0, 2, 2, 2, 0, 0, 1, 0)
