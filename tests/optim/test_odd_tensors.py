"""Tensors that are unusual in memory: shrunk, shared, negated, or without a version."""

import cases
import pytest
import torch
from short_runs import FusedAndEager, ones, parameters, set_grads

from cubegrad import MADGRAD
from cubegrad.backends import spans
from cubegrad.backends.native import tensors

SHAPES = [(8, 8), (30,), (5, 5), (3,)]
IMPLEMENTATIONS = [{"fused": True}, {"foreach": False}, {"foreach": True}]


@pytest.mark.parametrize(("which", "size"), [("grad_sum", 64), ("grad", 64), ("grad", 0)])
def test_a_storage_that_became_smaller_is_refused(which, size):
    """Even where it stays at its address."""
    param = ones(400)
    optimizer = MADGRAD([param])
    for _ in range(3):
        param.grad = torch.ones(400)
        optimizer.step()
    tensor = param.grad if which == "grad" else optimizer.state[param][which]
    tensor.untyped_storage().resize_(size)
    with cases.no_change(param), pytest.raises(ValueError, match=f"storage of {size} bytes"):
        optimizer.step()


def test_a_parameter_with_more_elements_than_its_gradient_is_refused():
    param, other = ones(4), ones(4)
    optimizer = MADGRAD([{"params": [other]}, {"params": [param]}])
    for _ in range(2):
        param.grad, other.grad = torch.ones(4), torch.ones(4)
        optimizer.step()
    param.data = torch.ones(400)
    with cases.no_change(param, other), pytest.raises(ValueError, match=r"\(4,\).*\(400,\)"):
        optimizer.step()


def test_a_gradient_without_memory_is_zero():
    """Forward-mode differentiation makes such tensors."""

    def set_zero(params, _):
        params[1].grad = torch._efficientzerotensor(tuple(params[1].shape))

    pair = FusedAndEager(SHAPES)
    for _ in range(2):
        pair.step()
        pair.step(set_zero)
    pair.assert_close()


def test_weights_that_are_negated_in_place():
    def negate(params, _):
        params[1].data = torch._neg_view(params[1].data.clone())

    pair = FusedAndEager(SHAPES)
    pair.step(times=2)
    pair.step(negate)
    pair.step()
    pair.assert_close()


def test_a_negated_gradient_at_an_address_seen_before():
    """`c.imag` and `c.conj().imag` have one address and opposite signs."""
    value = torch.ones(1, dtype=torch.complex64) * 2j
    results = []
    for flags in IMPLEMENTATIONS[:2]:
        param = torch.nn.Parameter(torch.zeros(1))
        optimizer = MADGRAD([param], lr=0.1, **flags)
        for k in range(6):
            param.grad = (value if k < 3 else value.conj()).imag
            optimizer.step()
        results.append(param.detach())
    assert (tensors.addresses is tensors.plain_addresses) or param.grad.is_neg()
    torch.testing.assert_close(*results)


@cases.each_class
@pytest.mark.parametrize("shared", ["gradient", "twice", "views", "grads"])
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_tensors_that_share_memory_are_stepped_one_after_the_other(shared, cls):
    """As torch.optim does without `fused`."""
    results = []
    for flags in IMPLEMENTATIONS[:2]:
        params = parameters([(6,), (6,)])
        if shared == "twice":
            params.append(params[0])
        if shared == "views":
            params.append(torch.nn.Parameter(params[0].data[2:]))
        optimizer = cls(params, lr=0.1, **flags)
        for k in range(4):
            set_grads(params, k)
            if shared == "gradient" and k % 2:
                params[0].grad = params[0].detach()
            if shared == "grads":
                params[0].grad = params[1].grad
            optimizer.step()
        results.append([param.detach().clone() for param in params])
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-5, atol=1e-6)


def test_the_searches_for_shared_memory_agree():
    room = torch.zeros(1000)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        cuts = torch.randint(0, 990, (6,), generator=generator).tolist()
        written = [room[cut : cut + 10] for cut in sorted({cut // 20 * 20 for cut in cuts[:4]})]
        grads = [room[cut : cut + 5] for cut in cuts[4:]]
        own = [spans.span(w) for w in written], [spans.span(g) for g in grads]
        expected = any(spans.overlap(w, g) for w in own[0] for g in own[1])
        addresses = b"".join(g.data_ptr().to_bytes(8, "little") for g in grads)
        packed = spans.packed(own[0]), spans.lengths(own[1]), addresses
        assert tensors.any_within(*packed) == expected
        assert tensors.plain_any_within(*packed) == expected
        assert spans.any_overlap(*own) == expected
        seen.add(expected)
    assert seen == {True, False}
    assert spans.any_overlap([(0, 5), (4, 8)], [])
    assert not spans.any_overlap([(0, 5)], [(5, 9), (6, 10), (0, 0), (3, 3)])
    assert spans.span(room.view(10, 100)[2:4, 5:9]) == (
        room.data_ptr() + 4 * 205,
        room.data_ptr() + 4 * 309,
    )


@pytest.mark.parametrize("flags", IMPLEMENTATIONS, ids=str)
def test_autograd_notices_that_weights_were_written_to(flags):
    param = ones(3)
    optimizer = MADGRAD([param], **flags)
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
        out = (param * param).sum()
        version = param._version
        optimizer.step()
        assert param._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_inference_tensors_have_no_version_and_are_stepped():
    with torch.inference_mode():
        param = torch.ones(3)
        param.grad = torch.ones(3)
        optimizer = MADGRAD([param], fused=True)
        for _ in range(3):
            optimizer.step()
        assert (param < 1).all()
        assert optimizer.state[param]["step"] == 3
