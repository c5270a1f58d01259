"""Calls of AdamW, as scripts and configurations have them, build MADGRADW."""

import copy
import inspect

import cases
import pytest
import torch
from short_runs import advance, ones

from cubegrad import MADGRADW, cautions, param_groups

NUMBERS = ("lr", "momentum", "eps", "weight_decay")


def numbers(optimizer):
    return [tuple(group[name] for name in NUMBERS) for group in optimizer.param_groups]


@pytest.fixture(autouse=True)
def _not_warned(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(cautions, "_has_warned_of_betas", False)


ignore_betas = pytest.mark.filterwarnings("ignore:AdamW's beta2:UserWarning")


def test_the_arguments_of_adamw_are_taken_in_its_order_and_with_its_defaults():
    torchs = inspect.signature(torch.optim.AdamW).parameters
    positional = [p for p in torchs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    own = list(inspect.signature(MADGRADW).parameters.values())
    renamed = {"betas": "momentum"}
    assert [renamed.get(p.name, p.name) for p in positional] == [p.name for p in own][:6]
    for theirs, mine in zip(positional, own, strict=False):
        first = theirs.default[0] if theirs.name == "betas" else theirs.default
        assert mine.default == first
    flags = {name: False for name, p in torchs.items() if p.kind is p.KEYWORD_ONLY}
    MADGRADW([ones()], **flags)


CALLS = {
    "by name": lambda params: MADGRADW(params, lr=2e-3, betas=(0.8, 0.95), weight_decay=0.1),
    "by position": lambda params: MADGRADW(params, 2e-3, (0.8, 0.95), 1e-8, 0.1, False),
    "a list": lambda params: MADGRADW(params, lr=2e-3, betas=[0.8, 0.95], weight_decay=0.1),
    "in groups": lambda params: MADGRADW(
        [{"params": params, "betas": (0.8, 0.95), "amsgrad": False}], 2e-3, weight_decay=0.1
    ),
    "yaml": lambda params: MADGRADW(
        params,
        **pytest.importorskip("yaml").safe_load(
            "{lr: 0.002, betas: [0.8, 0.95], eps: 1.0e-8, weight_decay: 0.1, amsgrad: false, "
            "maximize: false, foreach: null, fused: null, capturable: false}"
        ),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_betas_give_the_momentum_with_one_warning_at_the_users_line(call):
    with pytest.warns(UserWarning, match=r"beta2=0.95 has no counterpart .*momentum=0.8") as caught:
        optimizers = [CALLS[call]([ones(3)]) for _ in range(2)]
    assert [warning.filename for warning in caught] == [__file__]
    for optimizer in optimizers:
        assert numbers(optimizer) == [(2e-3, 0.8, 1e-8, 0.1)]
        assert not {"betas", "amsgrad"} & set(optimizer.param_groups[0])


@ignore_betas
def test_groups_have_betas_of_their_own():
    optimizer = MADGRADW([{"params": [ones()], "betas": (0.5, 0.9)}, {"params": [ones()]}])
    optimizer.add_param_group({"params": [ones()], "betas": [0.0, 0.9], "lr": 0.5})
    assert [group["momentum"] for group in optimizer.param_groups] == [0.5, 0.9, 0.0]
    optimizer = MADGRADW(param_groups(torch.nn.Linear(3, 3), weight_decay=0.3), betas=(0.7, 0.9))
    assert numbers(optimizer) == [(1e-3, 0.7, 1e-8, 0.3), (1e-3, 0.7, 1e-8, 0.0)]


@ignore_betas
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (0.9, ValueError, r"betas=0\.9 must be two numbers, .*; use momentum=0\.9"),
        ((0.9, 0.95, 0.99), ValueError, r"betas=\(0\.9, 0\.95, 0\.99\) must be two numbers"),
        ((0.9, "0.95"), TypeError, r"betas\[1\]='0\.95' \(str\) must be one number; pass momentum"),
        ((1.0, 0.999), ValueError, r"momentum=1\.0 must be in \[0, 1\); use 0\.9"),
        (("0.9", 0.999), TypeError, r"momentum='0\.9' \(str\) must be one number"),
    ],
)
def test_betas_that_are_none_are_refused(bad, error, message):
    with pytest.raises(error, match=message):
        MADGRADW([ones()], betas=bad)
    optimizer = MADGRADW([ones()])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [ones()], "betas": bad})
    assert len(optimizer.param_groups) == 1


def test_amsgrad_is_refused():
    with pytest.raises(TypeError, match="MADGRADW has no amsgrad; leave it out"):
        MADGRADW([ones()], amsgrad=True)
    with pytest.raises(TypeError, match="MADGRADW has no amsgrad; leave it out"):
        MADGRADW([{"params": [ones()], "amsgrad": True}])


@pytest.mark.parametrize("steps", [0, 3])
@cases.each_fast_backend
def test_betas_put_into_a_group_later_are_refused(backend, steps):
    """A step would have gone on with the old momentum; a fused one that repeats itself too."""
    param = cases.parameter(torch.ones(5), backend.device)
    optimizer = advance(cases.build(cases.MADGRADW, backend, [param], {}), [param], range(steps))
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    param.grad = torch.ones_like(param)
    with (
        cases.no_change(param),
        pytest.raises(ValueError, match=r"betas=\(0\.5, 0\.9\) since it was added.*set its mom"),
    ):
        optimizer.step()
    del optimizer.param_groups[0]["betas"]
    optimizer.step()
    assert optimizer.state[param]["step"] == steps + 1


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_beta1_cycle_the_momentum(scheduler):
    optimizer = MADGRADW([ones(3)], lr=0.1)
    if scheduler == "OneCycleLR":
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, max_momentum=0.95)
    else:
        schedule = torch.optim.lr_scheduler.CyclicLR(
            optimizer, 0.01, 0.1, 3, base_momentum=0.85, max_momentum=0.95
        )
    seen = []
    for _ in range(6):
        advance(optimizer, optimizer.param_groups[0]["params"], [0])
        seen.append(optimizer.param_groups[0]["momentum"])
        schedule.step()
    assert seen[0] == pytest.approx(0.95)
    assert min(seen) == pytest.approx(0.85)


def test_jax_takes_b1_and_b2_with_one_warning():
    optax = pytest.importorskip("optax")
    cubegrad_optax = pytest.importorskip("cubegrad.optax")
    with pytest.warns(UserWarning, match=r"beta2=0.95 has no counterpart") as caught:
        txs = [cubegrad_optax.madgradw(0.1, b1=0.8, b2=0.95) for _ in range(2)]
    assert [warning.filename for warning in caught] == [__file__]
    plain = cubegrad_optax.madgradw(0.1, momentum=0.8)
    params = {"w": torch.ones(3).numpy()}
    expected = plain.update(params, plain.init(params), params)[0]
    for tx in txs:
        moves = tx.update(params, tx.init(params), params)[0]
        assert (moves["w"] == expected["w"]).all()
    theirs = inspect.signature(optax.adamw).parameters
    ours = inspect.signature(cubegrad_optax.madgradw).parameters
    for name in ("learning_rate", "b1", "b2", "eps", "weight_decay", "mask"):
        assert name in ours
        if name in ("eps", "weight_decay", "mask"):
            assert ours[name].default == theirs[name].default


def test_a_copy_keeps_the_momentum_of_its_betas():
    with pytest.warns(UserWarning, match="beta2"):
        optimizer = MADGRADW([ones()], betas=(0.6, 0.9))
    assert copy.deepcopy(optimizer).param_groups[0]["momentum"] == 0.6
