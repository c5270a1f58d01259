"""compact=True for parameters that a library has flattened to one dimension."""

import cases
import pytest
import torch
from cases import each_class, each_fast_backend
from compact_runs import build, noisy_grads, state_bytes
from short_runs import same_bits
from torch import nn

from cubegrad import MADGRAD, codec, memory
from cubegrad.state import blocks

# Whole blocks, a short last block, and more than is stepped at a time where no kernel does it.
LENGTHS = [codec.LEAST_FLAT, codec.LEAST_FLAT + 37, blocks.PIECE + 300]
DTYPES = [torch.float32, torch.bfloat16]


def run(cls, params, backend, **options):
    optimizer = build(cls, params, backend, lr=0.05, weight_decay=0.01, **options)
    for k in range(3):
        noisy_grads(params, k)
        optimizer.step()
    return optimizer


def params_of(shapes, dtype, device="cpu"):
    return [
        cases.parameter(cases.randn((shape[-1],), dtype, i).view(shape), device)
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("momentum", [0.9, pytest.param(0.0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_class
@each_fast_backend
def test_a_vector_has_the_codes_of_one_row(backend, cls, dtype, momentum):
    lengths = LENGTHS[:2] if backend.device == "cpu" and backend.name == "triton" else LENGTHS
    states = []
    for shapes in ([(n,) for n in lengths], [(1, n) for n in lengths]):
        params = params_of(shapes, dtype, backend.device)
        optimizer = run(cls, params, backend, momentum=momentum)
        tensors = [t for p in params for t in (p, *optimizer.state[p].values())]
        states.append([tensor.detach().reshape(-1) for tensor in tensors])
        assert all(state_bytes(optimizer, param) < 4.1 for param in params)
    assert same_bits(*([t.float() for t in tensors] for tensors in states))


@each_class
def test_a_saved_state_goes_on_bit_for_bit(cls):
    params = params_of([(n,) for n in LENGTHS], torch.float32)
    optimizer = run(cls, params, cases.NATIVE)
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    other = build(cls, twins, cases.NATIVE, lr=0.05, weight_decay=0.01)
    other.load_state_dict(optimizer.state_dict())
    for some, own in ((params, optimizer), (twins, other)):
        noisy_grads(some, 7)
        own.step()
    assert same_bits(params, twins)
    assert other.state[twins[1]]["root_scale"].shape == (257,)


@each_class
def test_a_vector_changes_its_form_and_back(cls):
    """A float32 state, as of an older checkpoint, becomes codes, and sums again."""
    params = params_of([(LENGTHS[1],)], torch.float32)
    optimizer = run(cls, params, cases.NATIVE, compact=False)
    squares = optimizer.state[params[0]]["grad_sq_sum"].clone()
    for form, name in ((True, "root_code"), (False, "grad_sq_sum")):
        optimizer.param_groups[0]["compact"] = form
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
        assert name in optimizer.state[params[0]]
    if cls is MADGRAD:  # a root's code has 6 bits of mantissa, or is its block's smallest
        found = optimizer.state[params[0]]["grad_sq_sum"]
        large = squares > squares.max() / 1000
        torch.testing.assert_close(found[large], squares[large], rtol=0.06, atol=0)


def test_edited_weights():
    params = params_of([(LENGTHS[1],)], torch.float32)
    optimizer = run(MADGRAD, params, cases.NATIVE)
    mask = torch.arange(len(params[0])) % 3 > 0
    with optimizer.edit_weights(keep_momentum=False):
        params[0].mul_(mask)
    for _ in range(3):
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
    assert (params[0][~mask] == 0).all()


@pytest.mark.parametrize("length", [4096, codec.LEAST_FLAT - 1])
def test_norms_and_biases_keep_their_sums(length):
    params = params_of([(length,)], torch.float32)
    optimizer = run(MADGRAD, params, cases.NATIVE)
    assert "grad_sum" in optimizer.state[params[0]]


@pytest.mark.parametrize(("gpus", "is_coded"), [(1, True), (2, True), (3, False), (257, False)])
def test_the_estimate_knows_which_shards_have_whole_blocks(gpus, is_coded):
    rows = memory.estimate([(2**17,)], gpus=gpus).rows
    kept = next(row.state for row in rows if row.optimizer == "MADGRAD compact")
    assert (kept < 4.1 * 2**17 / gpus) == is_coded


def test_a_model_that_stays_uncoded_is_warned_of_once():
    flat = nn.Parameter(torch.ones(2**20, dtype=torch.float64))
    narrow = nn.Parameter(torch.ones(2**12, 16))
    optimizer = MADGRAD([("flat", flat), ("narrow", narrow)], compact=True)
    optimizer.step()  # without gradients nothing is said: a lazy module may have no shapes yet
    flat.grad, narrow.grad = torch.ones_like(flat), torch.ones_like(narrow)
    message = r"1,114,112 of 1,114,112 .*float64, such as flat .*less than 64, such as narrow"
    with pytest.warns(UserWarning, match=message) as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    optimizer.step()


def test_a_model_that_is_mostly_coded_is_not_warned_of():
    """Nor are one that is small and one that does not ask for codes: warnings are errors here."""
    large = nn.Parameter(torch.ones(2**11, 2**10))
    odd = nn.Parameter(torch.ones(2**20, dtype=torch.float64))
    small = nn.Parameter(torch.ones(2**12, 16))
    for params, compact_wanted in (([large, odd], True), ([small], True), ([odd], False)):
        optimizer = MADGRAD(params, compact=compact_wanted)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 1


def test_released_gradients_are_warned_of_as_well():
    param = nn.Parameter(torch.ones(2**17, 16))
    optimizer = MADGRAD([param], compact=True)
    optimizer.release_gradients()
    param.sum().backward()
    with pytest.warns(UserWarning, match="compact=True saves little here"):
        optimizer.step()
