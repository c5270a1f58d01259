"""State dicts with entries of other code, and what a run that does not keep x_0 saves of it."""

import copy

import pytest
import torch
from short_runs import advance, cloned, ones, parameters, same_bits, through_a_file
from torch import nn

from cubegrad import MADGRAD, MADGRADW, MirrorMADGRAD, family

OPTIMIZERS = [MADGRAD, MirrorMADGRAD, MADGRADW, family.MADGRAD]
each_optimizer = pytest.mark.parametrize(
    "cls", OPTIMIZERS, ids=lambda cls: f"{cls.__module__}.{cls.__name__}"
)


def two(dtype=torch.float32):
    return parameters([(4, 3), (5,)], dtype)


class Lookahead:
    """A wrapper that keeps its slow weights in the state of the optimizer it wraps."""

    def __init__(self, base):
        self.base = base

    def step(self, k):
        for group in self.base.param_groups:
            for param in group["params"]:
                state = self.base.state[param]
                slow = state.setdefault("slow_buffer", param.detach().clone())
                if k % 3 == 2:
                    slow.add_(param.detach() - slow, alpha=0.5)
                    param.data.copy_(slow)

    def advance(self, params, first, last):
        for k in range(first, last):
            advance(self.base, params, [k])
            self.step(k)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_wrapper_that_keeps_its_weights_in_the_state_resumes(cls, dtype):
    params = two(dtype)
    run = Lookahead(cls(params, lr=0.1))
    run.advance(params, 0, 5)
    saved = through_a_file(
        {"params": [p.detach().clone() for p in params], "optimizer": run.base.state_dict()}
    )
    run.advance(params, 5, 10)
    resumed = [nn.Parameter(p) for p in saved["params"]]
    again = Lookahead(cls(resumed, lr=0.7))
    again.base.load_state_dict(saved["optimizer"])
    again.advance(resumed, 5, 10)
    assert same_bits(params, resumed)
    for p, q in zip(params, resumed, strict=True):
        assert run.base.state[p].keys() == again.base.state[q].keys()


@each_optimizer
def test_foreign_entries_are_copied_with_their_dtype(cls):
    params = two(torch.bfloat16)
    optimizer = advance(cls(params), params, range(1))
    fine = torch.tensor([1.0, 1.0 + 2**-20])
    added = {"fine": fine, "count": torch.tensor(7), "nested": {"a": [fine, 3]}, "name": "x"}
    optimizer.state[params[0]].update(copy.deepcopy(added))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    state = optimizer.state[params[0]]
    assert torch.equal(state["fine"], fine)
    assert state["count"].dtype == torch.int64
    assert torch.equal(state["nested"]["a"][0], fine)
    assert (state["nested"]["a"][1], state["name"]) == (3, "x")
    state["fine"].zero_()
    state["nested"]["a"][0].zero_()
    assert torch.equal(saved["state"][0]["fine"], fine)
    assert torch.equal(saved["state"][0]["nested"]["a"][0], fine)


@each_optimizer
def test_foreign_entries_go_to_the_parameters_device(cls):
    param = ones(3)
    saved = advance(cls([param]), [param], range(1)).state_dict()
    saved["state"][0]["ema"] = torch.ones(3)
    elsewhere = nn.Parameter(torch.ones(3, device="meta"))
    other = cls([elsewhere])
    other.load_state_dict(saved)
    assert other.state[elsewhere]["ema"].is_meta
    assert other.state[elsewhere]["grad_sq_sum"].is_meta


@each_optimizer
def test_a_parameter_with_only_foreign_entries_counts_as_never_stepped(cls):
    params = two()
    optimizer = cls(params)
    optimizer.state[params[0]]["ema"] = torch.ones(4, 3)
    optimizer.state[params[1]]  # an empty dict
    twins = two()
    other = cls(twins)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.state[twins[0]].keys() == {"ema"}
    assert other.state[twins[1]] == {}


@each_optimizer
def test_state_that_belongs_to_no_parameter_is_saved_and_loaded(cls):
    params = two()
    optimizer = advance(cls(params), params, range(2))
    optimizer.register_state_dict_pre_hook(lambda o: o.state.update(test=1, more={"a": [2]}))
    saved = optimizer.state_dict()
    assert saved["state"]["test"] == 1
    twins = cloned(params)
    other = cls(twins)
    other.load_state_dict(through_a_file(saved))
    assert other.state["test"] == 1
    other.state["more"]["a"].append(3)
    assert saved["state"]["more"] == {"a": [2]}
    advance(optimizer, params, range(2, 4))
    advance(other, twins, range(2, 4))
    assert same_bits(params, twins)


@each_optimizer
def test_a_hook_may_replace_a_state_dict(cls):
    params = two()
    optimizer = advance(cls(params), params, range(1))
    for made in ({"mine": 3}, {"state": 3}, {"state": {}, "param_groups": [{}]}, [1]):
        handle = optimizer.register_state_dict_post_hook(lambda *_, made=made: made)
        assert optimizer.state_dict() == made
        handle.remove()
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda *_: {})
    with pytest.raises(ValueError, match="has no dict 'state'"):
        optimizer.load_state_dict(saved)


@each_optimizer
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_run_that_diverged_can_be_saved_and_loaded(cls, value):
    params = two()
    optimizer = advance(cls(params), params, range(1))
    optimizer.state[params[0]]["grad_sq_sum"][1, 2] = value
    twins = two()
    other = cls(twins)
    other.load_state_dict(optimizer.state_dict())
    loaded, expected = other.state[twins[0]], optimizer.state[params[0]]
    torch.testing.assert_close(dict(loaded), dict(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cls", [MADGRAD, MirrorMADGRAD, MADGRADW])
def test_a_negative_sum_of_squares_is_refused_in_either_part_of_a_complex_parameter(cls):
    param = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = advance(cls([param]), [param], range(1))
    for wrong in (-1 + 0j, 0 - 1j):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["grad_sq_sum"][2] = wrong
        with pytest.raises(ValueError, match=r"grad_sq_sum of parameter 0 is -1\.0"):
            optimizer.load_state_dict(saved)


@each_optimizer
def test_the_state_of_an_empty_parameter_is_loaded(cls):
    param = ones(0, 3)
    optimizer = advance(cls([param]), [param], range(2))
    other = cls([param])
    other.load_state_dict(optimizer.state_dict())
    assert other.state[param]["step"] == 2


@each_optimizer
def test_one_key_for_two_parameters_is_refused(cls):
    params = [ones(3), ones(3)]
    optimizer = advance(cls(params), params, range(1))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["params"] = [0, 0]
    with pytest.raises(ValueError, match="lists 0 for two parameters"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["params"] = [0, 1]
    optimizer.load_state_dict(saved)
    assert optimizer.state[params[1]]["step"] == 1


def test_one_key_for_a_parameter_that_is_listed_twice():
    param = ones(3)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = MADGRAD([param, param])
    param.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    assert len(set(saved["param_groups"][0]["params"])) == 1
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[param]["step"], saved["state"][1]["step"])


AUTO = {
    "some groups": (MADGRAD, [True, False], r"have auto_lr=\[True, False\]; it must be the same"),
    "the mirror form": (
        MirrorMADGRAD,
        [True, True],
        "lr='auto' needs x_0, which mirror_madgrad does not",
    ),
    "MADGRADW": (MADGRADW, [True, True], "madgradw gives the same buffers another meaning"),
    "none": (MADGRAD, [False, False], r"saved with lr=1\.0, and the optimizer .* lr='auto'"),
}


@pytest.mark.parametrize("name", AUTO)
def test_loading_cannot_switch_between_a_given_and_an_estimated_lr(name):
    cls, modes, message = AUTO[name]
    params = two()
    optimizer = advance(MADGRAD([{"params": [p]} for p in params], lr="auto"), params, range(2))
    saved = optimizer.state_dict()
    for group, mode in zip(saved["param_groups"], modes, strict=True):
        group["auto_lr"] = mode
    other = optimizer if cls is MADGRAD else cls([{"params": [p]} for p in params])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    after = other.state_dict()
    assert str(after) == str(before)


def with_momentum_raised(momentum, dtype=torch.float32, **options):
    """Four steps without momentum, four with: unbroken, and saved and loaded in between."""
    ends = []
    for how in ("unbroken", "resumed"):
        params = two(dtype)
        optimizer = advance(MADGRAD(params, lr=0.1, momentum=0.0, **options), params, range(4))
        optimizer.param_groups[0]["momentum"] = momentum
        if how == "resumed":
            keys = [set(optimizer.state[p]) for p in params]
            saved = through_a_file(optimizer.state_dict())
            assert [set(optimizer.state[p]) for p in params] == keys
            assert all("initial_param" in saved["state"][i] for i in range(2))
            optimizer = MADGRAD(params)
            optimizer.load_state_dict(saved)
        advance(optimizer, params, range(4, 8))
        ends.append(params)
    return ends


@pytest.mark.parametrize("momentum", [0.9, torch.tensor(0.9)], ids=["float", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_momentum_raised_before_saving_resumes_bit_for_bit(momentum, dtype, decay):
    unbroken, resumed = with_momentum_raised(
        momentum, dtype=dtype, weight_decay=decay, decoupled_weight_decay=bool(decay)
    )
    assert same_bits(unbroken, resumed)


def test_momentum_raised_after_loading_recovers_x_0():
    params, twins = two(torch.float64), two(torch.float64)
    starts = [p.detach().clone() for p in params]
    optimizer = advance(MADGRAD(params, lr=0.1, momentum=0.0), params, range(4))
    with torch.no_grad():
        for p, q in zip(params, twins, strict=True):
            q.copy_(p)
    other = MADGRAD(twins)
    other.load_state_dict(optimizer.state_dict())
    other.param_groups[0]["momentum"] = 0.9
    advance(other, twins, range(4, 5))
    for q, start in zip(twins, starts, strict=True):
        torch.testing.assert_close(other.state[q]["initial_param"], start, rtol=0, atol=1e-12)


def test_a_checkpoint_without_momentum_loads_into_half_precision():
    params = two()
    optimizer = advance(MADGRAD(params, lr=0.1, momentum=0.0), params, range(4))
    assert not any("initial_param" in optimizer.state[p] for p in params)
    halves = [nn.Parameter(p.detach().bfloat16()) for p in params]
    other = MADGRAD(halves)
    other.load_state_dict(optimizer.state_dict())
    advance(optimizer, params, range(4, 8))
    advance(other, halves, range(4, 8))
    for p, q in zip(params, halves, strict=True):
        torch.testing.assert_close(p, q.float(), rtol=0, atol=0.03)


def test_a_flattened_checkpoint_may_have_an_empty_x_0_only_without_momentum():
    params = two()
    groups = [{"params": [params[0]], "momentum": 0.0}, {"params": [params[1]]}]
    optimizer = advance(MADGRAD(groups, lr=0.1), params, range(2))
    saved = optimizer.state_dict()
    saved["state"][0]["initial_param"] = {}
    optimizer.load_state_dict(saved)
    assert "initial_param" not in optimizer.state[params[0]]
    saved["state"][1]["initial_param"] = {}
    with pytest.raises(ValueError, match=r"parameter 1 has no initial_param, .*momentum=0\.9"):
        optimizer.load_state_dict(saved)
